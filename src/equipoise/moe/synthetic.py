"""Routing that is laid down instead of learned, for measurements: perfectly even, or with a stated imbalance of ranks.

Only which experts a token goes to is replaced; the combine weights are still the router's scores of those experts, so
the backward takes the router's own path. A model trained this way learns nothing useful.

Shapes: T tokens of this rank, K experts per token, E experts, P ranks of the EP group, M = E / P experts per rank.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from equipoise.errors import ConfigError


def slots_of_experts(num_slots: int, shares_E: list[float], order: list[int], most: int) -> list[int]:
    """How many of `num_slots` choices each expert gets: in proportion to its share, none more than `most`.

    Whole numbers first; the rest one by one along `order`.
    """
    total = sum(shares_E)
    counts = [min(most, int(num_slots * share / total)) for share in shares_E]
    rest = num_slots - sum(counts)
    while rest:
        before = rest
        for expert in order:
            if rest and counts[expert] < most and shares_E[expert] > 0:
                counts[expert] += 1
                rest -= 1
        if rest == before:  # every wanted expert is full: the others take what is left
            for expert in order:
                take = min(rest, most - counts[expert])
                counts[expert] += take
                rest -= take
    return counts


@dataclass(frozen=True)
class SyntheticRouting:
    """The same decision on every rank of an EP group of `num_ranks`, for any number of tokens.

    imbalance: largest over mean rank load, 1.0 (every expert and rank even) to num_ranks; as far as distinct experts
        per token allow. hot_rank: who has the most; change it from step to step (`moved`) for a moving hot spot.
    rank: this rank in the group. What does not divide evenly goes to other experts on each rank, so that a group's
        histogram is as flat as one rank's even when tokens are few.
    """

    num_experts: int
    num_experts_per_tok: int
    num_ranks: int = 1
    rank: int = 0
    imbalance: float = 1.0
    hot_rank: int = 0

    def __post_init__(self) -> None:
        limit = min(self.num_ranks, self.num_experts / self.num_experts_per_tok)
        if not 1 <= self.imbalance <= limit:
            raise ConfigError(
                f"imbalance is {self.imbalance}; with {self.num_ranks} ranks and {self.num_experts_per_tok} of "
                f"{self.num_experts} experts per token it can be 1 to {limit:.4g}"
            )

    def moved(self, step: int) -> "SyntheticRouting":
        """The routing of another step, whose hot rank is `step` ranks further."""
        hot = (self.hot_rank + step) % self.num_ranks
        return SyntheticRouting(
            self.num_experts, self.num_experts_per_tok, self.num_ranks, self.rank, self.imbalance, hot
        )

    def expert_counts(self, num_tokens: int) -> list[int]:
        """Tokens of each expert, of this rank's `num_tokens`."""
        return list(_expert_counts(self, num_tokens))

    def ids(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """int32 ids_TK, distinct for each token. No host sync; traceable."""
        K = self.num_experts_per_tok
        counts_E = torch.tensor(self.expert_counts(num_tokens), device=device)
        experts = torch.arange(self.num_experts, dtype=torch.int32, device=device)
        # An expert's tokens are consecutive and at most T: over rows of T they fall on different tokens.
        ids = experts.repeat_interleave(counts_E, output_size=num_tokens * K)
        return ids.view(K, num_tokens).T.contiguous()


@lru_cache(maxsize=1024)
def _expert_counts(routing: SyntheticRouting, num_tokens: int) -> tuple[int, ...]:
    E, P = routing.num_experts, routing.num_ranks
    M = E // P
    hot = routing.imbalance / P  # its part of all load
    other = (1 - hot) / (P - 1) if P > 1 else 0.0
    shares = [(hot if expert // M == routing.hot_rank else other) / M for expert in range(E)]
    # Rank by rank in turn, and every source rank starts elsewhere.
    num_slots = num_tokens * routing.num_experts_per_tok
    order = [(place % P) * M + place // P for place in range(E)]
    start = routing.rank * num_slots % E
    return tuple(slots_of_experts(num_slots, shares, order[start:] + order[:start], num_tokens))
