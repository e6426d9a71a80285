"""The protocol of transports. Every rank of the EP group calls the same methods in the same order.

Edges that a transport has to keep, whatever the dispatcher does: a weight is written into a slot only after the
slot's host has asked for it; it is complete before `Pending.wait` returns; a gradient is read only after its host has
offered it; a host writes a slot's gradient again only after `GradientPull.finish` or `force` of the earlier offer.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from equipoise.balance.replicas import Copies, Masters

Operation = Callable[[str], AbstractContextManager[None]]
"""Surrounds a wait with its name, so that messages about missing ranks can tell what each was doing."""


class Pending(Protocol):
    """Transfers under way."""

    num_parts: int
    """1, or 2: the first half of the slots (`kernels.tiles.first_half`) arrives before the others."""

    def wait(self, part: int = -1) -> None:
        """Returns when what was sent may change and what was received may be read (on a GPU: by the current stream).

        `part`: of what was received, only this one and those before it; what was sent stays as it is.

        Raises:
            RankFailure: a peer did not take part in time.
        """
        ...


class GradientPull(Protocol):
    """Gradients of replicas on their way home."""

    added_to: Sequence[torch.Tensor] | None
    """The masters' gradients, if the transport adds to them; they are right after `finish`, which then
    adds only what has come in another way. None after it: autograd copies a gradient that somebody else has, too."""

    def finish(self, add: Callable[[int, torch.Tensor], None]) -> None:
        """Waits, and calls `add(local, gradient)` for each replica of this rank's masters in order of physical id.

        The float32 gradient [N, K] is valid during the call only.
        """
        ...

    def force(self) -> None:
        """Completes the transfer now and keeps the sums for `finish`: the buffers are needed for something else."""
        ...


class Transport(Protocol):
    """Moves whole experts between the ranks of an EP group. `operation` surrounds every wait for peers; `waited_s` is
    the host's time in them."""

    operation: Operation
    waited_s: float

    def prepare(self, name: str, device: torch.device, wants_gradients: bool) -> None:
        """Before the first transfer of a weight name, by all ranks: allocates what its transfers need."""
        ...

    def check(self) -> None:
        """Raises `RankFailure` if a transfer is known to have failed. Never waits."""
        ...

    def push_weights(self, name: str, copies: Copies, masters: Masters, what: str) -> Pending:
        """Starts copying masters of this rank to their hosts' slots, and into this rank's slots from their homes.

        The caller has ended every use of this rank's slots, and leaves the masters unchanged until the wait.
        `what` names the transfer in errors.
        """
        ...

    def pull_gradients(self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str) -> GradientPull:
        """Starts bringing the FP32 slot gradients of all replicas to their homes. `gradients`: those of this rank's
        masters, stacked or one by one, which the transport may add to."""
        ...
