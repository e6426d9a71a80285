"""Passes over one large tensor at the rate of memory: a product rounded to 16 bits, and a sum of squares."""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch

BLOCK = 2048
PARTS = 1024
"""Programs of a sum of squares; each adds up its part in order."""


@triton.jit
def _scale_kernel(value_ptr, factor_ptr, out_ptr, N, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(value_ptr + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (value * tl.load(factor_ptr).to(tl.float32)).to(out_ptr.dtype.element_ty), mask=at < N)


@triton.jit
def _squares_kernel(value_ptr, part_ptr, N, BLOCK: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(tl.program_id(0), tl.cdiv(N, BLOCK), tl.num_programs(0)):
        at = tl.full((), BLOCK, tl.int64) * start + tl.arange(0, BLOCK)
        value = tl.load(value_ptr + at, mask=at < N, other=0.0).to(tl.float32)
        total += value * value
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))


def scaled(value: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """value * factor in FP32, rounded to `dtype`; contiguous. `factor`: a scalar on the value's device."""
    value = value.contiguous()
    out = torch.empty_like(value, dtype=dtype)
    if value.numel():
        launch(_scale_kernel, triton.cdiv(value.numel(), BLOCK), (value, factor, out, value.numel()), 8, BLOCK=BLOCK)
    return out


def sum_of_squares(values: list[torch.Tensor]) -> torch.Tensor:
    """FP32 scalar: over all elements of tensors of any float dtype, at least one. The same bits in each run."""
    values = [value.contiguous() for value in values]
    counts = [min(PARTS, triton.cdiv(value.numel(), BLOCK)) for value in values]
    parts = torch.empty(sum(counts), dtype=torch.float32, device=values[0].device)
    for value, count, part in zip(values, counts, parts.split(counts)):
        if count:
            launch(_squares_kernel, count, (value, part, value.numel()), 8, BLOCK=BLOCK)
    return parts.sum()
