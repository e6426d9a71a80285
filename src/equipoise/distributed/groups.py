"""The process groups that a run owns: named, built in one order on all ranks, forgotten without a trace.

`GroupRegistry` owns WORLD and every group made through it, as raw `torch.distributed` groups, so that
DeviceMesh (`from_group`), DTensor, FSDP and functional collectives work with them. It keeps the specification
of each, so that all can be destroyed and rebuilt under a new generation. Users therefore look groups up by
name, also the group of all ranks, and use neither WORLD nor `torch.distributed.new_group`.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch import distributed as dist

from equipoise.distributed.status import shorten_ranks
from equipoise.errors import ConfigError


@dataclass(frozen=True)
class GroupSpec:
    """What a set of groups is made from: one group for each list in `partition`, under one name.

    `backend` is the string for torch (for one device type, or composite); `timeout_s` is the backend's
    timeout.
    """

    name: str
    partition: tuple[tuple[int, ...], ...]
    backend: str
    timeout_s: float

    def describe(self) -> str:
        """One line; equal for equal specifications and for no others."""
        digest = hashlib.sha256(json.dumps(self.partition).encode()).hexdigest()[:16]
        ranks = f"{len(self.partition)} x [{shorten_ranks(self.partition[0])}]"
        return f'"{self.name}" ({ranks}, {self.backend}, timeout {self.timeout_s:g} s, {digest})'


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
        backend: str,
        timeout_s: float,
        operation: Callable[[str], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.rank, self.size = rank, size
        self.backend, self.timeout_s = backend, timeout_s
        self.generation = 0
        self._store = store
        self._operation = operation
        self._specs: dict[str, GroupSpec] = {}  # in the order of creation
        self._groups: dict[str, dist.ProcessGroup] = {}  # those that this rank is a member of
        self._made = 0  # collective calls in this generation

    def open(self) -> None:
        """Initializes WORLD under a new generation. Collective."""
        self.generation += 1
        self._made = 0
        dist.init_process_group(
            self.backend,
            store=dist.PrefixStore(f"generation{self.generation}", self._store),
            rank=self.rank,
            world_size=self.size,
            timeout=timedelta(seconds=self.timeout_s),
        )

    def create(
        self, name: str, ranks: Sequence[int], *, backend: str | None = None, timeout_s: float | None = None
    ) -> dist.ProcessGroup | None:
        """Makes one group of `ranks` (ascending, global). All ranks of WORLD call it, in the same order.

        Returns the group, or None on a rank that is not a member. Raises ConfigError, before any rank can
        hang, when a name is taken, ranks are malformed, or the ranks' calls differ.
        """
        return self.create_partition(name, [ranks], backend=backend, timeout_s=timeout_s, whole=False)

    def create_partition(
        self,
        name: str,
        partition: Sequence[Sequence[int]],
        *,
        backend: str | None = None,
        timeout_s: float | None = None,
        whole: bool = True,
    ) -> dist.ProcessGroup:
        """Makes one group for each list of ranks, returns that of this rank; collective as `create`.

        The lists are disjoint and together hold every rank (`whole=False`: they need not, and None is
        returned on a rank that is in none).
        """
        spec = GroupSpec(name, tuple(tuple(r) for r in partition), backend or self.backend, timeout_s or self.timeout_s)
        self._check(spec, whole)
        with self._operation(f'make process group "{name}"'):
            self._check_same_on_all_ranks(spec)
            self._specs[name] = spec
            self._build(spec)
        return self._groups.get(name)  # type: ignore[return-value]

    def get(self, name: str) -> dist.ProcessGroup:
        """This rank's group of that name. Raises ConfigError if there is none."""
        if name not in self._groups:
            known = ", ".join(self._groups) or "none"
            raise ConfigError(f'no process group "{name}" on rank {self.rank}; there are: {known}')
        return self._groups[name]

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
        if dist.is_initialized():
            _destroy(dist.group.WORLD, abort)

    def _build(self, spec: GroupSpec) -> None:
        for ranks in spec.partition:
            group = dist.new_group(
                list(ranks),
                timeout=timedelta(seconds=spec.timeout_s),
                backend=spec.backend,
                group_desc=spec.name,
            )
            if self.rank in ranks:
                self._groups[spec.name] = group

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
        key = f"generation{self.generation}/made{self._made}"
        self._made += 1
        mine = spec.describe()
        if self._store.add(f"{key}/called", 1) == 1:
            self._store.set(key, mine)
        first = self._store.get(key).decode()
        if first != mine:
            self._store.set(f"{key}/differs", f"rank {self.rank} makes {mine} where another makes {first}")
        if self._store.add(f"{key}/compared", 1) == self.size:
            self._store.set(f"{key}/all_compared", "")
        self._store.wait([f"{key}/all_compared"], timedelta(seconds=self.timeout_s))
        if self._store.check([f"{key}/differs"]):
            raise ConfigError(
                "process groups are made in different order on different ranks: "
                f"{self._store.get(f'{key}/differs').decode()}; make the same groups in the same order on "
                "every rank"
            )


def _destroy(group: dist.ProcessGroup | None, abort: bool) -> None:
    if group is None:
        return
    for device in group._device_types if abort else ():
        with contextlib.suppress(Exception):  # a backend without abort: destroying is all there is
            group._get_backend(device).abort()
    dist.destroy_process_group(group)
