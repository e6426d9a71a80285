"""SwiGLU experts in Triton: the activation in the epilogue of the first product, its gradient in that of the last.

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
def load_part(hidden, row, part: tl.constexpr, column, end, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr):
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
        gate = tl.zeros((BM, BN), tl.float32)
        up = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (D + BK - 1) // BK):
            a = load_block(x, row, k * BK, num_rows, D, D, BM, BK, DESC)
            if DESC:
                b = w.load([expert - expert_start, 0, n * BN, k * BK]).reshape(BN, BK).T
                c = w.load([expert - expert_start, 1, n * BN, k * BK]).reshape(BN, BK).T
            else:
                b = load_weight(w, expert - expert_start, n * BN, k * BK, stride, I, D, BN, BK, False).T
                c = load_weight(w + I * D, expert - expert_start, n * BN, k * BK, stride, I, D, BN, BK, False).T
            gate = tl.dot(a, b, gate, input_precision="ieee")
            up = tl.dot(a, c, up, input_precision="ieee")
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
