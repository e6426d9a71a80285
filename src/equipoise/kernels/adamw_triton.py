"""AdamW in one pass: FP32 weight and moments, a gradient of 16 or 32 bits, and the 16-bit copy to compute with.

The numbers are those of `torch.optim.AdamW`, but for the order of roundings.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch

BLOCK = 1024


@triton.jit
def _adamw_kernel(
    weight_ptr, grad_ptr, first_ptr, second_ptr, copy_ptr, corrections_ptr, scale_ptr, N, lr, keep, rest_1, beta_2,
    rest_2, eps, HAS_COPY: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(scale_ptr)
    mask = at < (tl.where(scale == scale, N, 0) if HAS_SCALE else N)
    grad = tl.load(grad_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_SCALE:
        grad *= scale
    first = tl.load(first_ptr + at, mask=mask, other=0.0)
    first += rest_1 * (grad - first)
    second = beta_2 * tl.load(second_ptr + at, mask=mask, other=0.0) + rest_2 * grad * grad
    root = tl.sqrt(second) / tl.load(corrections_ptr + 1) + eps
    weight = keep * tl.load(weight_ptr + at, mask=mask, other=0.0)
    weight -= lr / tl.load(corrections_ptr) * first / root
    tl.store(first_ptr + at, first, mask=mask)
    tl.store(second_ptr + at, second, mask=mask)
    tl.store(weight_ptr + at, weight, mask=mask)
    if HAS_COPY:
        tl.store(copy_ptr + at, weight.to(copy_ptr.dtype.element_ty), mask=mask)


def adamw(
    weight: torch.Tensor,
    grad: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    copy: torch.Tensor | None,
    corrections_2: torch.Tensor,
    scale: torch.Tensor | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of one tensor, in place. Leaves version counters alone.

    Args:
        weight, first, second: float32, contiguous, of one shape.
        grad: of that shape, float32 or 16 bits.
        copy: gets the new weight; 16 bits, contiguous; or None.
        corrections_2: float32: 1 - beta1^t, and the root of 1 - beta2^t.
        scale: float32 scalar on the device that the gradient is multiplied with; None for 1. NaN: nothing changes.
        lr, betas, eps, weight_decay: as in `torch.optim.AdamW`.
    """
    for name, tensor in (("weight", weight), ("first", first), ("second", second), ("copy", copy)):
        if tensor is not None and not (tensor.is_contiguous() and tensor.shape == weight.shape):
            raise ValueError(f"{name} of {tuple(tensor.shape)}, strides {tensor.stride()}: want {tuple(weight.shape)}")
    if weight.numel() == 0:
        return
    arguments = (
        weight, grad.contiguous(), first, second, weight if copy is None else copy, corrections_2,
        corrections_2 if scale is None else scale, weight.numel(),
        lr, 1 - lr * weight_decay, 1 - betas[0], betas[1], 1 - betas[1], eps,
    )  # fmt: skip
    programs = triton.cdiv(weight.numel(), BLOCK)
    launch(_adamw_kernel, programs, arguments, 4, HAS_COPY=copy is not None, HAS_SCALE=scale is not None, BLOCK=BLOCK)
