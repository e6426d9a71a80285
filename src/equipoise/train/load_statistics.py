"""How evenly tokens are spread, from integer counts. Pure functions, vectorised over all leading dimensions.

Shape letters: E experts, L layers, ... any leading dimensions (microbatches, layers). Experts lie on ranks in
order, E / ep_size each. Results are float64 or int64 on the counts' device.
"""

from typing import Any

import torch

from equipoise.errors import ConfigError


def expert_maxvio(counts_E: torch.Tensor) -> torch.Tensor:
    """(max - mean) / mean over experts, [..., E] -> [...]: 0 is even, E - 1 all on one. 0 without tokens."""
    counts_E = counts_E.double()
    mean = counts_E.mean(-1)
    return torch.where(mean > 0, counts_E.amax(-1) / mean - 1, 0.0)


def rank_imbalance(counts_E: torch.Tensor, ep_size: int) -> torch.Tensor:
    """max / mean over the ranks' tokens, [..., E] -> [...]: 1 is even, ep_size all on one. 1 without any.

    Raises ConfigError if E is not divisible by `ep_size`.
    """
    num_experts = counts_E.shape[-1]
    if ep_size < 1 or num_experts % ep_size:
        raise ConfigError(f"{num_experts} experts cannot be spread evenly over ep_size={ep_size} ranks")
    load_P = counts_E.double().unflatten(-1, (ep_size, num_experts // ep_size)).sum(-1)
    mean = load_P.mean(-1)
    return torch.where(mean > 0, load_P.amax(-1) / mean, 1.0)


def dead_experts(counts_E: torch.Tensor) -> torch.Tensor:
    """Number of experts without any token, [..., E] -> [...] int64."""
    return (counts_E == 0).sum(-1)


def spread_over_layers(values_L: torch.Tensor) -> dict[str, float]:
    """Median, 95th percentile (linear interpolation) and maximum over layers [L]."""
    p50, p95 = torch.quantile(values_L.double(), torch.tensor([0.5, 0.95], dtype=torch.float64).to(values_L.device))
    return {"p50": float(p50), "p95": float(p95), "max": float(values_L.max())}


def load_metrics(
    counts_LE: torch.Tensor, rank_imbalance_L: torch.Tensor, largest_rank_imbalance: float
) -> dict[str, Any]:
    """Metrics fields of one step.

    Rank imbalance is taken per microbatch and then averaged, as it is what each microbatch waits for; maxvio and dead
    experts are of the step's summed counts. Copies to the host. Empty for a model without MoE layers.

    Args:
        counts_LE: tokens of each expert over all ranks and microbatches.
        rank_imbalance_L: mean over microbatches and EP groups.
        largest_rank_imbalance: of any layer, microbatch and EP group.
    """
    if counts_LE.shape[0] == 0:
        return {}
    counts_LE, imbalance_L = counts_LE.cpu(), rank_imbalance_L.cpu()
    maxvio_L, dead_L = expert_maxvio(counts_LE), dead_experts(counts_LE)
    spread = spread_over_layers(imbalance_L)
    return {
        "rank_imbalance": float(imbalance_L.mean()),
        "rank_imbalance_p50": spread["p50"],
        "rank_imbalance_p95": spread["p95"],
        "rank_imbalance_max": largest_rank_imbalance,
        "expert_maxvio": float(maxvio_L.mean()),
        "dead_experts": int(dead_L.sum()),
        "layers": {
            "rank_imbalance": imbalance_L.tolist(),
            "expert_maxvio": maxvio_L.tolist(),
            "dead_experts": dead_L.tolist(),
        },
    }
