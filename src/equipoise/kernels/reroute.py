"""Reroute: the physical expert of each slot, and where its row goes once rows are sorted by physical expert.

Of an expert's tokens, in token order, the first go to its instance on this rank, the next to its master, then to its
slots in order of physical id: as many to each as the plan sends there. So the tokens of one expert, sorted once, are
cut into its instances' rows, and sorting by physical expert needs no second sort. This file holds the plain form;
`reroute_triton.py` does the same in two launches.

Shapes: T tokens of this rank, K experts per token, P ranks, M masters and R slots per rank, J = P * (M + R) physical
experts.
"""

import torch

from equipoise.kernels.permute import Permutation, make_permutation
from equipoise.kernels.triton_support import use_triton


def plain_reroute(
    ids_TK: torch.Tensor, slot_expert: torch.Tensor, send_J: torch.Tensor, num_experts: int, num_ranks: int, rank: int
) -> torch.Tensor:
    """Physical ids [T, K] in the dtype of the logical `ids_TK`; see `reroute_permutation`."""
    E, device = num_experts, ids_TK.device
    M, R = E // num_ranks, slot_expert.numel() // num_ranks
    masters_PM = torch.arange(E, device=device).view(num_ranks, M)
    expert_J = torch.cat([masters_PM, slot_expert.long().view(num_ranks, R)], 1).flatten()
    physical_J = torch.arange(expert_J.numel(), device=device)
    is_elsewhere = physical_J // (M + R) != rank
    is_slot = physical_J % (M + R) >= M
    key_J = torch.where(expert_J < 0, E, expert_J) * 4 + is_elsewhere * 2 + is_slot
    order_J = torch.argsort(key_J, stable=True)
    ids = ids_TK.flatten()
    # Small keys sort faster. Every expert's tokens, in token order, then those without an expert.
    key = torch.where(ids < 0, E, ids).to(torch.int16 if E < 2**15 else torch.int64)
    order = torch.argsort(key, stable=True)
    # The sorted tokens and the sends, sorted likewise, are two partitions of one line; the rest has no expert.
    sends_J = send_J.long()[order_J]
    counts = torch.cat([sends_J, ids.numel() - sends_J.sum(0, keepdim=True)])
    physical = torch.cat([order_J, order_J.new_full((1,), -1)]).to(ids.dtype)
    physical = physical.repeat_interleave(counts, output_size=ids.numel())
    return torch.empty_like(ids).index_copy_(0, order, physical).view(ids_TK.shape)


def reroute_permutation(
    ids_TK: torch.Tensor, slot_expert: torch.Tensor, send_J: torch.Tensor, num_experts: int, num_ranks: int, rank: int
) -> tuple[torch.Tensor, Permutation]:
    """Physical ids and the permutation that sorts the slots by them. Deterministic, no host synchronization on GPUs.

    Args:
        ids_TK: logical ids, int32 or int64; -1 selects nothing and stays -1. They must be those that this rank's row of
            the load matrix counted; with others the rows are wrong, though never out of range.
        slot_expert: int32 [P * R], the logical expert of each slot, -1 where it is free.
        send_J: int32 [J], how many of this rank's tokens go to each physical expert.
        num_experts, num_ranks, rank: E, P, and this rank in the EP group.
    """
    if use_triton(ids_TK.device):
        from equipoise.kernels.reroute_triton import triton_reroute

        return triton_reroute(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank)
    physical_TK = plain_reroute(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank)
    return physical_TK, make_permutation(physical_TK, send_J.numel())


def reroute_ids(
    ids_TK: torch.Tensor, slot_expert: torch.Tensor, send_J: torch.Tensor, num_experts: int, num_ranks: int, rank: int
) -> torch.Tensor:
    """The physical ids alone; see `reroute_permutation`."""
    if use_triton(ids_TK.device):
        return reroute_permutation(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank)[0]
    return plain_reroute(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank)
