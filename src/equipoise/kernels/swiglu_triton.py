"""SwiGLU experts in Triton: the activation after the first product and its gradient, as kernels of their own over rows,
or in the epilogue of the product beside them (the tuning table says where that is faster).

Forward: gate and up of one tile are two products of the same rows, accumulated side by side, so the weights keep their
layout [2 * I, D] (gate rows first). Backward: the gradient of the activation never reaches memory; the tile that holds
it reads gate and up, and writes their gradients and the activation, which the forward did not keep.

Shapes: R rows, D model features, I inner features; `hidden` is [R, 2, I], gate first.
"""

import triton
import triton.language as tl

from equipoise.kernels.grouped_gemm_triton import (
    block_of,
    first_index,
    halves,
    load_block,
    load_weight,
    ragged_coordinates,
    store_rows,
)


@triton.jit
def load_part(
    hidden,
    row,
    part: tl.constexpr,
    column,
    end,
    I: tl.constexpr,
    BR: tl.constexpr,
    BC: tl.constexpr,
    DESC: tl.constexpr,
):
    """[BR, BC] of gate (part 0) or up (part 1)."""
    if DESC:
        value = hidden.load([row, part, column]).reshape(BR, BC)
    else:
        value = load_block(hidden + part * I, row, column, end, 2 * I, I, BR, BC, False)
    return value


@triton.jit
def store_part(
    hidden, value, first, end, part: tl.constexpr, column, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    if DESC:
        c0, c1, c2 = ragged_coordinates(first, tl.minimum(end - first, BR), 0)
        hidden.store([c0, c1, c2, part, column], value.reshape(1, 1, BR, 1, BC))
    else:
        rows = first + tl.arange(0, BR)
        columns = column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < I)[None, :]
        tl.store(hidden + rows.to(tl.int64)[:, None] * (2 * I) + part * I + columns[None, :], value, mask=mask)


