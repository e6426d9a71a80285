"""Joining and leaving the world of ranks: rendezvous under a deadline, our own store handle, clean teardown.

The launcher (torchrun, a SLURM script, a test) sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and
MASTER_PORT. With none of them set, the world is this process alone.
"""

import contextlib
import logging
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch import distributed as dist

from equipoise.accelerator import Accelerator
from equipoise.distributed.groups import GroupRegistry
from equipoise.distributed.status import LISTED, Board, Status, shorten_ranks
from equipoise.distributed.watch import STORE_S, Watch, bounded, describe
from equipoise.errors import ConfigError, RankFailure

logger = logging.getLogger(__name__)

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
ALL = "all"  # name of the group of all ranks
MAX_BEAT_S = 5.0

# Stores that this process serves, by port. They stay up while it lives: it may join again at that address.
_served: dict[int, dist.Store] = {}


@dataclass(frozen=True)
class Place:
    """Where this process stands among the ranks, as its launcher says. No address: a world of one."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = ""
    port: int = 0
    agent_store: bool = False  # the launcher's agent serves the store at the address
    attempt: str = "0"  # of a launcher that restarts its processes

    @staticmethod
    def from_environment(environment: Mapping[str, str] = os.environ) -> "Place":
        """Reads the launcher's variables. Raises ConfigError if only some are set or one is malformed."""
        missing = [name for name in VARIABLES if not environment.get(name)]
        if len(missing) == len(VARIABLES):
            return Place()
        if missing:
            present = [name for name in VARIABLES if name not in missing]
            raise ConfigError(
                f"{' and '.join(missing)} not set, but {', '.join(present)} set: a "
                f"launcher such as torchrun sets all of {', '.join(VARIABLES)}; set none to run one process"
            )
        numbers = {}
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            text = environment.get(name) or "1"
            if not text.isdecimal():
                raise ConfigError(f"{name}={text!r}: expected a whole number, not negative")
            numbers[name] = int(text)
        rank, size = numbers["RANK"], numbers["WORLD_SIZE"]
        if rank >= size:
            raise ConfigError(f"RANK={rank} with WORLD_SIZE={size}: expected a rank from 0 to {size - 1}")
        if numbers["MASTER_PORT"] >= 2**16:
            raise ConfigError(f"MASTER_PORT={numbers['MASTER_PORT']}: expected a TCP port below 65536")
        local_rank = numbers["LOCAL_RANK"]
        local_size = numbers["LOCAL_WORLD_SIZE"] if environment.get("LOCAL_WORLD_SIZE") else local_rank + 1
        agent = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        # Agents of several nodes count their restarts separately, and differently.
        one_node = environment.get("GROUP_WORLD_SIZE") == "1"
        return Place(
            rank=rank,
            size=size,
            local_rank=local_rank,
            local_size=local_size,
            address=environment["MASTER_ADDR"],
            port=numbers["MASTER_PORT"],
            agent_store=agent,
            attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0") if one_node else "0",
        )


