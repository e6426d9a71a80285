"""Transport of an EP group of several domains: replicas within their expert's domain by its symmetric memory, all
others by messages of the group.

Plans are made on the host, from the load of the whole group. A domain carries out its own part as if it were a group
with the experts that are at home there.
"""

from collections.abc import Callable, Mapping, Sequence

import torch

from equipoise.balance.replicas import Copies, Masters, ReplicaBuffers
from equipoise.balance.transport.base import GradientPull, Operation, Pending
from equipoise.balance.transport.collective import CollectiveTransport
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.distributed.collectives import Group
from equipoise.symmetric.space import SymmetricSpace


class DomainBuffers(SymmetricBuffers):
    """Slots that the domain's ranks reach, and rows of this rank's own for gradients that come as messages."""

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        num_slots: int,
        dtype: torch.dtype,
        space: SymmetricSpace,
        reduction_rows: int,
    ) -> None:
        super().__init__(shapes, num_slots, dtype, space)
        self.reduction_rows = reduction_rows

    def _get(self, kind: str, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        if kind == "arrivals":
            return ReplicaBuffers._get(self, kind, name, rows, dtype)
        return super()._get(kind, name, rows, dtype)


class _Both:
    """Transfers of either kind."""

    num_parts = 1

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts = parts

    def wait(self, part: int = -1) -> None:
        for pending in self._parts:
            pending.wait()


class _BothPulls:
    """Gradients of either kind: those of the domain are added first."""

    def __init__(self, parts: Sequence[GradientPull]) -> None:
        self._parts = parts
        added_to = [part.added_to for part in parts if part.added_to is not None]
        self.added_to: Sequence[torch.Tensor] | None = added_to[0] if added_to else None

    def finish(self, add: Callable[[int, torch.Tensor], None]) -> None:
        for part in self._parts:
            part.finish(add)
        self.added_to = None

    def force(self) -> None:
        for part in self._parts:
            part.force()


class DomainTransport:
    """See the module docstring.

    Args:
        space: of the domain, consecutive ranks of the group.
        group: the EP group, or one of the same ranks.
        num_masters: of each rank.
        first_rank: the domain's first, in the group.
    """

    def __init__(
        self, space: SymmetricSpace, group: Group | None, buffers: DomainBuffers, num_masters: int, first_rank: int
    ) -> None:
        self.near, self.far = SymmetricTransport(space, buffers, num_masters), CollectiveTransport(group, buffers)
        self.first_rank = first_rank
        self._known: tuple[Copies, Copies | None, Copies] | None = None

    @property
    def operation(self) -> Operation:
        return self.far.operation

    @operation.setter
    def operation(self, operation: Operation) -> None:
        self.near.operation = self.far.operation = operation

    @property
    def waited_s(self) -> float:
        return self.far.waited_s

    @waited_s.setter
    def waited_s(self, seconds: float) -> None:
        self.far.waited_s = seconds

    def prepare(self, name: str, device: torch.device, wants_gradients: bool) -> None:
        self.near.prepare(name, device, wants_gradients)

    def check(self) -> None:
        self.near.check()

    def push_weights(self, name: str, copies: Copies, masters: Masters, what: str) -> _Both:
        near, far = self._split(copies)
        parts: list[Pending] = [] if near is None else [self.near.push_weights(name, near, masters, what)]
        return _Both([*parts, self.far.push_weights(name, far, masters, what)])

    def pull_gradients(self, name: str, copies: Copies, gradients: Sequence[torch.Tensor], what: str) -> _BothPulls:
        near, far = self._split(copies)
        parts: list[GradientPull] = [] if near is None else [self.near.pull_gradients(name, near, gradients, what)]
        return _BothPulls([*parts, self.far.pull_gradients(name, far, gradients, what)])

    def _split(self, copies: Copies) -> tuple[Copies | None, Copies]:
        """The domain's own slots, with experts counted from its first and no others, or None where it has no replica of
        its own; and the replicas of all domains whose masters are in another one."""
        if self._known is None or self._known[0] is not copies:
            size = self.near.space.num_ranks
            domain = lambda rank: rank // size  # noqa: E731
            far = [r for r in copies.replicas if domain(r.home) != domain(r.host)]
            experts_DS = copies.slot_expert.view(-1, size * self.near.buffers.num_slots)
            local_S = experts_DS[domain(self.first_rank)] - self.first_rank * self.near.num_masters
            is_near_S = (local_S >= 0) & (local_S < size * self.near.num_masters)
            near = None
            if bool(is_near_S.any()):
                local_S = torch.where(is_near_S, local_S, -1).to(torch.int32)
                near = Copies(local_S.to(self.near.space.device, non_blocking=True), ())
            self._known = copies, near, Copies(copies.slot_expert, far)
        return self._known[1:]
