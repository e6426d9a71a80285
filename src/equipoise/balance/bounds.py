"""Bounds on the largest rank load that any placement can reach.

Shapes: B loads, P ranks, E experts, R slots per rank, X bends.
"""

import torch

from equipoise.balance.plan import experts_per_rank


def rank_load(load_BE: torch.Tensor, num_ranks: int) -> torch.Tensor:
    """int64 [B, P]: tokens that each rank computes without replicas."""
    return load_BE.long().view(load_BE.shape[0], num_ranks, -1).sum(2)


def floor_load(load_BE: torch.Tensor, num_ranks: int, domain_size: int = 0) -> torch.Tensor:
    """int64 [B]: the mean rank load, rounded up; with domains that of the domain with the largest mean."""
    size = domain_size or num_ranks
    return (rank_load(load_BE, num_ranks).view(load_BE.shape[0], -1, size).sum(2).amax(1) + size - 1) // size


def lower_bound(load_BE: torch.Tensor, num_ranks: int, num_slots: int, domain_size: int = 0) -> torch.Tensor:
    """int64 [B]: no placement has a largest rank load below this.

    At a largest load t, the ranks above t give away their excess, and a rank below t gains at most its room and at most
    what its slots can host: the R largest experts. The smallest t at which the gains cover the excess is a bound.
    Gains minus excess is a non-decreasing, piecewise linear function of t that bends only at a rank's load and at its
    load plus what its slots can host: it is evaluated at all bends at once, then the crossing lies on one line.
    """
    experts_per_rank(load_BE.shape[1], num_ranks)
    load_BP = rank_load(load_BE, num_ranks)
    hosted_B1 = load_BE.long().topk(min(num_slots, load_BE.shape[1]), dim=1).values.sum(1, keepdim=True)
    bend_BX = torch.cat([load_BP, load_BP + hosted_B1], 1)
    above_BXP = bend_BX[:, :, None] - load_BP[:, None, :]
    gain_BX = above_BXP.clamp(min=0).minimum(hosted_B1[:, :, None]).sum(2)
    surplus_BX = gain_BX + above_BXP.clamp(max=0).sum(2)
    lowest_B = load_BP.amin(1)
    below_B = torch.where(surplus_BX < 0, bend_BX, -1).amax(1)  # the last bend before the crossing; -1: all ranks equal
    at_B1 = torch.where(below_B < 0, lowest_B, below_B)[:, None]
    is_gaining_BP = (load_BP <= at_B1) & (at_B1 < load_BP + hosted_B1)
    slope_B = (is_gaining_BP | (load_BP > at_B1)).sum(1).clamp(min=1)
    above_BP = at_B1 - load_BP
    surplus_B = (above_BP.clamp(min=0).minimum(hosted_B1) + above_BP.clamp(max=0)).sum(1)
    crossing_B = at_B1[:, 0] + (-surplus_B + slope_B - 1) // slope_B
    bound_B = torch.where(below_B < 0, lowest_B, crossing_B)
    return bound_B.maximum(floor_load(load_BE, num_ranks, domain_size))
