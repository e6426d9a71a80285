"""Triton form of `rotary_norm.py`: a program for all heads of a few tokens; the backward computes the norm again.

Shapes: T tokens, N heads (NP: the power of two above), H features of a head, P programs.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch

PROGRAMS = 1024
"""Of the backward: each adds up the weight's gradient over its tokens, in order."""
TILE = 2048
"""Features of one half that a program has at a time."""


@triton.jit
def _normed(x_ptr, at, mask, HALF: tl.constexpr, eps):
    """Both halves relative to the root of the mean square, and the inverse of that root."""
    first = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x_ptr + at + HALF, mask=mask, other=0.0).to(tl.float32)
    mean = (tl.sum(first * first, 2) + tl.sum(second * second, 2)) / (2 * HALF)
    inverse = tl.rsqrt(mean + eps)[:, :, None]
    return first * inverse, second * inverse, inverse


@triton.jit
def _half(ptr, token, mask, half, HALF: tl.constexpr):
    """Both halves of the tables' rows of these tokens: [tokens, 1, HALF]."""
    at = token[:, None, None] * (2 * HALF) + half[None, None, :]
    first = tl.load(ptr + at, mask=mask[:, None, None], other=0.0).to(tl.float32)
    second = tl.load(ptr + at + HALF, mask=mask[:, None, None], other=0.0).to(tl.float32)
    return first, second


@triton.jit
def _forward_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, T, period, eps,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head, half = tl.arange(0, NP), tl.arange(0, HALF)
    at = (token[:, None, None] * N + head[None, :, None]) * (2 * HALF) + half[None, None, :]
    mask = (token < T)[:, None, None] & (head < N)[None, :, None] & (half < HALF)[None, None, :]
    first, second, _ = _normed(x_ptr, at, mask, HALF, eps)
    first *= tl.load(weight_ptr + half).to(tl.float32)[None, None, :]
    second *= tl.load(weight_ptr + HALF + half).to(tl.float32)[None, None, :]
    cos_1, cos_2 = _half(cos_ptr, token % period, token < T, half, HALF)
    sin_1, sin_2 = _half(sin_ptr, token % period, token < T, half, HALF)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + at, (first * cos_1 - second * sin_1).to(dtype), mask=mask)
    tl.store(out_ptr + at + HALF, (second * cos_2 + first * sin_2).to(dtype), mask=mask)


@triton.jit
def _backward_kernel(
    grad_ptr, x_ptr, weight_ptr, cos_ptr, sin_ptr, out_ptr, part_ptr, T, S, stride_b, stride_s, stride_n, period, eps,
    N: tl.constexpr, NP: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    head, half = tl.arange(0, NP), tl.arange(0, HALF)
    weight_1 = tl.load(weight_ptr + half).to(tl.float32)[None, None, :]
    weight_2 = tl.load(weight_ptr + HALF + half).to(tl.float32)[None, None, :]
    total_1 = tl.zeros((TOKENS, NP, HALF), tl.float32)
    total_2 = tl.zeros((TOKENS, NP, HALF), tl.float32)
    for start in range(tl.program_id(0) * TOKENS, T, tl.num_programs(0) * TOKENS):
        token = start + tl.arange(0, TOKENS).to(tl.int64)
        mask = (token < T)[:, None, None] & (head < N)[None, :, None] & (half < HALF)[None, None, :]
        at = (token[:, None, None] * N + head[None, :, None]) * (2 * HALF) + half[None, None, :]
        grad_at = (token // S * stride_b + token % S * stride_s)[:, None, None] + head.to(tl.int64)[
            None, :, None
        ] * stride_n
        grad_at += half[None, None, :]
        first, second, inverse = _normed(x_ptr, at, mask, HALF, eps)
        cos_1, cos_2 = _half(cos_ptr, token % period, token < T, half, HALF)
        sin_1, sin_2 = _half(sin_ptr, token % period, token < T, half, HALF)
        grad_1 = tl.load(grad_ptr + grad_at, mask=mask, other=0.0).to(tl.float32)
        grad_2 = tl.load(grad_ptr + grad_at + HALF, mask=mask, other=0.0).to(tl.float32)
        turned_1 = grad_1 * cos_1 + grad_2 * sin_2
        turned_2 = grad_2 * cos_2 - grad_1 * sin_1
        total_1 += turned_1 * first
        total_2 += turned_2 * second
        turned_1 *= weight_1
        turned_2 *= weight_2
        along = (tl.sum(turned_1 * first, 2) + tl.sum(turned_2 * second, 2))[:, :, None] / (2 * HALF)
        dtype = out_ptr.dtype.element_ty
        tl.store(out_ptr + at, (inverse * (turned_1 - first * along)).to(dtype), mask=mask)
        tl.store(out_ptr + at + HALF, (inverse * (turned_2 - second * along)).to(dtype), mask=mask)
    part = part_ptr + tl.program_id(0) * (2 * HALF)
    tl.store(part + half, tl.sum(tl.sum(total_1, 0), 0))
    tl.store(part + HALF + half, tl.sum(tl.sum(total_2, 0), 0))


def _sizes(x_BSNH: torch.Tensor) -> tuple[int, int, int, int]:
    """T, and N, NP, HALF."""
    B, S, N, H = x_BSNH.shape
    return B * S, N, 1 << max(N - 1, 0).bit_length(), H // 2


def launch_forward(
    x_BSNH: torch.Tensor, weight_H: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, eps: float
) -> torch.Tensor:
    """All tensors contiguous; H a power of two."""
    out = torch.empty_like(x_BSNH)
    T, N, NP, half = _sizes(x_BSNH)
    tokens = max(1, TILE // (NP * half))
    if out.numel():
        period = cos.shape[0] * cos.shape[2]
        arguments = x_BSNH, weight_H, cos, sin, out, T, period, eps
        launch(_forward_kernel, -(-T // tokens), arguments, 4, N=N, NP=NP, HALF=half, TOKENS=tokens)
    return out


def launch_backward(
    grad_BSNH: torch.Tensor,
    x_BSNH: torch.Tensor,
    weight_H: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight. The same; of `grad_BSNH` only the features have to lie together."""
    out = torch.empty_like(x_BSNH)
    if out.numel() == 0:
        return out, torch.zeros_like(weight_H)
    T, N, NP, half = _sizes(x_BSNH)
    tokens = max(1, TILE // (NP * half))
    programs = min(PROGRAMS, -(-T // tokens))
    parts_PH = torch.empty(programs, 2 * half, dtype=torch.float32, device=x_BSNH.device)
    period = cos.shape[0] * cos.shape[2]
    tensors = grad_BSNH, x_BSNH, weight_H, cos, sin, out, parts_PH
    arguments = *tensors, T, x_BSNH.shape[1], *grad_BSNH.stride()[:3], period, eps
    launch(_backward_kernel, programs, arguments, 4, N=N, NP=NP, HALF=half, TOKENS=tokens)
    return out, parts_PH.sum(0).to(weight_H.dtype)
