"""A load for measurements: several hot experts on one rank."""

from equipoise.moe.synthetic import SyntheticRouting


class HotExperts:
    """Three hot experts on rank 0, which so has `imbalance` times the mean load; all others are alike. (One expert
    cannot be so hot: of each token's choices it gets one at most.)"""

    def __init__(self, imbalance: float, num_experts: int, num_experts_per_tok: int, num_ranks: int) -> None:
        hot, here = 3, num_experts // num_ranks
        cold = (here - hot) / (num_experts - hot)
        share = (imbalance / num_ranks - cold) / (1 - cold)
        shares = [share / hot] * hot + [(1 - share) / (num_experts - hot)] * (num_experts - hot)
        self._num_experts_per_tok, self._num_ranks, self._shares = num_experts_per_tok, num_ranks, tuple(shares)

    def routing(self, step: int, rank: int) -> SyntheticRouting:
        """As of `Workload`: the same at every step."""
        return SyntheticRouting(self._shares, self._num_experts_per_tok, self._num_ranks, rank)
