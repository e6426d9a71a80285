"""How an engine rank takes an update's buckets: from a group's broadcasts, or from memory of this machine.

Both run in a thread of their own, on a stream of their own, and give up at the deadline.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from pydantic import Field, NonNegativeInt, ValidationError
from torch import distributed as dist

from equipoise.accelerator import Accelerator
from equipoise.config import Config
from equipoise.distributed.weight_update.colocated import EMPTY, READY, RUNNING, STATE, TAKEN
from equipoise.distributed.weight_update.group import UpdateGroup
from equipoise.distributed.weight_update.polling import rest
from equipoise.distributed.weight_update.receiver import WeightReceiver
from equipoise.distributed.weight_update.shared_memory import Reader
from equipoise.errors import WeightUpdateError


class Offer(Config):
    """What a colocated trainer rank offers one engine rank."""

    memory: dict[str, Any]
    """Handle of the room for buckets."""
    counts: dict[str, Any]
    """Handle of the shared numbers."""
    num_slots: int = Field(gt=0)
    """For so many buckets, which take turns."""
    slot_bytes: int = Field(gt=0)
    """Size of the room for one bucket."""
    buckets: list[int]
    """The bucket of each step; -1: nothing for this rank."""
    reader: NonNegativeInt
    """Which of the shared numbers is this engine rank's."""

    @classmethod
    def parse(cls, value: Any) -> "Offer":
        """From JSON. Raises WeightUpdateError for what is malformed."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise WeightUpdateError(f"an offer is malformed at {where or 'its root'}: {first['msg']}") from None


NUM_SLOTS = 2
"""Of a broadcast's receiver: one arrives while one is put in place."""


class Intake:
    """Of one engine rank. `stopped` tells a running intake to give up."""

    def __init__(
        self, receiver: WeightReceiver, accelerator: Accelerator, device: torch.device, deadline_s: float
    ) -> None:
        self.receiver, self.accelerator, self.device, self.deadline_s = receiver, accelerator, device, deadline_s
        self._streams: dict[str, Any] = {}  # kept, since an allocator keeps memory for each

    def take_broadcasts(
        self, group: UpdateGroup, indices: Sequence[int], stopped: Callable[[], bool]
    ) -> dict[str, float]:
        """Receives buckets in this order; the next one arrives while one is put in place. Returns seconds: waiting for
        the network, and the whole."""
        manifest = self._manifest(indices)
        size = -(-max((manifest.buckets[i].num_bytes for i in indices), default=0) // 256) * 256
        started = time.perf_counter()
        with self._own_stream(group.name):
            room = torch.empty(min(len(indices), NUM_SLOTS) * size, dtype=torch.uint8, device=self.device)

            def post(number: int) -> tuple[int, torch.Tensor, dist.Work]:
                first = number % NUM_SLOTS * size
                data = room[first : first + manifest.buckets[indices[number]].num_bytes]
                return indices[number], data, group.broadcast(data)

            waited = 0.0
            under_way = [post(number) for number in range(min(NUM_SLOTS, len(indices)))]
            for number in range(len(indices)):
                index, data, work = under_way.pop(0)
                began = time.perf_counter()
                self._wait(work.is_completed, stopped, f"bucket {index} of group {group.name!r} did not arrive")
                try:
                    work.wait()
                except RuntimeError as error:
                    raise WeightUpdateError(
                        f"bucket {index} of group {group.name!r} did not arrive: {str(error).splitlines()[0]}"
                    ) from error
                waited += time.perf_counter() - began
                self.receiver.load(index, data)
                if number + NUM_SLOTS < len(indices):
                    under_way.append(post(number + NUM_SLOTS))  # on the same stream: behind the copy out of its slot
            self.accelerator.current_stream().synchronize()
        return {"wait": waited, "receive": time.perf_counter() - started}

    def take_shared(self, offer: Offer, stopped: Callable[[], bool]) -> dict[str, float]:
        """Takes the buckets of every step as they become ready. Returns seconds: to open and close the memory, waiting
        for the trainer, and to load (copy into place and sum)."""
        taken = [index for index in offer.buckets if index != EMPTY]
        manifest = self._manifest(taken)
        if any(manifest.buckets[index].num_bytes > offer.slot_bytes for index in taken):
            raise WeightUpdateError(f"a bucket is larger than the {offer.slot_bytes} bytes that are offered for it")
        seconds = {"open": 0.0, "wait": 0.0, "load": 0.0}
        with contextlib.ExitStack() as stack:
            started = time.perf_counter()
            counts = stack.enter_context(contextlib.closing(Reader(offer.counts, write=True)))
            memory = self._open(offer, stack)
            seconds["open"] = time.perf_counter() - started
            with self._own_stream("memory"):
                for step, index in enumerate(offer.buckets):
                    started = time.perf_counter()

                    def is_ready(step: int = step) -> bool:
                        if counts.read_number(STATE) != RUNNING:
                            raise WeightUpdateError("the trainer has given the update up")
                        return counts.read_number(READY) > step

                    self._wait(is_ready, stopped, f"bucket {index} was not offered")
                    ready = time.perf_counter()
                    if index != EMPTY:
                        first = step % offer.num_slots * offer.slot_bytes
                        self.receiver.load(index, memory(first, manifest.buckets[index].num_bytes))
                        self.accelerator.current_stream().synchronize()
                    counts.write_number(TAKEN + offer.reader, step + 1)
                    seconds["wait"] += ready - started
                    seconds["load"] += time.perf_counter() - ready
            started = time.perf_counter()
            del memory
            seconds["close"] = time.perf_counter() - started
        return seconds

    def _open(self, offer: Offer, stack: contextlib.ExitStack) -> Callable[[int, int], torch.Tensor]:
        """Gives bytes [first, first + count) of the offered memory as a tensor."""
        if offer.memory.get("kind") == "shm":
            reader = stack.enter_context(contextlib.closing(Reader(offer.memory)))
            room = torch.empty(offer.slot_bytes, dtype=torch.uint8)

            def read(first: int, count: int) -> torch.Tensor:
                reader.read(room[:count], first)
                return room[:count].to(self.device)

            return read
        opened = self.accelerator.open_memory(offer.memory)
        if opened.numel() < offer.num_slots * offer.slot_bytes:
            raise WeightUpdateError(
                f"{opened.numel()} bytes of memory are offered, fewer than {offer.num_slots} slots of "
                f"{offer.slot_bytes}"
            )
        return lambda first, count: opened[first : first + count]

    def _manifest(self, indices: Sequence[int]) -> Any:
        manifest = self.receiver.manifest
        if manifest is None:
            raise WeightUpdateError("no update is under way: begin one first")
        if any(not 0 <= index < len(manifest.buckets) for index in indices):
            raise WeightUpdateError(f"buckets {list(indices)[:5]}: the manifest has {len(manifest.buckets)}")
        return manifest

    def _own_stream(self, name: str) -> Any:
        if self.device.type != "cpu":
            self.accelerator.set_device(self.device.index or 0)  # the current device is a thread's own
        if name not in self._streams:
            self._streams[name] = self.accelerator.new_stream()
        return self.accelerator.use_stream(self._streams[name])

    def _wait(self, ready: Callable[[], bool], stopped: Callable[[], bool], what: str) -> None:
        started = time.monotonic()
        while not ready():
            if stopped():
                raise WeightUpdateError(f"{what}: the update was given up")
            if time.monotonic() > started + self.deadline_s:
                raise WeightUpdateError(f"{what} within {self.deadline_s:g} s")
            rest(started, self.device)
