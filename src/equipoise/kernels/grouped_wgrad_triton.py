"""Gradients of grouped weights in Triton: masters' and replicas' from one launch, each into its own storage.

Shapes: R rows, N x K one expert's weight, L = M + S local physical experts. An expert's gradient is the product of two
slices of rows; both read as 0 past the expert's last row, so nothing of a neighbour or of unowned rows enters.
"""

import triton
import triton.language as tl

from equipoise.kernels.grouped_gemm_triton import block_of, halves, load_block, ragged_coordinates


@triton.jit
def load_group(
    x, first, count, row, column, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """[BR, BC] at row `row` of the `count` rows from `first`; 0 past the last of them."""
    if DESC:
        c0, c1, c2 = ragged_coordinates(first, count, row)
        value = x.load([c0, c1, c2, column]).reshape(BR, BC)
    else:
        value = load_block(x, first + row, column, first + count, WIDTH, WIDTH, BR, BC, False)
    return value


@triton.jit
def _store_master(
    out, value, expert, row, column, N: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    if DESC:
        out.store([expert, row, column], value.to(out.dtype).reshape(1, BR, BC))
    else:
        _store_matrix(out + expert.to(tl.int64) * N * K, value, row, column, N, K, BR, BC, False)


@triton.jit
def _add_to_slot(out, value, slot, row, column, BR: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr):
    """Two halves of [BR, BC], added in memory or stored. A launch adds to an element once: order plays no part."""
    left, right = halves(value, BR, BC)
    left, right = left.reshape(1, BR, BC // 2), right.reshape(1, BR, BC // 2)
    if ADD:
        out.atomic_add([slot, row, column], left)
        out.atomic_add([slot, row, column + BC // 2], right)
    else:
        out.store([slot, row, column], left)
        out.store([slot, row, column + BC // 2], right)


@triton.jit
def _store_matrix(
    out, value, row, column, N: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr
):
    rows = row + tl.arange(0, BR)
    columns = column + tl.arange(0, BC)
    mask = (rows < N)[:, None] & (columns < K)[None, :]
    at = out + rows.to(tl.int64)[:, None] * K + columns[None, :]
    if ADD:
        value += tl.load(at, mask=mask, other=0.0)
    tl.store(at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_ordered", "M"])
def dual_wgrad_kernel(
    grad, rows, out_masters, out_slots, offsets, order, slot_stride, num_ordered, M,
    N: tl.constexpr, K: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr, DESC: tl.constexpr,
    DESC_OUT: tl.constexpr, DESC_SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr, SNAKE: tl.constexpr,
):  # fmt: skip
    """weight gradient [N, K] of each expert = grad_RN.T @ rows_RK over its rows, experts in the order of `order`.

    SHARE: 0 all experts, 1 masters alone, 2 slots alone.
    """
    ROW_BLOCKS: tl.constexpr = (N + BM - 1) // BM
    COLUMN_BLOCKS: tl.constexpr = (K + BN - 1) // BN
    BLOCKS: tl.constexpr = ROW_BLOCKS * COLUMN_BLOCKS
    programs = tl.num_programs(0)
    total = num_ordered * BLOCKS
    for turn in tl.range(0, tl.cdiv(total, programs), flatten=FLATTEN):
        lane = tl.program_id(0)
        if SNAKE:
            lane = tl.where(turn % 2 == 0, lane, programs - 1 - lane)
        index = turn * programs + lane
        live = index < total
        index = tl.minimum(index, total - 1)
        expert = tl.load(order + index // BLOCKS)
        m, n = block_of(index % BLOCKS, ROW_BLOCKS, COLUMN_BLOCKS, GROUP)
        first = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - first
        if SHARE == 1:
            live = live & (expert < M)
        if SHARE == 2:
            live = live & (expert >= M)
        steps = tl.where(live, tl.cdiv(count, BT), 0)
        if FLATTEN:
            steps = tl.maximum(steps, 1)
            tl.assume(steps > 0)
        acc = tl.zeros((BM, BN), tl.float32)
        for step in tl.range(0, steps):
            a = load_group(grad, first, count, step * BT, m * BM, N, BT, BM, DESC)
            b = load_group(rows, first, count, step * BT, n * BN, K, BT, BN, DESC)
            acc = tl.dot(a.T, b, acc, input_precision="ieee")
        if live:
            if expert < M:
                if SPLIT:
                    left, right = halves(acc, BM, BN)
                    _store_master(out_masters, left, expert, m * BM, n * BN, N, K, BM, BN // 2, DESC_OUT)
                    _store_master(out_masters, right, expert, m * BM, n * BN + BN // 2, N, K, BM, BN // 2, DESC_OUT)
                else:
                    _store_master(out_masters, acc, expert, m * BM, n * BN, N, K, BM, BN, DESC_OUT)
            elif DESC_SLOTS:
                left, right = halves(acc, BM, BN)
                for half in tl.static_range(2):
                    first_half, second_half = halves(left if half == 0 else right, BM, BN // 2)
                    column = n * BN + half * (BN // 2)
                    _add_to_slot(out_slots, first_half, expert - M, m * BM, column, BM, BN // 4, ADD)
                    _add_to_slot(out_slots, second_half, expert - M, m * BM, column + BN // 4, BM, BN // 4, ADD)
            else:
                slot = out_slots + (expert - M).to(tl.int64) * slot_stride
                _store_matrix(slot, acc, m * BM, n * BN, N, K, BM, BN, ADD)
