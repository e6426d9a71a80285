"""Transport through memory that the ranks of the EP group share: no host sync, no message, no other rank's help.

The home rank pushes its masters into its peers' slots and pulls the FP32 gradients of replicas from there, by kernels
with a bounded number of programs that read the plan on the device. They run on a stream of their own; every edge is
explicit:

    slot free before push          the push starts after what the current stream holds, and asks every peer
    push complete before products  the current stream waits for it in `Pending.wait`
    gradients written before pull  the pull starts after what the current stream holds, and asks every peer
    pulls done before rewriting    the current stream waits for this rank's pull, which ends after everybody's

On the CPU, under Triton's interpreter, a kernel has run when its launch returns.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from equipoise.balance.replicas import Copies, Masters, ReplicaBuffers
from equipoise.balance.transport.base import Operation
from equipoise.kernels.peers import pull_gradients, push_weights
from equipoise.kernels.streams import SideStream
from equipoise.kernels.tiles import first_half
from equipoise.symmetric.space import SymmetricSpace

FEWEST_IN_PARTS = 4
"""Slots whose weights come in two parts, so that the first ones are used while the others are on their way."""


class SymmetricBuffers(ReplicaBuffers):
    """Slots that peers reach. They are allocated by all ranks together, in `SymmetricTransport.prepare`."""

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], num_slots: int, dtype: torch.dtype, space: SymmetricSpace
    ) -> None:
        super().__init__(shapes, num_slots, dtype, reduction_rows=0)
        self._space = space
        self._pointers: dict[tuple[str, str], torch.Tensor] = {}
        self.device = space.device

    def _get(self, kind: str, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        key = (kind, name)
        if key not in self._kept:
            made = self._space.allocate((rows, *self.shapes[name]), dtype, f"{kind} of replicas of {name!r}")
            self._kept[key], self._pointers[key] = made.local, made.pointers_P
        return self._kept[key]

    def pointers_P(self, kind: str, name: str) -> torch.Tensor:
        """int64: where every rank has its `weights` or `gradients` of one name."""
        return self._pointers[kind, name]


class DeviceWork:
    """A transfer on the transport's stream, in one part or more that end one after the other."""

    def __init__(self, done: Sequence[torch.Event], kept: Sequence[torch.Tensor], num_parts: int = 1) -> None:
        self._done, self._kept, self.num_parts = list(done), list(kept), num_parts

    def wait(self, part: int = -1) -> None:
        """The current stream goes on when the transfer, or a part, is complete; the host does not wait."""
        if self._done:
            SideStream.join(self._done[part])
        if part == -1:
            self._done, self._kept = [], []


class DevicePull:
    """Gradients of replicas that are being added to their masters'."""

    def __init__(self, work: DeviceWork, added_to: Sequence[torch.Tensor]) -> None:
        self._work = work
        self.added_to: Sequence[torch.Tensor] | None = added_to

    def finish(self, add: Callable[[int, torch.Tensor], None]) -> None:
        self._work.wait()
        self.added_to = None

    def force(self) -> None:
        self._work.wait()


class SymmetricTransport:
    """See the module docstring. `num_masters`: of this rank. The programs bound what a transfer takes of the device; 0:
    few that still move about what the links carry."""

    def __init__(
        self,
        space: SymmetricSpace,
        buffers: SymmetricBuffers,
        num_masters: int,
        push_programs: int = 0,
        pull_programs: int = 0,
    ) -> None:
        self.space, self.buffers, self.num_masters = space, buffers, num_masters
        self.push_programs, self.pull_programs = push_programs, pull_programs
        self.operation: Operation = lambda name: nullcontext()
        self.waited_s = 0.0
        slots, half = buffers.num_slots, first_half(buffers.num_slots)
        self._parts = [range(half), range(half, slots)] if slots >= FEWEST_IN_PARTS else [range(slots)]
        self._push = {name: self._push_channels(name) for name in buffers.shapes}
        self._pull = {name: space.channel(f"pull of gradients {name!r}") for name in buffers.shapes}
        self._stream = SideStream(space.device)

    def _push_channels(self, name: str) -> list[int]:
        what = f"push of weights {name!r}"
        if len(self._parts) == 1:
            return [self.space.channel(what)]
        return [self.space.channel(f"{what} to slots {part.start} to {part.stop - 1}") for part in self._parts]

    def prepare(self, name: str, device: torch.device, wants_gradients: bool) -> None:
        if device != self.space.device:
            raise ValueError(f"weights are on {device}, the symmetric memory is on {self.space.device}")
        self.buffers.weights(name)
        if wants_gradients:
            self.buffers.gradients(name)

    def check(self) -> None:
        self.space.check()

    def push_weights(self, name: str, copies: Copies, masters: Masters, what: str) -> DeviceWork:
        stacked = isinstance(masters, torch.Tensor)
        tensors = [masters] if isinstance(masters, torch.Tensor) else list(masters)
        tensors = [tensor.contiguous() for tensor in tensors]
        slots_P = self.buffers.pointers_P("weights", name)
        launches = [
            partial(push_weights, self.space.signals, channel, slots=part)
            for channel, part in zip(self._push[name], self._parts)
        ]
        return self._start(launches, copies, tensors, stacked, slots_P, self.push_programs, what)

    def pull_gradients(self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str) -> DevicePull:
        stacked = gradients[0].dim() == len(self.buffers.shapes[name]) + 1
        slots_P, tensors = self.buffers.pointers_P("gradients", name), list(gradients)
        launch = partial(pull_gradients, self.space.signals, self._pull[name])
        work = self._start([launch], copies, tensors, stacked, slots_P, self.pull_programs, what)
        return DevicePull(work, tensors)

    def _start(
        self,
        launches: Sequence[Callable[..., None]],
        copies: Copies,
        tensors: list[torch.Tensor],
        stacked: bool,
        slots_P: torch.Tensor,
        programs: int,
        what: str,
    ) -> DeviceWork:
        """Launches the parts of a transfer after what the current stream holds."""
        self.space.check(what)
        done: list[torch.Event] = []
        for launch in launches:
            with self._stream.after_current(done):
                launch(copies.slot_expert, tensors, stacked, slots_P, self.num_masters, programs)
        return DeviceWork(done, [*tensors, copies.slot_expert], len(launches))
