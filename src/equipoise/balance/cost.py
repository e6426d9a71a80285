"""When a replica pays: the time of a weight copy, told in tokens that an expert computes in the same time.

A copy moves 2 bytes per parameter (BF16) over a link; a token costs 2 FLOP per parameter forward and 4 backward. The
number of parameters cancels: a copy is worth `syncs * bytes * FLOP/s / (FLOP per parameter * bytes/s)` tokens,
whatever the expert's size. At 600 TFLOP/s and 400 GB/s that is 1,500 tokens forward, and 1,000 for forward and backward
with the weights sent for each and the gradients' return hidden.
"""

import torch

from equipoise.balance.bounds import rank_load
from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.rules import MAX_COPY_TOKENS
from equipoise.errors import ConfigError

FORWARD_FLOP, BACKWARD_FLOP = 2, 4
"""FLOP per token and parameter."""


def tokens_per_copy(
    flops_per_s: float, bytes_per_s: float, bytes_per_parameter: float = 2.0, syncs: int = 2, training: bool = True
) -> int:
    """`copy_tokens` of `PlannerSettings`: tokens on one expert that take as long as one weight copy.

    flops_per_s: FLOP/s that the grouped GEMM reaches. bytes_per_s: rate at which one rank sends weights to a peer.
    bytes_per_parameter: of what is copied. syncs: exposed copies per plan (2: for forward and again for backward).
    training: count the backward's FLOP as well.
    """
    for name, value in (("flops_per_s", flops_per_s), ("bytes_per_s", bytes_per_s)):
        if not value > 0:
            raise ConfigError(f"{name} is {value}; expected a positive rate")
    flop = FORWARD_FLOP + (BACKWARD_FLOP if training else 0)
    return min(round(syncs * bytes_per_parameter * flops_per_s / (flop * bytes_per_s)), MAX_COPY_TOKENS)


def break_even_imbalance(mean_rank_load: float, copy_tokens: int, copies: int = 1) -> float:
    """The ratio of largest to mean rank load above which balancing with so many copies per busiest rank pays."""
    return 1.0 + copy_tokens * copies / mean_rank_load if mean_rank_load > 0 else float("inf")


def planned_cost(load_BE: torch.Tensor, num_ranks: int, settings: PlannerSettings) -> torch.Tensor:
    """float64 [B]: the time of each load's plan, in tokens: its largest rank load plus the busiest rank's copies."""
    placement = plan_loads(load_BE, num_ranks, settings)
    P, R, M = num_ranks, settings.num_slots, load_BE.shape[1] // num_ranks
    slots_BS = placement.slot_expert.long()
    received_B = (slots_BS.view(-1, P, R) >= 0).sum(2).amax(1) if R else slots_BS.new_zeros(len(slots_BS))
    home_BS = torch.where(slots_BS < 0, P, slots_BS // M)
    sent_BP = slots_BS.new_zeros(len(slots_BS), P + 1).scatter_add_(1, home_BS, torch.ones_like(home_BS))[:, :P]
    busiest_B = received_B.maximum(sent_BP.amax(1))
    return placement.rank_load.amax(1).double() + settings.copy_tokens * busiest_B


def advise_slots(
    load_BE: torch.Tensor, num_ranks: int, settings: PlannerSettings, max_slots: int | None = None, slack: float = 0.005
) -> tuple[int, list[float]]:
    """How many slots per rank these loads want: the fewest whose mean planned time is within `slack` of the best.

    Returns that number and, for 0, 1, ... slots up to `max_slots` (default: as many as masters, more never help), the
    mean over loads of planned time over the mean rank load: 1.0 is perfect balance without any copy.
    """
    num_masters = load_BE.shape[1] // num_ranks
    mean_B = rank_load(load_BE, num_ranks).double().mean(1).clamp(min=1)
    costs = []
    for slots in range(min(max_slots if max_slots is not None else num_masters, num_masters) + 1):
        tried = PlannerSettings(
            slots, settings.tolerance, settings.min_tokens, settings.domain_size, settings.copy_tokens
        )
        costs.append(float((planned_cost(load_BE, num_ranks, tried) / mean_B).mean()))
    best = min(costs)
    return next(slots for slots, cost in enumerate(costs) if cost <= best * (1 + slack)), costs
