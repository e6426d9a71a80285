"""Reroute: which physical expert each token goes to, given how many of this rank's tokens go to each.

Shapes: T tokens of this rank, K experts per token.
"""

import torch

from equipoise.balance.plan import BalancePlan
from equipoise.kernels.reroute import reroute_ids


def reroute(ids_TK: torch.Tensor, plan: BalancePlan) -> torch.Tensor:
    """Physical ids [T, K] in the dtype of the logical `ids_TK` (int32 or int64); -1 stays -1.

    Of an expert's tokens, in token order, the first go to its instance on this rank, the next to its master, then to
    its slots in order of physical id: as many to each as the plan sends there. Deterministic, no host synchronization.
    The ids must be those that this rank's row of the load matrix counted.
    """
    placement = plan.placement
    if ids_TK.device.type == "cpu" and not (placement.slot_expert >= 0).any():  # elsewhere asking would be a host sync
        return master_ids(ids_TK, placement.num_masters, placement.num_slots)
    return reroute_ids(ids_TK, placement.slot_expert, plan.send, placement.num_experts, placement.num_ranks, plan.rank)


def master_ids(ids_TK: torch.Tensor, num_masters: int, num_slots: int) -> torch.Tensor:
    """Physical ids of the masters: where every token goes when there are no replicas. -1 stays -1."""
    if num_slots == 0:
        return ids_TK
    shift = torch.div(ids_TK, num_masters, rounding_mode="floor") * num_slots
    return torch.where(ids_TK < 0, ids_TK, ids_TK + shift)


def count_load(ids_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 [E]: this rank's tokens for each logical expert; ids of -1 count nowhere. No host synchronization."""
    ids = ids_TK.flatten().long()
    counts = torch.zeros(num_experts + 1, dtype=torch.int32, device=ids.device)
    ones = torch.ones((), dtype=torch.int32, device=ids.device).expand(ids.shape[0])
    return counts.scatter_add_(0, torch.where(ids < 0, num_experts, ids), ones)[:num_experts]
