"""Updates of engines on the same machine, through memory that both processes see.

Each trainer rank has room for two buckets, which an engine rank reads while the next one is filled. On devices whose
memory can be shared between processes the room is there; otherwise it is shared memory of the host. The engine is
asked once; from then on both sides count in a small shared segment: the trainer which buckets are ready, each reader
which it has taken.

Every engine rank gets what it needs from one trainer rank. Where experts live on the same ranks on both sides, each
trainer rank offers only its own experts, and ranks whose buckets are fewer offer empty ones, so that all stay in step.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from equipoise.accelerator import Accelerator
from equipoise.distributed.weight_update.client import EngineClient
from equipoise.distributed.weight_update.manifest import Manifest
from equipoise.distributed.weight_update.phases import Phases
from equipoise.distributed.weight_update.sender import WeightSource, WeightUpdate
from equipoise.distributed.weight_update.shared_memory import Reader, Segment
from equipoise.errors import WeightUpdateError

EMPTY = -1
"""Stands for a bucket in which a rank has nothing."""
NUM_SLOTS = 2
"""One bucket is filled while another is read. On a device that both share they then wait less for each other: a device
takes about a millisecond to change from one process to another."""
READY, STATE, TAKEN = 0, 1, 2
"""Places of the shared numbers: buckets that are ready, the sender's state, and from there on each reader's count."""
RUNNING, GAVE_UP = 0, 1


class ColocatedUpdate(WeightUpdate):
    """See the module docstring. Engine ranks are dealt to trainer ranks in order, over all engines.

    num_slots: buckets for which there is room.
    """

    _data: "Segment | None" = None
    _counts: "Segment | None" = None
    _room: torch.Tensor | None = None
    _exported: dict[str, Any] | None = None
    _steps: Sequence[list[int]] = ()
    """For each step the bucket of every trainer rank: the same for all, or each its own, or empty."""

    def __init__(
        self,
        source: WeightSource,
        clients: Sequence[EngineClient],
        accelerator: Accelerator,
        *,
        num_slots: int = NUM_SLOTS,
        **options: Any,
    ) -> None:
        super().__init__(source, clients, accelerator, **options)
        if num_slots < 1:
            raise WeightUpdateError(f"num_slots is {num_slots}: expected at least 1")
        self.num_slots = num_slots

    @property
    def extra_bytes(self) -> int:
        staged = 0 if self._data is None or not self._is_staged else self._data.num_bytes
        return 0 if self._room is None else self._room.numel() + staged

    @property
    def _is_staged(self) -> bool:
        """Whether buckets are filled on the device and then copied to the host's shared memory."""
        return self._data is not None and self.device.type != "cpu"

    def _order(self) -> list[list[str]]:
        local: list[list[str]] = [[] for _ in range(self.num_ranks)]
        shared: list[str] = []
        is_aligned = self.num_ranks > 1 and all(info.num_ranks == self.num_ranks for info in self.infos)
        for name in self._specs:
            region, holders = self.source.regions[name], self.packer.holders[name]
            at_home = is_aligned and bool(region.dropped) and len(holders) == 1
            if at_home and all(_has(info.experts, holders[0], region.start[0]) for info in self.infos):
                local[holders[0]].append(name)
            else:
                shared.append(name)
        return [shared, *local]

    def _connect(self) -> None:
        """Room for buckets; it is kept until `close`."""
        size = max((bucket.num_bytes for bucket in self.packer.buckets), default=0)
        self._slot_bytes = -(-max(size, 1) // 4096) * 4096
        if self._room is not None:
            return

        def make() -> None:
            if self.device.type != "cpu":
                self._room = torch.empty(self.num_slots * self._slot_bytes, dtype=torch.uint8, device=self.device)
            if self.device.type == "cpu" or not self.accelerator.shares_memory():
                self._data = Segment(self.num_slots * self._slot_bytes)
            if self._room is None:
                assert self._data is not None
                self._room = self._data.tensor
            self._exported = self.accelerator.share_memory(self._room) if self._data is None else self._data.handle()
            self._counts = Segment(8 * (TAKEN + sum(info.num_ranks for info in self.infos)))

        self._together(make)

    def _release(self) -> None:
        if self._counts is not None:
            self._counts.tensor.view(torch.int64)[STATE] = GAVE_UP
        for segment in (self._data, self._counts):
            if segment is not None:
                segment.close()
        self._data = self._counts = self._room = self._exported = None
        self.accelerator.ipc_collect()

    def _plan(self) -> None:
        shared, local = [], [list[int]() for _ in range(self.num_ranks)]
        owners = {name: rank for rank, names in enumerate(self._order()[1:]) for name in names}
        for index, bucket in enumerate(self.packer.buckets):
            owner = owners.get(bucket.pieces[0].name)
            if owner is None:
                shared.append([index] * self.num_ranks)
            else:
                local[owner].append(index)
        longest = max(map(len, local))
        padded = [indices + [EMPTY] * (longest - len(indices)) for indices in local]
        self._steps = shared + [list(row) for row in zip(*padded)]

    def _move(self, manifest: Manifest, phases: Phases) -> dict[int, torch.Tensor]:
        assert self._room is not None
        assert self._counts is not None
        steps = self._steps
        counts = self._counts.tensor.view(torch.int64)
        counts.zero_()
        with phases.host("share"):
            offers, readers = self._offers([row[self.rank] for row in steps])
        root = None if self.rank == 0 else Reader(offers[0][0]["counts"])
        calls = []
        if self.rank == 0:
            calls = [self._call(c.load, manifest, own) for c, own in zip(self.clients, offers)]
        taken = counts[TAKEN:].numpy()  # reads what the engines write

        def everyone_has(number: int) -> bool:
            if root is not None and root.read_number(STATE) != RUNNING:
                raise WeightUpdateError("the trainer's rank 0 has given the update up")
            return all(taken[reader] >= number for reader in readers)

        sums: dict[int, torch.Tensor] = {}

        def step(number: int) -> None:
            index = steps[number][self.rank]
            if index != EMPTY:
                is_shared = all(other == index for other in steps[number])
                sums[index] = self._offer(manifest, index, number % self.num_slots, phases, is_shared)
            counts[READY] = number + 1

        def wait_for(number: int) -> None:
            with phases.host("wire"):
                self._wait(lambda: everyone_has(number), calls, f"bucket {number} was not taken")

        num_shared = sum(len(set(row)) == 1 for row in steps) if self.num_ranks > 1 else 0

        def rest() -> None:
            for number in range(num_shared, len(steps)):
                wait_for(number + 1 - self.num_slots)
                step(number)
            wait_for(len(steps))
            with phases.host("wire"):
                for seconds in self._finish_calls(calls):
                    phases.add_engine(seconds)

        try:
            for number in range(num_shared):
                self._together(functools.partial(wait_for, number + 1 - self.num_slots))
                step(number)
            self._together(rest)
        finally:
            if root is not None:
                root.close()
        return sums

    def _offer(self, manifest: Manifest, index: int, turn: int, phases: Phases, is_shared: bool) -> torch.Tensor:
        """Fills one of the slots; returns the bucket's checksum."""
        assert self._room is not None
        first = turn * self._slot_bytes
        total = self._fill(index, self._room[first : first + self._slot_bytes], phases, everywhere=is_shared)
        with phases.host("device"):
            self.accelerator.current_stream().synchronize()
        if self._is_staged:
            assert self._data is not None
            used = slice(first, first + manifest.buckets[index].num_bytes)
            with phases.host("to host"):
                self._data.tensor[used].copy_(self._room[used])
        return total

    def _offers(self, mine: list[int]) -> tuple[list[list[dict[str, Any]]], list[int]]:
        """For each engine and each of its ranks what it is offered, on every rank; and this rank's readers."""
        assert self._counts is not None
        readers = range(sum(info.num_ranks for info in self.infos))
        own = [reader for reader in readers if reader % self.num_ranks == self.rank]
        base: dict[str, Any] = {"memory": self._exported, "counts": self._counts.handle()}
        base |= {"num_slots": self.num_slots, "slot_bytes": self._slot_bytes}
        offers = [[reader, {**base, "buckets": mine, "reader": reader}] for reader in own]
        by_reader = {reader: offer for rank in self._gather(offers) for reader, offer in rank}
        found, first = [], 0
        for info in self.infos:
            found.append([by_reader[reader] for reader in range(first, first + info.num_ranks)])
            first += info.num_ranks
        return found, own


def _has(experts: Any, rank: int, expert: int) -> bool:
    if rank >= len(experts):
        return False
    first, count = experts[rank]
    return first <= expert < first + count
