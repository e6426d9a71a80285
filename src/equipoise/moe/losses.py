"""Auxiliary losses of one MoE layer and microbatch.

Shapes: T tokens, E experts. All arithmetic is FP32; counts are data and carry no gradient.
"""

from typing import Literal

import torch
import torch.distributed as dist

from equipoise.distributed.collectives import Group, live_group

BalanceScope = Literal["micro_batch", "global_batch"]


def _valid_mean(values_T: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Mean over dim 0 of the valid rows; 0 when there are none."""
    if valid_T is None:
        return values_T.mean(0) if values_T.shape[0] else values_T.sum(0)
    mask = valid_T.view(-1, *[1] * (values_T.dim() - 1))
    return torch.where(mask, values_T, 0).sum(0) / valid_T.sum().clamp(min=1)


def balance_loss(
    probs_TE: torch.Tensor,
    counts_E: torch.Tensor,
    valid_T: torch.Tensor | None,
    num_experts_per_tok: int,
    group: Group | None = None,
) -> torch.Tensor:
    """Load-balance loss of Switch Transformers, eq. 4-6 (arXiv 2101.03961), for one layer.

    E * sum over experts of (tokens of the expert / tokens) * (mean probability of the expert). Perfect balance
    gives K (the experts per token), everything on K experts gives at most E. Padding is not counted.

    Args:
        probs_TE: float32 routing probabilities (softmax once, or normalised sigmoid scores).
        counts_E: int32 tokens of each expert in this microbatch on this rank.
        valid_T: bool mask of real tokens, or None.
        num_experts_per_tok: K.
        group: sums the counts over these ranks (the global-batch form); None keeps them local.

    Returns:
        Scalar float32; its gradient reaches the router through `probs_TE` only.
    """
    if group is not None and group.size() > 1:
        counts_E = counts_E.clone()
        dist.all_reduce(counts_E, group=live_group(group))
    num_tokens = counts_E.sum().clamp(min=1) / num_experts_per_tok
    return counts_E.numel() * (counts_E / num_tokens * _valid_mean(probs_TE, valid_T)).sum()


def z_loss(logits_TE: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
    """Mean squared log-sum-exp of the router logits (ST-MoE, arXiv 2202.08906); scalar float32."""
    return _valid_mean(logits_TE.logsumexp(-1).square(), valid_T)
