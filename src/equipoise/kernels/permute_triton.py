"""Triton forms of `kernels/permute.py`: one program per token moves its K rows, so each token is read or written once.

Permuting writes a token's row to its K places (they are distinct: nothing races); its backward and the combination
gather the K rows back and add them in FP32, in order of k. Slots that are not valid are never read.

Shapes: T tokens, K slots per token, D features, R rows.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch
from equipoise.kernels.operators import operator


@triton.jit
def _scatter_rows_kernel(x_ptr, row_ptr, out_ptr, num_rows, K: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(x_ptr + token * D + d, mask=d < D)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            width = tl.where(row < num_rows, D, 0)
            tl.store(out_ptr + row * D + d, x, mask=d < width)


@triton.jit
def _gather_sum_kernel(
    rows_ptr,
    row_ptr,
    valid_ptr,
    weights_ptr,
    out_ptr,
    num_rows,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_VALID: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        total = tl.zeros([BLOCK_D], tl.float32)
        for k in tl.static_range(K):
            row = tl.load(row_ptr + token * K + k).to(tl.int64)
            is_row = row < num_rows
            if HAS_VALID:
                is_row = is_row & (tl.load(valid_ptr + token * K + k) != 0)
            width = tl.where(is_row, D, 0)
            picked = tl.load(rows_ptr + row * D + d, mask=d < width, other=0.0).to(tl.float32)
            if HAS_WEIGHTS:
                picked *= tl.load(weights_ptr + token * K + k, mask=is_row, other=0.0).to(tl.float32)
            total += picked
        tl.store(out_ptr + token * D + d, total.to(out_ptr.dtype.element_ty), mask=d < D)


@triton.jit
def _combine_backward_kernel(
    grad_ptr,
    rows_ptr,
    row_ptr,
    valid_ptr,
    weights_ptr,
    grad_rows_ptr,
    grad_weights_ptr,
    num_rows,
    K: tl.constexpr,
    D: tl.constexpr,
    HAS_VALID: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    row = tl.load(row_ptr + token * K + k, mask=k < K, other=0).to(tl.int64)
    is_row = (k < K) & (row < num_rows)
    is_valid = is_row
    if HAS_VALID:
        is_valid = is_valid & (tl.load(valid_ptr + token * K + k, mask=k < K, other=0) != 0)
    weight = tl.load(weights_ptr + token * K + k, mask=is_valid, other=0.0).to(tl.float32)
    products = tl.zeros([BLOCK_K, BLOCK_D], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        grad = tl.load(grad_ptr + token * D + d, mask=d < D, other=0.0).to(tl.float32)
        offset = row[:, None] * D + d[None, :]
        if WANT_WEIGHTS:
            mask = is_valid[:, None] & (d < D)[None, :]
            products += grad[None, :] * tl.load(rows_ptr + offset, mask=mask, other=0.0).to(tl.float32)
        grad_row = tl.where(is_valid[:, None], grad[None, :] * weight[:, None], 0.0)
        tl.store(
            grad_rows_ptr + offset,
            grad_row.to(grad_rows_ptr.dtype.element_ty),
            mask=is_row[:, None] & (d < D)[None, :],
        )
    if WANT_WEIGHTS:
        grad_weight = tl.where(is_valid, tl.sum(products, 1), 0.0)
        tl.store(grad_weights_ptr + token * K + k, grad_weight.to(grad_weights_ptr.dtype.element_ty), mask=k < K)


def _block(D: int, most: int) -> int:
    return min(max(triton.next_power_of_2(D), 16), most)


@operator("scatter_rows")
def _scatter_rows(x_TD: torch.Tensor, row_TK: torch.Tensor, num_rows: int) -> torch.Tensor:
    x_TD, row_TK = x_TD.contiguous(), row_TK.contiguous()
    T, D = x_TD.shape
    out_RD = x_TD.new_empty(num_rows, D)
    if T and D and num_rows:
        block = _block(D, 4096)
        arguments = x_TD, row_TK, out_RD, num_rows
        launch(_scatter_rows_kernel, T, arguments, _warps(block), K=row_TK.shape[1], D=D, BLOCK_D=block)
    return out_RD


@torch.library.register_fake("equipoise::scatter_rows")
def _(x_TD, row_TK, num_rows):
    return x_TD.new_empty(num_rows, x_TD.shape[1])


@operator("gather_sum")
def _gather_sum(
    rows_RD: torch.Tensor,
    row_TK: torch.Tensor,
    valid_TK: torch.Tensor | None,
    weights_TK: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    rows_RD, row_TK = rows_RD.contiguous(), row_TK.contiguous()
    T, K = row_TK.shape
    D = rows_RD.shape[1]
    out_TD = rows_RD.new_empty(T, D, dtype=dtype)
    if T and D:
        block = _block(D, 2048)
        valid = row_TK if valid_TK is None else valid_TK.contiguous().view(torch.uint8)
        weights = row_TK if weights_TK is None else weights_TK.contiguous()
        launch(
            _gather_sum_kernel, T, (rows_RD, row_TK, valid, weights, out_TD, rows_RD.shape[0]), _warps(block),
            K=K, D=D, HAS_VALID=valid_TK is not None, HAS_WEIGHTS=weights_TK is not None, BLOCK_D=block,
        )  # fmt: skip
    return out_TD


@torch.library.register_fake("equipoise::gather_sum")
def _(rows_RD, row_TK, valid_TK, weights_TK, dtype):
    return rows_RD.new_empty(row_TK.shape[0], rows_RD.shape[1], dtype=dtype)


@operator("combine_backward")
def combine_backward(
    grad_TD: torch.Tensor,
    rows_RD: torch.Tensor,
    row_TK: torch.Tensor,
    valid_TK: torch.Tensor | None,
    weights_TK: torch.Tensor,
    want_weights: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `gather_sum` with weights, in one pass over the rows. `want_weights`: else the second is empty."""
    grad_TD, rows_RD, row_TK = grad_TD.contiguous(), rows_RD.contiguous(), row_TK.contiguous()
    weights_TK = weights_TK.contiguous()
    T, K = row_TK.shape
    R, D = rows_RD.shape
    grad_rows = torch.empty_like(rows_RD)
    grad_weights = torch.empty_like(weights_TK) if want_weights else weights_TK.new_empty(0)
    if T and K:
        block_k = triton.next_power_of_2(K)
        block = _block(D, max(32, 16384 // block_k))
        valid = row_TK if valid_TK is None else valid_TK.contiguous().view(torch.uint8)
        arguments = grad_TD, rows_RD, row_TK, valid, weights_TK, grad_rows, grad_weights, R
        launch(
            _combine_backward_kernel, T, arguments, _warps(block_k * block // 4), K=K, D=D,
            HAS_VALID=valid_TK is not None, WANT_WEIGHTS=want_weights, BLOCK_K=block_k, BLOCK_D=block,
        )  # fmt: skip
    return grad_rows, grad_weights


@torch.library.register_fake("equipoise::combine_backward")
def _(grad_TD, rows_RD, row_TK, valid_TK, weights_TK, want_weights):
    grad_weights = weights_TK.new_empty(weights_TK.shape if want_weights else (0,))
    return rows_RD.new_empty(rows_RD.shape), grad_weights


def _warps(elements: int) -> int:
    """Eight elements (16 bytes of BF16) a thread and load, four loads in flight."""
    return min(max(elements // 1024, 1), 8)


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, row_TK, valid_TK, num_rows):
        ctx.save_for_backward(row_TK, valid_TK)
        ctx.dtype = x_TD.dtype
        return _scatter_rows(x_TD, row_TK, num_rows)

    @staticmethod
    def backward(ctx, grad_RD):
        row_TK, valid_TK = ctx.saved_tensors
        return _gather_sum(grad_RD, row_TK, valid_TK, None, ctx.dtype), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, row_TK, valid_TK, weights_TK, dtype):
        ctx.save_for_backward(rows_RD if weights_TK is not None else None, row_TK, valid_TK, weights_TK)
        ctx.num_rows, ctx.dtype = rows_RD.shape[0], rows_RD.dtype
        return _gather_sum(rows_RD, row_TK, valid_TK, weights_TK, dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        rows_RD, row_TK, valid_TK, weights_TK = ctx.saved_tensors
        if weights_TK is None:
            return _scatter_rows(grad_TD.to(ctx.dtype), row_TK, ctx.num_rows), None, None, None, None
        want = ctx.needs_input_grad[3]
        grad_rows, grad_weights = combine_backward(grad_TD, rows_RD, row_TK, valid_TK, weights_TK, want)
        return grad_rows, None, None, grad_weights if want else None, None


def scatter_rows(
    x_TD: torch.Tensor, row_TK: torch.Tensor, valid_TK: torch.Tensor | None, num_rows: int
) -> torch.Tensor:
    """out_RD[row_TK[t, k]] = x_TD[t] for the places below `num_rows`, which must all be named by some slot.

    `valid_TK` (bool) is for the backward, where slots that are False add nothing.
    """
    return _Scatter.apply(x_TD, row_TK, valid_TK, num_rows)


def gather_sum(
    rows_RD: torch.Tensor,
    row_TK: torch.Tensor,
    valid_TK: torch.Tensor | None,
    weights_TK: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """For each token the FP32 sum over its slots of (weight times) its row, as `dtype`; see `permute._gather_sum`."""
    return _Gather.apply(rows_RD, row_TK, valid_TK, weights_TK, dtype)
