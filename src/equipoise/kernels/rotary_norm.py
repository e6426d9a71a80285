"""Norm of each head's features and their rotary position in one pass, for queries and keys. The plain form is the
reference.

Shapes: B sequences, S tokens, N heads, H features of a head.
"""

import torch
import torch.nn.functional as F

from equipoise.kernels.operators import operator
from equipoise.kernels.triton_support import use_triton


def plain_rotary_norm(
    x_BSNH: torch.Tensor, weight_H: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMS norm over the features, then the rotary embedding in the half-split layout; [B, S, N, H]."""
    y_BSNH = F.rms_norm(x_BSNH, (x_BSNH.shape[-1],), weight_H, eps)
    first, second = y_BSNH.chunk(2, dim=-1)
    return y_BSNH * cos.transpose(1, 2) + torch.cat([-second, first], dim=-1) * sin.transpose(1, 2)


def rotary_norm(
    x_BSNH: torch.Tensor, weight_H: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """The same, by a kernel where Triton runs. Arithmetic is FP32 there, rounded once.

    Args:
        x_BSNH: queries or keys of any float dtype.
        weight_H: of the norm.
        cos, sin: [B or 1, 1, S, H], of the dtype of `x_BSNH`, which the result has.
        eps: added to the mean square.
    """
    features = x_BSNH.shape[-1]
    if use_triton(x_BSNH.device) and features >= 16 and features & (features - 1) == 0:
        return _rotary_norm(x_BSNH, weight_H, cos, sin, eps)
    return plain_rotary_norm(x_BSNH, weight_H, cos, sin, eps)


@operator("rotary_norm")
def _rotary_norm(
    x_BSNH: torch.Tensor, weight_H: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    from equipoise.kernels.rotary_norm_triton import launch_forward

    return launch_forward(x_BSNH.contiguous(), weight_H.contiguous(), cos.contiguous(), sin.contiguous(), eps)


@torch.library.register_fake("equipoise::rotary_norm")
def _(x_BSNH, weight_H, cos, sin, eps):
    return torch.empty_like(x_BSNH, memory_format=torch.contiguous_format)


@operator("rotary_norm_backward")
def _rotary_norm_backward(
    grad_BSNH: torch.Tensor,
    x_BSNH: torch.Tensor,
    weight_H: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    from equipoise.kernels.rotary_norm_triton import launch_backward

    if grad_BSNH.stride(-1) != 1:
        grad_BSNH = grad_BSNH.contiguous()
    x_BSNH, weight_H, cos, sin = (value.contiguous() for value in (x_BSNH, weight_H, cos, sin))
    return launch_backward(grad_BSNH, x_BSNH, weight_H, cos, sin, eps)


@torch.library.register_fake("equipoise::rotary_norm_backward")
def _(grad_BSNH, x_BSNH, weight_H, cos, sin, eps):
    grad_weight = torch.empty_like(weight_H, memory_format=torch.contiguous_format)
    return torch.empty_like(x_BSNH, memory_format=torch.contiguous_format), grad_weight


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_BSNH):
    grad_x, grad_weight = _rotary_norm_backward(grad_BSNH, *ctx.saved_tensors, ctx.eps)
    return grad_x, grad_weight, None, None, None


torch.library.register_autograd("equipoise::rotary_norm", _backward, setup_context=_setup_context)
