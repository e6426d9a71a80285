"""Per-source splits: how many tokens each rank sends to each physical expert, so that quotas are met exactly.

A physical expert on a rank first takes that rank's own tokens, as far as its quota goes. What is left is laid on one
line per expert: the ranks' remaining tokens in rank order, and against them the remaining quotas, the master's first,
then the slots' in order of physical id. Where an interval of tokens overlaps one of quota, that many tokens go there.
Both partitions cover the same line, so the sums are exact both ways. A rank needs its own rows and columns only:
nothing here is larger than the load matrix (a dense split would be E * P * P).

Shapes: P ranks, E logical experts, M masters and R slots per rank, L = M + R locals, J = E + P * R instances (all
masters, then all slots).
"""

import torch

from equipoise.balance.plan import BalancePlan, Placement


def to_instances(placement: Placement, x_I: torch.Tensor) -> torch.Tensor:
    """Values per physical expert, in order of physical id, as values per instance [J]: masters first."""
    x_PL = x_I.view(placement.num_ranks, -1)
    return torch.cat([x_PL[:, : placement.num_masters].flatten(), x_PL[:, placement.num_masters :].flatten()])


def from_instances(placement: Placement, x_J: torch.Tensor) -> torch.Tensor:
    """The inverse of `to_instances`."""
    P, E = placement.num_ranks, placement.num_experts
    return torch.cat([x_J[:E].view(P, -1), x_J[E:].view(P, -1)], 1).flatten()


def _overlap(start: torch.Tensor, size: torch.Tensor, other_start: torch.Tensor, other_size: torch.Tensor):
    """Length that two intervals have in common."""
    end = (start + size).minimum(other_start + other_size)
    return (end - start.maximum(other_start)).clamp_(min=0)


def complete_plan(placement: Placement, load_PE: torch.Tensor, rank: int) -> BalancePlan:
    """The plan of one rank: the placement with this rank's sends and receives.

    `load_PE`: integer tensor [P, E] on the placement's device, the load that the placement was made for. Every rank
    computes its own part without communication and without host synchronization.
    """
    P, E = placement.num_ranks, placement.num_experts
    M, R = placement.num_masters, placement.num_slots
    device = load_PE.device
    load_PE = load_PE.long()
    quota_J = to_instances(placement, placement.quota.long())
    slot_expert = placement.slot_expert.long()
    is_used_J = torch.cat([torch.ones(E, dtype=torch.bool, device=device), slot_expert >= 0])
    expert_J = torch.cat([torch.arange(E, device=device), slot_expert.clamp(min=0)])
    ranks = torch.arange(P, device=device)
    rank_J = torch.cat([ranks.repeat_interleave(M, output_size=E), ranks.repeat_interleave(R, output_size=P * R)])

    cell_J = rank_J * E + expert_J
    own_J = load_PE.flatten()[cell_J].minimum(quota_J)
    own_J = torch.where(is_used_J, own_J, 0)
    rest_PE = load_PE.flatten().index_add(0, cell_J, -own_J).view(P, E)  # an expert is on a rank once
    rest_J = quota_J - own_J

    rest_E = rest_PE.sum(0)
    first_PE = (rest_E.cumsum(0) - rest_E) + (rest_PE.cumsum(0) - rest_PE)
    order_J = torch.argsort(torch.where(is_used_J, expert_J, E), stable=True)
    ordered_J = rest_J[order_J]
    first_J = torch.empty_like(rest_J).index_copy_(0, order_J, ordered_J.cumsum(0) - ordered_J)

    send_J = _overlap(first_PE[rank, expert_J], rest_PE[rank, expert_J], first_J, rest_J) + own_J * (rank_J == rank)
    mine = torch.cat([torch.arange(M, device=device) + rank * M, torch.arange(R, device=device) + E + rank * R])
    expert_L = expert_J[mine]
    recv_PL = _overlap(first_PE[:, expert_L], rest_PE[:, expert_L], first_J[mine], rest_J[mine])
    recv_PL[rank] += own_J[mine]
    return BalancePlan(placement, from_instances(placement, send_J).int(), recv_PL.int(), rank)
