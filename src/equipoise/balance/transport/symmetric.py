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

import torch

from equipoise.balance.replicas import Copies, Masters, ReplicaBuffers
from equipoise.balance.transport.base import Operation
from equipoise.kernels.peers import PULL_PROGRAMS, PUSH_PROGRAMS, pull_gradients, push_weights
from equipoise.kernels.streams import SideStream
from equipoise.symmetric.space import SymmetricSpace


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
    """A transfer on the transport's stream."""

    def __init__(self, done: torch.Event | None, kept: Sequence[torch.Tensor]) -> None:
        self._done, self._kept = done, list(kept)

    def wait(self) -> None:
        """The current stream goes on when the transfer is complete; the host does not wait."""
        if self._done is not None:
            SideStream.join(self._done)
        self._done, self._kept = None, []


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
    """See the module docstring. `num_masters`: of this rank. The programs bound what a transfer takes of the device."""

    def __init__(
        self,
        space: SymmetricSpace,
        buffers: SymmetricBuffers,
        num_masters: int,
        push_programs: int = PUSH_PROGRAMS,
        pull_programs: int = PULL_PROGRAMS,
    ) -> None:
        self.space, self.buffers, self.num_masters = space, buffers, num_masters
        self.push_programs, self.pull_programs = push_programs, pull_programs
        if space.device.type == "cpu":
            self.push_programs = self.pull_programs = 2  # they run one after another
        self.operation: Operation = lambda name: nullcontext()
        self.waited_s = 0.0
        self._push = {name: space.channel(f"push of weights {name!r}") for name in buffers.shapes}
        self._pull = {name: space.channel(f"pull of gradients {name!r}") for name in buffers.shapes}
        self._stream = SideStream(space.device)

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
        return self._start(push_weights, self._push[name], copies, tensors, stacked, slots_P, self.push_programs, what)

    def pull_gradients(self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str) -> DevicePull:
        stacked = gradients[0].dim() == len(self.buffers.shapes[name]) + 1
        slots_P, tensors = self.buffers.pointers_P("gradients", name), list(gradients)
        work = self._start(
            pull_gradients, self._pull[name], copies, tensors, stacked, slots_P, self.pull_programs, what
        )
        return DevicePull(work, tensors)

    def _start(
        self,
        transfer: Callable[..., None],
        channel: int,
        copies: Copies,
        tensors: list[torch.Tensor],
        stacked: bool,
        slots_P: torch.Tensor,
        programs: int,
        what: str,
    ) -> DeviceWork:
        """Launches a transfer after what the current stream holds."""
        self.space.check(what)
        done: list[torch.Event] = []
        with self._stream.after_current(done):
            transfer(
                self.space.signals, channel, copies.slot_expert, tensors, stacked, slots_P, self.num_masters, programs
            )
        return DeviceWork(done[0] if done else None, [*tensors, copies.slot_expert])
