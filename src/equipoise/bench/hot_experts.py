"""A load for measurements: several hot experts on one rank."""

from equipoise.errors import ConfigError
from equipoise.moe.synthetic import SyntheticRouting

HOT = 3


class HotExperts:
    """Three hot experts on rank 0, which so has `imbalance` times the mean load; all others are alike. (One expert
    cannot be so hot: of each token's choices it gets one at most.)

    Raises:
        ConfigError: an imbalance that these sizes cannot have; names the range.
    """

    def __init__(self, imbalance: float, num_experts: int, num_experts_per_tok: int, num_ranks: int) -> None:
        here = num_experts // num_ranks
        if num_experts <= HOT:
            raise ConfigError(f"{num_experts} experts: a load with {HOT} hot ones needs others beside them")
        cold = (here - HOT) / (num_experts - HOT)
        limit = num_ranks * (cold + (1 - cold) * min(1.0, HOT / num_experts_per_tok))
        if here < HOT or not 1 <= imbalance <= limit:
            raise ConfigError(
                f"imbalance is {imbalance}; {HOT} hot experts of {num_experts} on one of {num_ranks} ranks, "
                f"{num_experts_per_tok} per token, can make it 1 to {limit:.4g}, where a rank has as many experts"
            )
        share = (imbalance / num_ranks - cold) / (1 - cold)
        shares = [share / HOT] * HOT + [(1 - share) / (num_experts - HOT)] * (num_experts - HOT)
        self._num_experts_per_tok, self._num_ranks, self._shares = num_experts_per_tok, num_ranks, tuple(shares)

    def routing(self, step: int, rank: int) -> SyntheticRouting:
        """As of `Workload`: the same at every step."""
        return SyntheticRouting(self._shares, self._num_experts_per_tok, self._num_ranks, rank)
