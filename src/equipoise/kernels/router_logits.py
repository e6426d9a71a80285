"""Router logits in FP32. `plain_router_logits` is the reference.

16-bit tokens and weights have exact products in FP32, so a product of 16-bit matrices that adds and returns FP32 gives
the logits of a product of FP32 matrices, on the fast units and without the FP32 copies. Its gradients take the logits'
FP32 gradient in two 16-bit parts, which keep 16 of its 24 bits; both results are 16-bit anyway.

Shapes: T tokens, D features, E experts.
"""

import torch
import torch.nn.functional as F


def plain_router_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """Everything in FP32."""
    return F.linear(x_TD.float(), weight_ED.float())


def split_bfloat16(value_TE: torch.Tensor) -> torch.Tensor:
    """BF16 [T, 2 * E], two parts side by side whose sum is an FP32 tensor, up to 2^-16 of each element."""
    T, E = value_TE.shape
    parts = value_TE.new_empty(T, 2 * E, dtype=torch.bfloat16)
    high, low = parts.chunk(2, 1)
    high.copy_(value_TE)
    torch.sub(value_TE, high, out=low)
    return parts


def split_gradients(
    grad_TE: torch.Tensor, x_TD: torch.Tensor, weight_ED: torch.Tensor, want_x: bool, want_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Gradients of BF16 tokens and weights from the logits' FP32 gradient, in one product each."""
    parts_TE2 = split_bfloat16(grad_TE)
    grad_x = parts_TE2 @ torch.cat([weight_ED, weight_ED]) if want_x else None
    if not want_weight:
        return grad_x, None
    high, low = product_in_float32(parts_TE2.T, x_TD).chunk(2)
    return grad_x, torch.add(high, low, out=torch.empty_like(weight_ED))


def product_in_float32(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b of 16-bit matrices, added and returned in FP32."""
    return torch.mm(a, b, out_dtype=torch.float32) if a.device.type == "cuda" else a.float() @ b.float()


class _RouterLogits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_ED):
        ctx.save_for_backward(x_TD, weight_ED)
        return product_in_float32(x_TD, weight_ED.T)

    @staticmethod
    def backward(ctx, grad_TE):
        return split_gradients(grad_TE, *ctx.saved_tensors, *ctx.needs_input_grad)


def router_logits(x_TD: torch.Tensor, weight_ED: torch.Tensor) -> torch.Tensor:
    """logits_TE float32 of tokens and weights of any dtype."""
    if x_TD.device.type == "cuda" and x_TD.dtype == weight_ED.dtype == torch.bfloat16:
        return _RouterLogits.apply(x_TD, weight_ED)
    return plain_router_logits(x_TD, weight_ED)
