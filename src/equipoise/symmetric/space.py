"""The buffers and signals of one group, shared by everything that moves data in its symmetric memory.

Buffers are allocated once, by all ranks in the same order, and kept. Shapes: P ranks of the group.
"""

import contextlib
import hashlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from equipoise.distributed.collectives import Group, live_group
from equipoise.errors import ConfigError, RankFailure
from equipoise.kernels.peers import (
    CHANNELS,
    CONTROL_WORDS,
    FAILED,
    HAS_LEFT,
    LIMIT,
    MISSING,
    NEEDED_ROWS,
    ROW_CAPACITY,
    RUN,
    STATUS,
    Signals,
    abandon,
    time_spins,
)
from equipoise.kernels.streams import synchronize
from equipoise.kernels.triton_support import triton_problem
from equipoise.symmetric.agreement import Agreement
from equipoise.symmetric.mapping import (
    Mapper,
    host_identity,
    map_device_memory,
    map_shared_memory,
    symmetric_problem,
)


def agreed_problem(group: Group, device: torch.device, timeout_s: float = 600.0) -> str | None:
    """None if every rank of the group can use symmetric memory, otherwise a reason, on all ranks. Waits for them.

    The group is one domain: all of its ranks are on one host, each with a GPU of its own, and reach each other.
    """
    problem = symmetric_problem(device, group) or triton_problem(device.type)
    host = int.from_bytes(hashlib.sha256(host_identity().encode()).digest()[:6])
    place = -1 if device.type == "cpu" else torch.device(device).index or 0
    given = [0 if problem is None else 1, host, place]
    found = Agreement(group, timeout_s).gather("can symmetric memory be used", given)
    return problem or domain_problem(found)


def domain_problem(found: Sequence[Sequence[int]]) -> str | None:
    """What keeps ranks from sharing memory, by each one's (has it a problem, host, GPU there or -1)."""
    hosts = len({host for _, host, _ in found})
    if hosts > 1:
        return (
            f"its {len(found)} ranks are on {hosts} hosts, and one group's ranks have to reach each other's memory: "
            "choose an ep_size of at most one host's GPUs, or set parallel.domain_size to how many share a host"
        )
    places = [place for _, _, place in found if place >= 0]
    if len(set(places)) < len(places):
        return "several of its ranks use one GPU"
    failing = [str(rank) for rank, (fails, _, _) in enumerate(found) if fails]
    return f"rank {', '.join(failing)} of the group cannot; its log says why" if failing else None


@dataclass(frozen=True)
class SymmetricTensor:
    """One tensor of the same size on every rank.

    local: this rank's. pointers_P: int64 on the device, every rank's address as seen from here.
    """

    local: torch.Tensor
    pointers_P: torch.Tensor


