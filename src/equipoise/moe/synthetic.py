"""Routing that is laid down instead of learned, for measurements: perfectly even, or as uneven as stated.

Only which experts a token goes to is replaced; the combine weights are still the router's scores of those experts, so
the backward takes the router's own path. A model trained this way learns nothing useful.

Shapes: T tokens of this rank, K experts per token, E experts, P ranks of the EP group, M = E / P experts per rank.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import torch

from equipoise.config import Config
from equipoise.errors import ConfigError

WorkloadName = Literal[
    "balanced", "hot_experts", "hot_rank", "spread", "ragged_sources", "zero_load_ranks", "rotating", "burst"
]
WORKLOADS: tuple[str, ...] = get_args(WorkloadName)
BURST_EVERY = 4
"""The workload `burst` is uneven in one of so many steps."""


class SyntheticRoutingConfig(Config):
    """For measurements only: lays the routing down instead of learning it. The model learns nothing useful."""

    workload: WorkloadName = "balanced"
    """balanced: every expert and rank even, the ceiling of what balancing can reach. hot_experts: one expert is hot, on
    one rank in four. hot_rank: all experts of one rank are. spread: rank loads fall off as a power. ragged_sources:
    hot_rank, and the ranks have unequal numbers of tokens. zero_load_ranks: some ranks get nothing. rotating: the hot
    rank changes each step. burst: hot_rank in one step of four, else balanced."""
    imbalance: float = 1.5
    """Largest over mean rank load, from 1 to ep_size or num_experts / num_experts_per_tok; `balanced` ignores it, and
    zero_load_ranks takes the nearest that whole ranks allow."""


@dataclass(frozen=True)
class SyntheticRouting:
    """One decision for any number of tokens, the same on every rank of an EP group.

    shares_E: part of all choices that goes to each expert; an expert can get at most one choice of each token.
    rank: this rank of `num_ranks`. What does not divide evenly goes to other experts on each rank, so that a group's
        histogram is as flat as one rank's even when tokens are few.
    token_share: part of this rank's tokens that goes anywhere; the others are treated as padding.
    """

    shares_E: tuple[float, ...]
    num_experts_per_tok: int
    num_ranks: int = 1
    rank: int = 0
    token_share: float = 1.0

    def num_routed(self, num_tokens: int) -> int:
        """How many of this rank's tokens go anywhere: the first ones."""
        return round(num_tokens * self.token_share)

    def expert_counts(self, num_tokens: int) -> list[int]:
        """Tokens of each expert, of this rank's `num_tokens`."""
        return list(_expert_counts(self, self.num_routed(num_tokens)))

    def ids(self, num_tokens: int, device: torch.device) -> torch.Tensor:
        """int32 ids [T', K] of the T' tokens that go anywhere, distinct for each token; shared, not to be changed.
        Traceable. Waits for no device, once it has been asked for the same."""
        return _ids(self, num_tokens, device)

    def choose(self, scores_TE: torch.Tensor, valid_T: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scores whose K largest are this routing's choice, and the tokens that take part."""
        num_tokens = scores_TE.shape[0]
        ids_TK = self.ids(num_tokens, scores_TE.device)
        routed = ids_TK.shape[0]
        choice_TE = torch.zeros_like(scores_TE)
        choice_TE[:routed] = choice_TE[:routed].scatter(1, ids_TK.long(), 1.0)
        if routed < num_tokens:
            taken_T = torch.arange(num_tokens, device=scores_TE.device) < routed
            valid_T = taken_T if valid_T is None else valid_T & taken_T
        return choice_TE, valid_T


@dataclass(frozen=True)
class Workload:
    """A kind of load over the steps of a run, for the experts of one EP group. See `SyntheticRoutingConfig`.

    Raises:
        ConfigError: an imbalance that these sizes cannot have; names the range.
    """

    name: str
    imbalance: float
    num_experts: int
    num_experts_per_tok: int
    num_ranks: int

    def __post_init__(self) -> None:
        if self.name not in WORKLOADS:
            raise ConfigError(f"there is no workload {self.name!r}: choose {', '.join(WORKLOADS)}")
        if self.num_experts_per_tok > self.num_experts:
            raise ConfigError(
                f"a token cannot have {self.num_experts_per_tok} of {self.num_experts} experts: choose 1 to "
                f"{self.num_experts} experts per token"
            )
        limit = self.largest_imbalance
        if self.name != "balanced" and not 1 <= self.imbalance <= limit:
            raise ConfigError(
                f"imbalance is {self.imbalance}; the workload {self.name} with {self.num_ranks} ranks and "
                f"{self.num_experts_per_tok} of {self.num_experts} experts per token can have 1 to {limit:.4g}"
            )

    @property
    def _hot_ranks(self) -> int:
        """Ranks with a hot expert in `hot_experts`."""
        return max(1, self.num_ranks // 4)

    @property
    def largest_imbalance(self) -> float:
        """What these sizes can have: an expert gets at most one choice of each token."""
        E, K, P = self.num_experts, self.num_experts_per_tok, self.num_ranks
        M, hot = E // P, self._hot_ranks
        if self.name != "hot_experts" or P == 1:
            return min(P, E / K)
        most = min(1 / K, 1 / hot)  # a hot expert gets every token; what is left is even over the others
        return P * (most + (M - 1) * (1 - hot * most) / (E - hot))

    def routing(self, step: int = 0, rank: int = 0) -> SyntheticRouting:
        """The routing of one step on one rank."""
        token_share = 1.0
        if self.name == "ragged_sources" and self.num_ranks > 1:
            token_share = 1 - 0.75 * rank / (self.num_ranks - 1)
        return SyntheticRouting(self.shares(step), self.num_experts_per_tok, self.num_ranks, rank, token_share)

    def shares(self, step: int = 0) -> tuple[float, ...]:
        """Each expert's part of all choices in one step."""
        E, P, name = self.num_experts, self.num_ranks, self.name
        M, part = E // P, self.imbalance / P  # part: of the most loaded rank
        if P == 1 or name == "balanced" or (name == "burst" and step % BURST_EVERY):
            return (1 / E,) * E
        if name == "hot_experts":
            hot = self._hot_ranks
            even = (1 - hot * part) / (E - hot * M)
            stride = P // hot * M
            is_hot = [expert % stride == 0 and expert // stride < hot for expert in range(E)]
            return tuple(part - (M - 1) * even if h else even for h in is_hot)
        if name == "zero_load_ranks":
            active = max(math.ceil(self.num_experts_per_tok / M), round(P / self.imbalance))
            ranks = [1 / active if rank < active else 0.0 for rank in range(P)]
        elif name == "spread":
            ranks = _power_law(P, part)
        else:
            hottest = step % P if name == "rotating" else 0
            ranks = [part if rank == hottest else (1 - part) / (P - 1) for rank in range(P)]
        return tuple(ranks[expert // M] / M for expert in range(E))


def _power_law(number: int, largest: float) -> list[float]:
    """Parts that fall off as a power of the rank and add to 1, the first of them `largest`."""
    low, high = 0.0, 64.0
    for _ in range(60):
        exponent = (low + high) / 2
        parts = [(rank + 1) ** -exponent for rank in range(number)]
        low, high = (exponent, high) if 1 / sum(parts) < largest else (low, exponent)
    return [part / sum(parts) for part in parts]


@lru_cache(maxsize=64)
def _ids(routing: SyntheticRouting, num_tokens: int, device: torch.device) -> torch.Tensor:
    with torch.inference_mode(False):
        routed, K = routing.num_routed(num_tokens), routing.num_experts_per_tok
        counts_E = torch.tensor(routing.expert_counts(num_tokens), device=device)
        experts = torch.arange(len(routing.shares_E), dtype=torch.int32, device=device)
        # An expert's tokens are consecutive and at most T': over rows of T' they fall on different tokens.
        ids = experts.repeat_interleave(counts_E, output_size=routed * K)
        return ids.view(K, routed).T.contiguous()


@lru_cache(maxsize=1024)
def _expert_counts(routing: SyntheticRouting, num_tokens: int) -> tuple[int, ...]:
    """Choices of each expert: whole numbers in proportion first, the rest one by one; none more than the tokens."""
    E, P = len(routing.shares_E), routing.num_ranks
    num_choices = num_tokens * routing.num_experts_per_tok
    wishes = [num_choices * share for share in routing.shares_E]
    counts = [min(num_tokens, int(wish + 1e-6)) for wish in wishes]
    # Rank by rank in turn, and every source rank starts elsewhere.
    order = [(place % P) * (E // P) + place // P for place in range(E)]
    start = routing.rank * num_choices % E
    order = order[start:] + order[:start]
    rest = num_choices - sum(counts)
    wanted = [expert for expert in order if wishes[expert] > 0]
    wanted.sort(key=lambda expert: wishes[expert] <= counts[expert] + 1e-6)  # those with a fraction come first
    while rest and (open_ones := [expert for expert in wanted if counts[expert] < num_tokens]):
        for expert in open_ones[:rest]:
            counts[expert] += 1
        rest -= min(rest, len(open_ones))
    for expert in order:  # every wanted expert is full: the others take what is left
        take = min(rest, num_tokens - counts[expert])
        counts[expert] += take
        rest -= take
    return tuple(counts)