@dataclass(frozen=True)
class World:
    """The ranks that run together, seen from one of them. Made by `join_world`, valid until that ends.

    `store` outlives process groups; `groups` makes and owns them; `timeout_s` is the longest that a
    collective may take.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    device: torch.device
    store: dist.Store
    groups: GroupRegistry
    accelerator: Accelerator
    timeout_s: float
    watch: Watch = field(repr=False)

    @property
    def group(self) -> dist.ProcessGroup:
        """The group of all ranks."""
        return self.groups.get(ALL)

    def operation(
        self, name: str, group: dist.ProcessGroup | None = None, deadline_s: float | None = None
    ) -> contextlib.AbstractContextManager[None]:
        """Runs a block as a named operation: see `Watch.operation`. Long ones state a deadline in seconds."""
        return self.watch.operation(name, group, deadline_s)


@contextlib.contextmanager
def join_world(
    accelerator: Accelerator,
    timeout_s: float = 600.0,
    *,
    rendezvous_s: float | None = None,
    beat_s: float | None = None,
    store: dist.Store | None = None,
) -> Iterator[World]:
    """Joins the world that the launcher's variables describe; leaves it when the block ends, however it does.

    timeout_s: longest time in seconds that a collective may take; an operation may take half as long again.
    rendezvous_s: longest wait for all ranks to arrive (default: timeout_s).
    beat_s: interval of the signs of life (default: timeout_s / 8, at most 5 s).
    store: to be used instead of the launcher's, the same on all ranks.

    Raises ConfigError for a bad environment, RankFailure if ranks do not arrive or, at the end, do not leave.
    """
    if timeout_s <= 0:
        raise ConfigError(f"timeout_s={timeout_s:g}: expected a positive number of seconds")
    if dist.is_initialized():
        raise ConfigError(
            "torch.distributed is initialized already, but the run makes and owns its process groups: do not "
            "call init_process_group before joining"
        )
    place = Place.from_environment()
    device = _take_device(accelerator, place)
    rendezvous_s = rendezvous_s or timeout_s
    beat_s = beat_s or min(timeout_s / 8, MAX_BEAT_S)
    hosts = store is None and place.rank == 0 and not place.agent_store
    started = time.monotonic()
    if store is None:
        store = _connect(place, hosts, rendezvous_s)
    # A rank may join several times with one store: each time under a name of its own.
    prefix = f"equipoise/{place.attempt}"
    prefix += f"/{store.add(f'{prefix}/joined{place.rank}', 1)}"
    own: dist.Store = store.clone()  # type: ignore[attr-defined]
    own.set_timeout(timedelta(seconds=STORE_S))
    store.set_timeout(timedelta(seconds=timeout_s))
    store, own = dist.PrefixStore(prefix, store), dist.PrefixStore(prefix, own)

    me = Status.of_this_process(place.rank)
    watch = Watch(
        Board(own),
        me,
        place.size,
        store_host=_store_host(place),
        deadline_s=1.5 * timeout_s,
        beat_s=beat_s,
        grace_s=min(timeout_s, 30.0),
        before_exit=lambda: _leave_at_once(own, place.size, hosts),
    )
    # NCCL's own watchdog aborts the process without naming a rank: ours must come first.
    own_watchdog = accelerator.communication_backend() != "gloo"
    groups = GroupRegistry(
        store,
        place.rank,
        place.size,
        accelerator=accelerator,
        timeout_s=(3 if own_watchdog else 1) * timeout_s,
        operation=watch.operation,
    )
    linger_s = 4 * beat_s + 2.0  # in which the others, which look around for three beats, can read the store
    error: BaseException | None = None
    try:
        watch.start()
        _arrive(store, me, place.size, rendezvous_s, started)
        with watch.operation("join the world"):
            groups.open()
            groups.create(ALL, range(place.size))
        yield World(
            rank=place.rank,
            size=place.size,
            local_rank=place.local_rank,
            local_size=place.local_size,
            device=device,
            store=store,
            groups=groups,
            accelerator=accelerator,
            timeout_s=timeout_s,
            watch=watch,
        )
        watch.stop(None)
        _leave_together(store, watch, timeout_s)
    except BaseException as e:
        error = e
        watch.stop(e)
        bounded(lambda: _count(own, "leaving"), STORE_S)
        raise
    finally:
        _close(groups, device, accelerator, error)
        bounded(lambda: _count(own, "gone"), STORE_S)
        _linger(own, place.size, hosts, linger_s)
        error = None  # the exception refers to this frame


def _take_device(accelerator: Accelerator, place: Place) -> torch.device:
    """Selects the device of the local rank; or the only one, where each process is shown one of its own."""
    count = accelerator.device_count()
    index = 0 if count == 1 or accelerator.device_type == "cpu" else place.local_rank
    if index >= max(count, 1):
        raise ConfigError(
            f"local rank {place.local_rank} of {place.local_size} has no device: {count} {accelerator.name} "
            "devices are visible; start at most as many processes per node as it has devices"
        )
    accelerator.set_device(index)
    return accelerator.device(index)


def _store_host(place: Place) -> str:
    if not place.address:
        return "this process"
    server = "the launcher's agent" if place.agent_store else "the process of rank 0"
    return f"{server} at {place.address}:{place.port}"


def _connect(place: Place, hosts: bool, rendezvous_s: float) -> dist.Store:
    if hosts and place.port in _served:
        return _served[place.port]
    try:
        store = dist.TCPStore(
            place.address or "127.0.0.1",
            place.port,
            place.size,
            is_master=hosts,
            timeout=timedelta(seconds=rendezvous_s),
            wait_for_workers=False,
        )
    except (RuntimeError, OSError) as e:
        if hosts:
            raise ConfigError(
                f"rank 0 cannot serve the store on port {place.port} of this host: {e}; choose a free MASTER_PORT"
            ) from e
        raise RankFailure(
            f"rank {place.rank} of {place.size} did not reach {_store_host(place)} within "
            f"{rendezvous_s:g} s: is it running, is MASTER_ADDR its address as seen from here, is the "
            f"port open? ({describe(e)})"
        ) from e
    if hosts and place.port:
        _served[place.port] = store
    return store


def _arrive(store: dist.Store, me: Status, size: int, seconds: float, started: float) -> None:
    """Waits until all ranks have arrived; `seconds` after `started`, RankFailure names the others."""
    store.set(f"arrived/{me.rank}", me.where())
    if store.add("arrivals", 1) == size:
        store.set("all_arrived", "")
    left_s = max(0.1, seconds - (time.monotonic() - started))
    try:
        store.wait(["all_arrived"], timedelta(seconds=left_s))
    except RuntimeError as e:
        done, missing = bounded(lambda: _missing(store, size), STORE_S)
        if not done or isinstance(missing, BaseException):
            raise RankFailure(
                f"rank {me.rank} of {size}: the store was lost while waiting for all ranks: its host is "
                f"likely dead ({describe(e)})"
            ) from e
        arrived = sorted(set(range(size)) - set(missing))
        first = [store.get(f"arrived/{rank}").decode() for rank in arrived[:LISTED]]
        raise RankFailure(
            f"{len(missing)} of {size} ranks did not arrive within {seconds:g} s: ranks "
            f"{shorten_ranks(missing)}; arrived: {', '.join(first)}{', ...' * (len(arrived) > LISTED)}. Look "
            "at the logs of the missing ranks and whether every node was started with the same "
            "numbers of nodes and processes"
        ) from e


def _missing(store: dist.Store, size: int) -> list[int]:
    """Ranks that have not arrived. One rank looks them up, the others read what it found."""
    if store.add("late/asked", 1) == 1:
        missing = [rank for rank in range(size) if not store.check([f"arrived/{rank}"])]
        store.set("late/missing", ",".join(map(str, missing)))
        return missing
    return [int(r) for r in store.get("late/missing").decode().split(",") if r]


def _count(store: dist.Store, what: str) -> None:
    """Counts a rank; the last one of those that arrived sets the key that others wait for."""
    if store.add(what, 1) == store.add("arrivals", 0):
        store.set(f"all_{what}", "")


def _leave_together(store: dist.Store, watch: Watch, seconds: float) -> None:
    """Waits until every rank leaves, so that nobody closes connections from which another still reads."""
    _count(store, "leaving")
    done, error = bounded(lambda: store.wait(["all_leaving"], timedelta(seconds=seconds)), seconds + STORE_S)
    if not done or error is not None:
        reason = describe(error) if error else f"no answer from the store in {seconds + STORE_S:g} s"
        raise RankFailure(watch.explain("leave the world", reason)) from error


def _close(groups: GroupRegistry, device: torch.device, accelerator: Accelerator, error: BaseException | None) -> None:
    """Destroys all groups, bounded in time: a backend may wait for a dead peer."""

    def close() -> None:
        accelerator.set_device(device.index or 0)  # the current device is a thread's own
        groups.close(abort=error is not None)

    done, problem = bounded(close, STORE_S)
    if not done:
        logger.warning("process groups were not destroyed within %g s and are left behind", STORE_S)
    elif problem is not None and error is None:
        raise problem


def _linger(store: dist.Store, size: int, hosts: bool, seconds: float) -> None:
    """The store's host stays, for a while, until the others are gone: they may read why a rank failed."""
    if not hosts or size == 1:
        return

    def wait() -> None:
        with contextlib.suppress(RuntimeError):
            store.wait(["all_gone"], timedelta(seconds=seconds))

    bounded(wait, seconds + 1)


def _leave_at_once(store: dist.Store, size: int, hosts: bool) -> None:
    """What remains to be told when the watchdog ends this process."""
    _count(store, "leaving")
    _count(store, "gone")
    _linger(store, size, hosts, STORE_S / 2)
