"""Combine weights of the selected experts, differentiable: on accelerators one launch each way.

Shapes: T tokens, E experts, K experts per token.
"""

import torch

from equipoise.kernels.operators import operator
from equipoise.kernels.triton_support import use_triton


def plain_router_weights(
    scores_TE: torch.Tensor, ids_TK: torch.Tensor, is_normalised: bool, scale: float
) -> torch.Tensor:
    """The reference, from softmax or sigmoid scores; see `router_weights`."""
    weights_TK = scores_TE.gather(1, ids_TK.long().clamp(min=0))
    if is_normalised:
        # The small number matters only for sigmoid scores that all underflow; it is below float32 otherwise.
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)
    return weights_TK * scale


@operator("router_weights")
def router_weights_forward(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, is_softmax: bool, is_normalised: bool, scale: float
) -> torch.Tensor:
    from equipoise.kernels.select_experts_triton import triton_router_weights

    return triton_router_weights(logits_TE, ids_TK, is_softmax, is_normalised, scale)


@torch.library.register_fake("equipoise::router_weights")
def _(logits_TE, ids_TK, is_softmax, is_normalised, scale):
    return logits_TE.new_empty(ids_TK.shape)


@operator("router_weights_backward")
def router_weights_backward(
    grad_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    is_softmax: bool,
    is_normalised: bool,
    scale: float,
) -> torch.Tensor:
    from equipoise.kernels.select_experts_triton import triton_router_weights_backward

    return triton_router_weights_backward(grad_TK, logits_TE, ids_TK, is_softmax, is_normalised, scale)


@torch.library.register_fake("equipoise::router_weights_backward")
def _(grad_TK, logits_TE, ids_TK, is_softmax, is_normalised, scale):
    return logits_TE.new_empty(logits_TE.shape)


class _RouterWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits_TE, ids_TK, is_softmax, is_normalised, scale):
        ctx.save_for_backward(logits_TE, ids_TK)
        ctx.options = is_softmax, is_normalised, scale
        return router_weights_forward(logits_TE, ids_TK, *ctx.options)

    @staticmethod
    def backward(ctx, grad_TK):
        return router_weights_backward(grad_TK, *ctx.saved_tensors, *ctx.options), None, None, None, None


def fused_router_weights(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, is_softmax: bool, is_normalised: bool, scale: float
) -> torch.Tensor:
    """The Triton form of `router_weights`, which needs no scores."""
    return _RouterWeights.apply(logits_TE, ids_TK, is_softmax, is_normalised, scale)


def router_weights(
    logits_TE: torch.Tensor,
    scores_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    is_softmax: bool,
    is_normalised: bool,
    scale: float,
) -> torch.Tensor:
    """weights_TK float32: the selected experts' scores, normalised to sum 1 if asked, times `scale`.

    Args:
        logits_TE: float32; on accelerators the weights are computed from them and the gradient goes there directly.
        scores_TE: their softmax or sigmoid, which the plain form reads; the gradient reaches the logits through it.
        ids_TK: the selected experts; the weights of a slot of -1 are those of expert 0, for nobody to read.
        is_softmax: which of the two the scores are.
    """
    if use_triton(logits_TE.device):
        return fused_router_weights(logits_TE, ids_TK, is_softmax, is_normalised, scale)
    return plain_router_weights(scores_TE, ids_TK, is_normalised, scale)
