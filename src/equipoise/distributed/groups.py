"""The process groups that a run owns: named, built in one order on all ranks, forgotten without a trace.

`GroupRegistry` owns WORLD and every group made through it, as raw `torch.distributed` groups, so that
DeviceMesh (`from_group`), DTensor, FSDP and functional collectives work with them. It keeps the specification
of each, so that all can be destroyed and rebuilt under a new generation: see `equipoise.distributed.parking`.
Users therefore look groups up by name, also the group of all ranks, and use neither WORLD nor
`torch.distributed.new_group`.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import distributed_c10d as c10d

from equipoise.accelerator import Accelerator
from equipoise.distributed.backends import resolve_backend
from equipoise.distributed.status import shorten_ranks
from equipoise.errors import ConfigError

Options = Callable[[], Any]
"""Makes what `new_group` takes as `pg_options`, say a `ProcessGroupNCCL.Options`; anew for each group."""


@dataclass(frozen=True)
class GroupSpec:
    """What a set of groups is made from: one group for each list in `partition`, under one name.

    `backend` is the string for torch (for one device type, or composite); `timeout_s` is the backend's
    timeout. `number` is torch's name of the first group; the others count on. A list becomes empty when its
    group is destroyed by other means than the registry's.
    """

    name: str
    partition: tuple[tuple[int, ...], ...]
    backend: str
    timeout_s: float
    options: Options | None = field(default=None, compare=False)
    number: int = field(default=0, compare=False)

    def describe(self) -> str:
        """One line; equal for equal specifications and for no others."""
        digest = hashlib.sha256(json.dumps(self.partition).encode()).hexdigest()[:16]
        ranks = f"{len(self.partition)} x [{shorten_ranks(self.partition[0])}]"
        return f'"{self.name}" ({ranks}, {self.backend}, timeout {self.timeout_s:g} s, {digest})'


class _Parked:
    """Stands where a process group was, while it is parked."""

    def __getattr__(self, name: str) -> Any:
        raise ConfigError(PARKED)


PARKED = "the process groups are parked: call unpark(world) on every rank before using them"


class GroupRegistry:
    """Makes and owns WORLD and all other groups of this process. Methods that make groups are collective.

    `store` outlives the groups; each generation of groups uses a prefix of its own in it. `operation` (of a
    Watch) names what this rank does while it makes groups.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        *,
        accelerator: Accelerator,
        timeout_s: float,
        operation: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.rank, self.size = rank, size
        self.backend, self.timeout_s = resolve_backend(None, accelerator), timeout_s
        self.generation = 0
        self._accelerator = accelerator
        self._store = store
        self._operation = operation
        self._specs: dict[str, GroupSpec] = {}  # in the order of creation
        self._groups: dict[str, dist.ProcessGroup] = {}  # those that this rank is a member of
        self._made = 0  # collective calls in this generation
        self._held: list[tuple[dict[str, Any], str, str]] | None = None  # while parked: what to fill again
        self._count = 0  # while parked: torch's number of the next group

    @property
    def parked(self) -> bool:
        """Whether all groups are parked."""
        return self._held is not None

    def open(self) -> None:
        """Initializes WORLD under a new generation. Collective."""
        self._open(self.backend)

    def create(
        self,
        name: str,
        ranks: Sequence[int],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        options: Options | None = None,
    ) -> dist.ProcessGroup | None:
        """Makes one group of `ranks` (ascending, global). All ranks of WORLD call it, in the same order.

        `backend`: WORLD's by default; "nccl" stands for the accelerator's transport. Returns the group, or None
        on a rank that is not a member. Raises ConfigError, before any rank can hang, when a name is taken, ranks
        are malformed, or the ranks' calls differ.
        """
        return self.create_partition(name, [ranks], backend=backend, timeout_s=timeout_s, options=options, whole=False)

    def create_partition(
        self,
        name: str,
        partition: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        options: Options | None = None,
        whole: bool = True,
    ) -> dist.ProcessGroup:
        """Makes one group for each list of ranks, returns that of this rank; collective as `create`.

        The lists are disjoint and together hold every rank (`whole=False`: they need not, and None is
        returned on a rank that is in none).
        """
        self._refuse_parked()
        spec = GroupSpec(
            name,
            tuple(tuple(r) for r in partition),
            resolve_backend(backend, self._accelerator, self.backend),
            timeout_s or self.timeout_s,
            options,
            c10d._world.group_count,
        )
        self._check(spec, whole)
        with self._operation(f'make process group "{name}"'):
            self._check_same_on_all_ranks(spec)
            self._specs[name] = spec
            self._build(spec)
        return self._groups.get(name)  # type: ignore[return-value]

    def get(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name. Raises ConfigError if there is none, or while it is parked."""
        self._refuse_parked()
        if name not in self._groups:
            known = ", ".join(self._groups) or "none"
            raise ConfigError(f'no process group "{name}" on rank {self.rank}; there are: {known}')
        return self._groups[name]

    def is_member(self, name: str) -> bool:
        """Whether this rank is in a live group of that name."""
        return name in self._groups

    def names(self) -> list[str]:
        """Names of all groups in the order of creation, also of those that this rank is not a member of."""
        return list(self._specs)

    def ranks(self, name: str) -> list[int]:
        """Global ranks of this rank's group of that name."""
        return dist.get_process_group_ranks(self.get(name))

    def destroy(self, *, abort: bool = False) -> None:
        """Destroys every group but WORLD and forgets it. `abort`: a rank has failed, do not wait for it.

        A holder of a group (a mesh, an FSDP module) keeps its threads and sockets alive: drop those first.
        """
        for name in reversed(list(self._groups)):
            _destroy(self._groups.pop(name), abort)
        self._specs.clear()

    def close(self, *, abort: bool = False) -> None:
        """Destroys every group and WORLD. Twice is harmless."""
        self.destroy(abort=abort)
        self._held = None
        if dist.is_initialized():
            _destroy(dist.group.WORLD, abort)

    def park(self, tables: Iterable[dict[str, Any]] = ()) -> None:
        """Destroys WORLD and every group but keeps how they were made; a Gloo WORLD of its own stays meanwhile.

        Groups in `tables` (see `equipoise.distributed.parking`) are taken out and put back by `unpark`. Whoever
        keeps another reference finds that every collective on that group raises. Collective; twice is harmless.
        Raises ConfigError on all ranks if one has groups that are not the registry's: they could not come back.
        """
        if self.parked:
            return
        self._forget_destroyed(self._find_foreign())
        ends = [spec.number + len(spec.partition) for spec in self._specs.values()]
        self._held, self._count = [], max(c10d._world.group_count, *ends, 1)
        for table in tables:
            for key, value in table.items():
                if isinstance(value, dist.ProcessGroup):
                    self._held.append((table, key, value.group_name))
                    table[key] = _Parked()
        old = list(self._groups.values())
        self._groups.clear()
        if dist.group.WORLD is not None:  # it also destroys all others, in an order that suits every rank
            old.append(dist.group.WORLD)
            dist.destroy_process_group()
        for group in old:
            _disable(group)
        c10d._world.group_count = self._count  # no parked mesh may find the temporary WORLD under its group's name
        self._open("gloo")

    def unpark(self) -> None:
        """Rebuilds WORLD and every group, in order, with the same names, options and timeouts, in a new generation.

        Returns when all ranks have. Collective; twice is harmless.
        """
        if self._held is None:
            return
        self._meet("unpark")
        _destroy(dist.group.WORLD, abort=False)
        self._open(self.backend)
        for spec in self._specs.values():
            self._build(spec)
        c10d._world.group_count = self._count
        live: dict[str, dist.ProcessGroup] = {group.group_name: group for group in c10d._world.pg_map}
        for table, key, name in self._held:
            table[key] = live.get(name, table[key])
        self._held = None
        self._meet("unparked")

    def _open(self, backend: str) -> None:
        self.generation += 1
        self._made = 0
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(f"generation{self.generation}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def _build(self, spec: GroupSpec) -> None:
        for number, ranks in enumerate(spec.partition, spec.number):
            c10d._world.group_count = number  # becomes the group's name, by which meshes find it
            if not ranks:
                continue
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=spec.timeout_s),
                backend=spec.backend,
                pg_options=spec.options() if spec.options else None,
                group_desc=spec.name,
            )
            if self.rank in ranks:
                self._groups[spec.name] = group

    def _refuse_parked(self) -> None:
        if self.parked:
            raise ConfigError(PARKED)

    def _find_foreign(self) -> str:
        """What to say about live groups that the registry did not make; empty if there are none."""
        own = {dist.group.WORLD, *self._groups.values()}
        foreign = [dist.get_process_group_ranks(group) for group in c10d._world.pg_map if group not in own]
        if not foreign:
            return ""
        return (
            f"rank {self.rank} has process groups of ranks {[shorten_ranks(r) for r in foreign]} that were not made "
            "through world.groups, so they could not be rebuilt after parking: destroy them first, or make them there"
        )

    def _forget_destroyed(self, problem: str) -> None:
        """Meets all ranks. Groups that somebody destroyed with torch's own function are forgotten on all ranks."""
        key = f"generation{self.generation}/destroyed"
        for name, group in list(self._groups.items() if dist.is_initialized() else ()):
            if group not in c10d._world.pg_map:
                part = next(i for i, ranks in enumerate(self._specs[name].partition) if self.rank in ranks)
                self._store.set(f"{key}/{name}/{part}", "")
                self._store.set(key, "")
                del self._groups[name]
        self._meet("park", problem)
        if not self._store.check([key]):
            return
        for name, spec in list(self._specs.items()):
            left = [() if self._store.check([f"{key}/{name}/{i}"]) else r for i, r in enumerate(spec.partition)]
            self._specs[name] = replace(spec, partition=tuple(left))
            if not any(left):
                del self._specs[name]

    def _check(self, spec: GroupSpec, whole: bool) -> None:
        given = f'process group "{spec.name}" of ranks {[shorten_ranks(r) for r in spec.partition]}'
        if spec.name in self._specs:
            raise ConfigError(f'process group "{spec.name}" exists already: destroy it first, or choose another name')
        flat = [rank for ranks in spec.partition for rank in ranks]
        if any(not ranks or list(ranks) != sorted(set(ranks)) for ranks in spec.partition):
            raise ConfigError(f"{given}: each list must hold at least one rank, ascending, without repetition")
        if len(set(flat)) != len(flat):
            raise ConfigError(f"{given}: a rank is in two of the lists; they must be disjoint")
        if not set(flat) <= set(range(self.size)):
            raise ConfigError(f"{given}: ranks must be from 0 to {self.size - 1}")
        if whole and len(flat) != self.size:
            missing = shorten_ranks(sorted(set(range(self.size)) - set(flat)))
            raise ConfigError(f"{given}: ranks {missing} are in none of the lists; every rank must be in one")

    def _check_same_on_all_ranks(self, spec: GroupSpec) -> None:
        """Compares the call with the first rank's: different orders would hang or join the wrong ranks."""
        what = f"made{self._made}"
        self._made += 1
        key = f"generation{self.generation}/{what}"
        mine = spec.describe()
        if self._store.add(f"{key}/called", 1) == 1:
            self._store.set(key, mine)
        first = self._store.get(key).decode()
        problem = (
            "process groups are made in different order on different ranks: "
            f"rank {self.rank} makes {mine} where another makes {first}; make the same groups in the same order on "
            "every rank"
        )
        self._meet(what, problem if first != mine else "")

    def _meet(self, what: str, problem: str = "") -> None:
        """Waits for all ranks, in the store; raises ConfigError on every rank if one has a problem."""
        key = f"generation{self.generation}/{what}"
        if problem:
            self._store.set(f"{key}/problem", problem)
        if self._store.add(f"{key}/arrived", 1) == self.size:
            self._store.set(f"{key}/all_arrived", "")
        self._store.wait([f"{key}/all_arrived"], timedelta(seconds=self.timeout_s))
        if self._store.check([f"{key}/problem"]):
            raise ConfigError(self._store.get(f"{key}/problem").decode())


def _destroy(group: dist.ProcessGroup | None, abort: bool) -> None:
    if group is None:
        return
    for device in group._device_types if abort else ():
        with contextlib.suppress(Exception):  # a backend without abort: destroying is all there is
            group._get_backend(device).abort()
    with contextlib.suppress(ValueError):  # destroyed already, by torch's own function
        dist.destroy_process_group(group)
    _disable(group)


def _disable(group: dist.ProcessGroup) -> None:
    """Makes every collective on a destroyed group raise: Gloo's would go on working for whoever kept it.

    `shutdown` and `abort` change nothing there, so the group gets torch's backend for tests that only refuses. (It
    ignores a bare `group.send` and `group.recv`; `torch.distributed.send` refuses an unknown group itself.)
    """
    options: Any = FakeProcessGroup.Options()  # type: ignore[call-arg]
    options.error_on_collective = True
    refusing = FakeProcessGroup._create_internal(group.rank(), group.size(), options)  # type: ignore[call-arg]
    for device in group._device_types:
        group._register_backend(device, dist.ProcessGroup.BackendType.UNDEFINED, refusing)
    group._set_default_backend(dist.ProcessGroup.BackendType.UNDEFINED)
