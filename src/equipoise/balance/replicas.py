"""Replica experts and the buffers that hold them: one set for all layers, allocated once, owned by the runtime.

The buffers are no parameters and are in no state dict. Shapes: M masters and R replica slots per rank, N x K one
expert's weight; where [.., N, K] is said of a weight, [.., N] holds for a bias.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from equipoise.balance.plan import Placement

Masters = torch.Tensor | Sequence[torch.Tensor]
"""A rank's master weights of one name: stacked [M, N, K], or M tensors [N, K]; of biases [M, N], or M tensors [N]."""


def as_masters(tensors: Sequence[torch.Tensor], num_dims: int) -> Masters:
    """The value that was flattened for autograd; `num_dims` of one expert's weight (2) or bias (1)."""
    return tensors[0] if len(tensors) == 1 and tensors[0].dim() == num_dims + 1 else list(tensors)


@dataclass(frozen=True)
class Replica:
    """One copy of a plan.

    physical: physical id of the replica. home: rank of its master, `local` the master's index there.
    host: rank that computes the replica, in its slot `slot`.
    """

    physical: int
    home: int
    local: int
    host: int
    slot: int


def replicas_of(placement: Placement) -> list[Replica]:
    """The copies of one placement (on the CPU) in order of physical id: the order of every sum over replicas."""
    M, R = placement.num_masters, placement.num_slots
    replicas = []
    for index, expert in enumerate(placement.slot_expert.tolist()):
        if expert >= 0:
            host, slot = divmod(index, R)
            replicas.append(Replica(host * (M + R) + M + slot, expert // M, expert % M, host, slot))
    return replicas


@dataclass(frozen=True)
class Copies:
    """The copies of one plan, as transports take them: slot_expert int32 [P * R] where the plan was made, and the same
    as a list, which is empty if the plan is on an accelerator."""

    slot_expert: torch.Tensor
    replicas: Sequence[Replica]


class ReplicaBuffers:
    """Slot weights in the compute dtype, slot gradients and the rows that receive gradients in FP32, by weight name.

    Each is allocated when it is first needed and kept. Frozen experts never need gradients.
    """

    def __init__(
        self, shapes: Mapping[str, tuple[int, ...]], num_slots: int, dtype: torch.dtype, reduction_rows: int
    ) -> None:
        self.shapes, self.num_slots, self.dtype, self.reduction_rows = dict(shapes), num_slots, dtype, reduction_rows
        self.device: torch.device | None = None
        self._kept: dict[tuple[str, str], torch.Tensor] = {}

    def _get(self, kind: str, name: str, rows: int, dtype: torch.dtype) -> torch.Tensor:
        key = (kind, name)
        if key not in self._kept:
            assert self.device is not None
            self._kept[key] = torch.zeros(rows, *self.shapes[name], dtype=dtype, device=self.device)
        return self._kept[key]

    def weights(self, name: str) -> torch.Tensor:
        """[R, N, K] in the compute dtype."""
        return self._get("weights", name, self.num_slots, self.dtype)

    def gradients(self, name: str) -> torch.Tensor:
        """float32 [R, N, K], gradients of the replicas that this rank hosts."""
        return self._get("gradients", name, self.num_slots, torch.float32)

    def arrivals(self, name: str) -> torch.Tensor:
        """float32 [reduction_rows, N, K], where gradients of this rank's experts arrive."""
        return self._get("arrivals", name, self.reduction_rows, torch.float32)

    @property
    def num_bytes(self) -> int:
        """Memory held by now."""
        return sum(tensor.nbytes for tensor in self._kept.values())