class SymmetricSpace:
    """The buffers and signals of one group, shared by everything that moves data in it. Made by all ranks together.

    Args:
        group: at least one rank, all within reach of each other.
        device: of this rank.
        timeout_s: a kernel that waits longer for a peer gives up; `check` then raises. The host waits as long for
            ranks that do not come to allocate.
        mapper: how memory is shared; by default as the device asks for.

    Each operation has a channel. A rank's pad holds two words of each channel for each peer, which only that peer
    writes: at the beginning of the n-th operation and at its end. The counters that say which operation is the next are
    on the device, so kernels can be captured in a CUDA graph. After a wait in vain none waits any more.

    Raises:
        ConfigError: the ranks do not reach each other.
    """

    def __init__(
        self, group: Group, device: torch.device, timeout_s: float = 600.0, mapper: Mapper | None = None
    ) -> None:
        problem = symmetric_problem(device, group) if mapper is None else None
        problem = problem or triton_problem(device.type)
        if problem is not None:
            raise ConfigError(f"symmetric memory cannot be used: {problem}")
        self._group, self.device, self.timeout_s = group, device, timeout_s
        live = live_group(group)
        self.num_ranks, self.rank = live.size(), dist.get_rank(live)
        self.global_ranks = dist.get_process_group_ranks(live)
        self._map = mapper or (map_shared_memory if device.type == "cpu" else map_device_memory)
        self._agreement = Agreement(group, timeout_s)
        self._channels: list[str] = []
        self.num_bytes = 0
        status = torch.zeros(8, dtype=torch.int64)
        self.status = status.pin_memory() if device.type == "cuda" else status
        self._seen: memoryview = memoryview(self.status.numpy())  # type: ignore[arg-type]  # far quicker to read than a tensor
        words = [0] * (CONTROL_WORDS * (CHANNELS + 1))
        words[LIMIT], words[STATUS] = 1000, self.status.data_ptr()
        self.control = torch.tensor(words, dtype=torch.int64, device=device)
        self._was_abandoned = False
        pads = self.allocate((2 * CHANNELS + 1, self.num_ranks), torch.int64, "signals")
        self.signals = Signals(self.control, pads.pointers_P, self.rank, self.num_ranks)
        self._calibrate()

    @property
    def group(self) -> dist.ProcessGroup:
        return live_group(self._group)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> SymmetricTensor:
        """Zeros on every rank. Collective, with equal arguments; waits for all ranks. `name` is for errors.

        Raises:
            RankFailure: a rank did not come within the timeout.
            ConfigError: ranks ask for different memory. Nothing has been allocated, on any rank.
        """
        num_bytes = max(-(-math.prod(shape) * dtype.itemsize // 256), 1) * 256
        what = f"symmetric memory {name!r}: {str(dtype).removeprefix('torch.')} {list(shape)}"
        self._agreement.gather(what)
        memory, pointers = self._map(num_bytes, self.group, self.device)
        memory.zero_()
        synchronize(self.device)
        self._agreement.gather(f"{what} is cleared")  # nobody writes into memory that is still to be cleared
        self.num_bytes += num_bytes
        local = memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(*shape)
        return SymmetricTensor(local, torch.tensor(pointers, dtype=torch.int64, device=self.device))

    def agree_max(self, what: str, values: Sequence[int]) -> list[int]:
        """The largest of each over the ranks; waits for all of them. For sizes, at setup."""
        return [max(of_ranks) for of_ranks in zip(*self._agreement.gather(what, values))]

    def abandon(self) -> None:
        """This rank takes part in nothing any more: whoever waits for it on the device, or will, gives up at once and
        names it. For a rank that has failed alone; others would wait until the timeout. Never raises."""
        if not self._was_abandoned:
            self._was_abandoned = True
            with contextlib.suppress(Exception):  # the device may be what has failed
                abandon(self.signals)

    @contextlib.contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """For work that other ranks wait for on the device."""
        try:
            yield
        except BaseException:
            self.abandon()
            raise

    def channel(self, name: str) -> int:
        """The next free channel, for the operation that errors call `name`. Same order on every rank."""
        if len(self._channels) == CHANNELS:
            raise ConfigError(f"more than {CHANNELS} operations in one symmetric space")
        self._channels.append(name)
        return len(self._channels) - 1

    def _calibrate(self) -> None:
        """Waits of kernels count how often they look: learns how often that is within the timeout."""
        channel = self.channel("calibration")
        spins = 1
        for few in (1, 20 if self.device.type == "cpu" else 20_000):  # the first launch compiles
            self.control[LIMIT] = few
            spins, seconds = time_spins(self.signals, channel)
        self.control[LIMIT] = max(int(spins * self.timeout_s / max(seconds, 1e-6)), 1)
        self.status.zero_()
        self._agreement.gather("symmetric memory is ready")

    def check(self, what: str = "") -> None:
        """Raises if a kernel has given up, as far as the host has been told; reads host memory only.

        Raises:
            RankFailure: a peer did not take part in time.
            ConfigError: a rank would have received more rows than its buffers hold.
        """
        if self._seen[FAILED]:
            channel, peer = self._seen[FAILED] - 1, self._seen[MISSING]
            missing = self.global_ranks[peer] if 0 <= peer < self.num_ranks else peer
            how = (
                f"which has failed and does not take part in {self._channels[channel]!r}"
                if self._seen[HAS_LEFT]
                else f"which did not take part in {self._channels[channel]!r} within {self.timeout_s:g} s"
            )
            raise RankFailure(
                f"{what or self._channels[channel]}: rank {self.global_ranks[self.rank]} waited for rank {missing} on "
                f"the device, {how} (operation {self._seen[RUN]})"
            )
        if self._seen[NEEDED_ROWS]:
            raise ConfigError(
                f"a rank would have received {self._seen[NEEDED_ROWS]} rows in one dispatch, the buffers hold "
                f"{self._seen[ROW_CAPACITY]}: raise dispatch.capacity_factor, or set dispatch.overflow to "
                "'worst_case', which holds any routing. The results since then are wrong; resume from a checkpoint"
            )
