"""Aux-loss-free balancing: the selection bias moves after each optimizer step, from exact counts.

Source: "Auxiliary-Loss-Free Load Balancing Strategy for Mixture-of-Experts", arXiv 2408.15664, sign rule.
"""

import torch


@torch.no_grad()
def update_selection_bias(bias_E: torch.Tensor, counts_E: torch.Tensor, speed: float) -> None:
    """Moves each expert's bias by `speed` towards balance, in place: up if it got less than the mean, down if more.

    Args:
        bias_E: float32 buffer, changed in place (so that checkpoints see it).
        counts_E: integer tokens of each expert over all ranks and microbatches of the step.
        speed: step size; 0.001 is the paper's.
    """
    # Integer arithmetic: sign(mean - count) = sign(total - count * E), exact at any count.
    counts = counts_E.long()
    bias_E.add_(torch.sign(counts.sum() - counts * counts.numel()).to(bias_E.dtype), alpha=speed)