@triton.jit
def _load_pair(
    w, expert, row, column, stride, D: tl.constexpr, I: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    """[2 * BN, BK]: the same rows of gate and, below them, of up; 0 past the edges."""
    if DESC:
        value = w.load([expert, 0, row, column]).reshape(2 * BN, BK)
    else:
        pair = tl.arange(0, 2 * BN)
        rows = row + pair % BN
        columns = column + tl.arange(0, BK)
        at = w + expert.to(tl.int64) * stride + (pair // BN * I + rows)[:, None] * D + columns[None, :]
        value = tl.load(at, mask=(rows < I)[:, None] & (columns < D)[None, :], other=0.0)
    return value


@triton.jit
def _forward_phase(
    x, w, hidden, act, offsets, expert_W, row_W, num_rows, tile_start, tile_end, expert_start, stride,
    D: tl.constexpr, I: tl.constexpr, DESC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (I + BN - 1) // BN
    start = tile_start * COLUMNS
    for index in tl.range(first_index(start), tile_end * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        m, n = block_of(index - start, tile_end - tile_start, COLUMNS, GROUP)
        expert = tl.load(expert_W + tile_start + m)
        row = tl.load(row_W + tile_start + m)
        acc = tl.zeros((BM, 2 * BN), tl.float32)
        for k in tl.range(0, (D + BK - 1) // BK):
            a = load_block(x, row, k * BK, num_rows, D, D, BM, BK, DESC)
            b = _load_pair(w, expert - expert_start, n * BN, k * BK, stride, D, I, BN, BK, DESC)
            acc = tl.dot(a, b.T, acc, input_precision="ieee")
        gate, up = halves(acc, BM, 2 * BN)
        end = tl.load(offsets + expert + 1)
        dtype = act.dtype if DESC else act.dtype.element_ty
        # Rounded first: the backward sees these values, and so does anybody who computes the steps one by one.
        gate, up = gate.to(dtype), up.to(dtype)
        store_part(hidden, gate, row, end, 0, n * BN, I, BM, BN, DESC)
        store_part(hidden, up, row, end, 1, n * BN, I, BM, BN, DESC)
        wide = gate.to(tl.float32)
        value = wide * tl.sigmoid(wide) * up.to(tl.float32)
        store_rows(act, value.to(dtype), row, end, n * BN, I, BM, BN, DESC)


@triton.jit(do_not_specialize=["num_rows", "M"])
def swiglu_forward_kernel(
    x, masters, slots, hidden, act, offsets, expert_W, row_W, num_2, num_rows, master_stride, slot_stride, M,
    D: tl.constexpr, I: tl.constexpr, HAS_SLOTS: tl.constexpr, DESC: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """hidden = x times each expert's [2, I, D]; act = silu(gate) * up."""
    masters_end = tl.load(num_2)
    _forward_phase(
        x, masters, hidden, act, offsets, expert_W, row_W, num_rows, 0, masters_end, 0, master_stride,
        D, I, DESC, BM, BN, BK, GROUP, FLATTEN,
    )  # fmt: skip
    if HAS_SLOTS:
        _forward_phase(
            x, slots, hidden, act, offsets, expert_W, row_W, num_rows, masters_end, tl.load(num_2 + 1), M, slot_stride,
            D, I, DESC, BM, BN, BK, GROUP, FLATTEN,
        )  # fmt: skip


@triton.jit
def _write_gradients(
    dact, hidden, grad_hidden, act, row, end, column, num_rows, I: tl.constexpr, DESC: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr,
):  # fmt: skip
    dtype = act.dtype if DESC else act.dtype.element_ty
    dact = dact.to(dtype).to(tl.float32)
    gate = load_part(hidden, row, 0, column, num_rows, I, BM, BN, DESC).to(tl.float32)
    up = load_part(hidden, row, 1, column, num_rows, I, BM, BN, DESC).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    store_part(grad_hidden, (dact * silu).to(dtype), row, end, 1, column, I, BM, BN, DESC)
    store_rows(act, (silu * up).to(dtype), row, end, column, I, BM, BN, DESC)
    dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
    store_part(grad_hidden, dgate.to(dtype), row, end, 0, column, I, BM, BN, DESC)


@triton.jit
def _backward_phase(
    grad, w, hidden, grad_hidden, act, offsets, expert_W, row_W, num_rows, tile_start, tile_end, expert_start, stride,
    D: tl.constexpr, I: tl.constexpr, DESC: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = (I + BN - 1) // BN
    start = tile_start * COLUMNS
    for index in tl.range(first_index(start), tile_end * COLUMNS, tl.num_programs(0), flatten=FLATTEN):
        m, n = block_of(index - start, tile_end - tile_start, COLUMNS, GROUP)
        expert = tl.load(expert_W + tile_start + m)
        row = tl.load(row_W + tile_start + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (D + BK - 1) // BK):
            a = load_block(grad, row, k * BK, num_rows, D, D, BM, BK, DESC)
            b = load_weight(w, expert - expert_start, k * BK, n * BN, stride, D, I, BK, BN, DESC)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        end = tl.load(offsets + expert + 1)
        if SPLIT:
            left, right = halves(acc, BM, BN)
            _write_gradients(left, hidden, grad_hidden, act, row, end, n * BN, num_rows, I, DESC, BM, BN // 2)
            middle = n * BN + BN // 2
            _write_gradients(right, hidden, grad_hidden, act, row, end, middle, num_rows, I, DESC, BM, BN // 2)
        else:
            _write_gradients(acc, hidden, grad_hidden, act, row, end, n * BN, num_rows, I, DESC, BM, BN)


@triton.jit(do_not_specialize=["num_rows", "M"])
def swiglu_backward_kernel(
    grad, masters, slots, hidden, grad_hidden, act, offsets, expert_W, row_W, num_2, num_rows, master_stride,
    slot_stride, M, D: tl.constexpr, I: tl.constexpr, HAS_SLOTS: tl.constexpr, DESC: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """grad_hidden and act from the outputs' gradient [R, D] and each expert's down matrix [D, I]."""
    masters_end = tl.load(num_2)
    _backward_phase(
        grad, masters, hidden, grad_hidden, act, offsets, expert_W, row_W, num_rows, 0, masters_end, 0, master_stride,
        D, I, DESC, BM, BN, BK, GROUP, FLATTEN, SPLIT,
    )  # fmt: skip
    if HAS_SLOTS:
        _backward_phase(
            grad, slots, hidden, grad_hidden, act, offsets, expert_W, row_W, num_rows, masters_end,
            tl.load(num_2 + 1), M, slot_stride, D, I, DESC, BM, BN, BK, GROUP, FLATTEN, SPLIT,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_columns"])
def swiglu_rows_kernel(hidden, act, end_ptr, num_columns, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr):
    """act = silu(gate) * up over the rows before *end_ptr."""
    end = tl.load(end_ptr)
    row, column = tl.program_id(0) // num_columns * BR, tl.program_id(0) % num_columns * BC
    if row < end:
        rows, columns = row + tl.arange(0, BR), column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < I)[None, :]
        at = rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
        gate = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden + at + I, mask=mask, other=0.0).to(tl.float32)
        value = (gate * tl.sigmoid(gate) * up).to(act.dtype.element_ty)
        tl.store(act + rows.to(tl.int64)[:, None] * I + columns[None, :], value, mask=mask)


@triton.jit(do_not_specialize=["num_columns"])
def swiglu_rows_backward_kernel(
    hidden, act, grad_hidden, end_ptr, num_columns, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """`act` holds its own gradient, which the activation replaces; grad_hidden comes from both."""
    end = tl.load(end_ptr)
    row, column = tl.program_id(0) // num_columns * BR, tl.program_id(0) % num_columns * BC
    if row < end:
        rows, columns = row + tl.arange(0, BR), column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < I)[None, :]
        at = rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
        act_at = act + rows.to(tl.int64)[:, None] * I + columns[None, :]
        dtype = act.dtype.element_ty
        dact = tl.load(act_at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden + at + I, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(grad_hidden + at, dgate.to(dtype), mask=mask)
        tl.store(grad_hidden + at + I, (dact * silu).to(dtype), mask=mask)
        tl.store(act_at, (silu * up).to(dtype), mask=mask)
