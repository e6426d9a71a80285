"""What balancing would gain for a traced load, by the planner and the cost model of `balance/cost.py`.

Shapes: L MoE layers, N sequences, E experts, G EP groups' microbatches, P ranks.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from equipoise.balance.bounds import rank_load
from equipoise.balance.cost import advise_slots, planned_cost
from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.rules import MAX_COPY_TOKENS
from equipoise.errors import ConfigError
from equipoise.simulate.assumptions import turning_point
from equipoise.trace.collect import Traced

PAYS = 1.02
"""Gain of a step from which balancing is called worth it: below, measurements differ by as much."""


@dataclass(frozen=True)
class Prediction:
    """Of one EP size. Loads are tokens of the busiest rank over the mean; 1 is perfect.

    before_L: of each layer, mean over microbatches. after: as planned, all layers. cost: the same with the time of
    copies. slots: replica slots per rank. samples: microbatches of a whole EP group that the text gave; 0: less than
    one, whose load was scaled. tokens_per_rank, copy_tokens: what it is for. turn: from how many tokens per rank on
    balancing pays, in words.
    """

    ep_size: int
    tokens_per_rank: int
    copy_tokens: int
    before_L: np.ndarray
    after: float
    cost: float
    slots: int
    samples: int
    turn: str = ""

    @property
    def before(self) -> float:
        """Mean over layers."""
        return float(self.before_L.mean())

    @property
    def expert_gain(self) -> float:
        """Time of the experts without balancing over the time with it."""
        return self.before / self.cost

    def step_gain(self, expert_share: float) -> float:
        """The same of a whole step in which perfectly even experts take `expert_share` of the time."""
        dense = 1 - expert_share
        return (dense + expert_share * self.before) / (dense + expert_share * self.cost)


def group_loads(counts_LNE: np.ndarray, num_sequences: int) -> tuple[torch.Tensor, int]:
    """int64 [L, G, E]: loads of EP groups whose microbatch has so many sequences, and how many the text gave.

    Where it has less than one, all of it is scaled up and the number is 0.
    """
    num_layers, found, num_experts = counts_LNE.shape
    groups = found // num_sequences
    if groups == 0:
        scaled = counts_LNE.sum(1, keepdims=True) * num_sequences // found
        return torch.from_numpy(scaled.astype(np.int64)), 0
    used = counts_LNE[:, : groups * num_sequences]
    loads = used.reshape(num_layers, groups, num_sequences, num_experts).sum(2)
    return torch.from_numpy(loads.astype(np.int64)), groups


def predict(traced: Traced, ep_size: int, tokens_per_rank: int, slots: int | None, copy_tokens: int) -> Prediction:
    """The prediction for an EP size at which each rank has `tokens_per_rank` tokens in a microbatch.

    slots: per rank; None takes as many as the cost model finds worth it.

    With f times the tokens, as unevenly spread, a copy counts a f-th: so the turning point is found, for the first
    microbatch. A f-th that planners could not count is left as it is, and the load taken f times.

    Raises:
        ConfigError: an EP size that does not divide the experts.
    """
    num_experts = traced.num_experts
    if ep_size < 2 or num_experts % ep_size:
        valid = [p for p in range(2, num_experts + 1) if num_experts % p == 0]
        raise ConfigError(
            f"--ep {ep_size} does not divide the {num_experts} experts of the model among two ranks or more: choose "
            f"from {', '.join(map(str, valid))}"
        )
    num_sequences = max(1, round(ep_size * tokens_per_rank / traced.sequence_length))
    load_LGE, samples = group_loads(traced.counts_LNE, num_sequences)

    def gain(factor: float) -> float:
        load, copy = load_LGE[:, :1], round(copy_tokens / factor)
        if copy > MAX_COPY_TOKENS:  # more than planners count, and the factor is below 1
            load, copy = (load * factor).long(), copy_tokens
        return _predict(load, ep_size, tokens_per_rank, slots, copy).step_gain(traced.expert_share)

    found = replace(_predict(load_LGE, ep_size, tokens_per_rank, slots, copy_tokens), samples=samples)
    pays = found.step_gain(traced.expert_share) >= PAYS
    return replace(found, turn=turning_point(tokens_per_rank, pays, lambda factor: gain(factor) >= PAYS))


def _predict(
    load_LGE: torch.Tensor, ep_size: int, tokens_per_rank: int, slots: int | None, copy_tokens: int
) -> Prediction:
    load_BE, num_experts = load_LGE.flatten(0, 1), load_LGE.shape[2]
    settings = PlannerSettings(num_slots=slots or 1, copy_tokens=copy_tokens)
    if slots is None:
        slots, _ = advise_slots(load_BE, ep_size, settings, max_slots=min(4, num_experts // ep_size))
    settings = PlannerSettings(num_slots=slots, copy_tokens=copy_tokens)
    free = PlannerSettings(num_slots=slots)
    load_BP = rank_load(load_BE, ep_size).double()
    mean_B = load_BP.mean(1).clamp(min=1)
    before_B = load_BP.amax(1) / mean_B
    cost_B = torch.minimum(planned_cost(load_BE, ep_size, settings) / mean_B, before_B)
    after_B = planned_cost(load_BE, ep_size, free) / mean_B if slots else before_B
    return Prediction(
        ep_size,
        tokens_per_rank,
        copy_tokens,
        before_B.view(load_LGE.shape[:2]).mean(1).numpy(),
        float(after_B.mean()),
        float(cost_B.mean()),
        slots,
        samples=load_LGE.shape[1],
    )
