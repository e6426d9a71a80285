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
    DESC: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    if not DESC:
        _store_matrix(out + expert.to(tl.int64) * N * K, value, row, column, N, K, BR, BC, False)
    elif SPLIT:
        left, right = halves(value.to(out.dtype), BR, BC)
        out.store([expert, row, column], left.reshape(1, BR, BC // 2))
        out.store([expert, row, column + BC // 2], right.reshape(1, BR, BC // 2))
    else:
        out.store([expert, row, column], value.to(out.dtype).reshape(1, BR, BC))


@triton.jit
def _store_slot(
    out, value, slot, row, column, stride, N: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DESC: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores or adds [BR, BC], by descriptors in quarters of quarters, which take the least shared memory.

    The memory adds to an element once per launch: the order of additions plays no part.
    """
    if DESC:
        left, right = halves(value, BR, BC)
        for half in tl.static_range(2):
            quarters = halves(left if half == 0 else right, BR, BC // 2)
            for quarter in tl.static_range(2):
                eighths = halves(quarters[quarter], BR, BC // 4)
                for eighth in tl.static_range(2):
                    part = eighths[eighth].reshape(1, BR, BC // 8)
                    at = column + half * (BC // 2) + quarter * (BC // 4) + eighth * (BC // 8)
                    if ADD:
                        out.atomic_add([slot, row, at], part)
                    else:
                        out.store([slot, row, at], part)
    else:
        _store_matrix(out + slot.to(tl.int64) * stride, value, row, column, N, K, BR, BC, ADD)


@triton.jit
def _clear_idle_masters(out, offsets, M, SIZE: tl.constexpr, MASTERS: tl.constexpr):
    """Zeros for masters without rows; each program clears its share of every one of them."""
    experts = tl.arange(0, MASTERS)
    first = tl.load(offsets + experts, mask=experts < M, other=0)
    end = tl.load(offsets + experts + 1, mask=experts < M, other=1)
    if tl.sum((first == end).to(tl.int32), 0) > 0:
        for expert in range(M):
            if tl.load(offsets + expert) == tl.load(offsets + expert + 1):
                for at in range(tl.program_id(0) * 4096, SIZE, tl.num_programs(0) * 4096):
                    elements = at + tl.arange(0, 4096)
                    zeros = tl.zeros((4096,), out.dtype.element_ty)
                    tl.store(out + tl.cast(expert, tl.int64) * SIZE + elements, zeros, mask=elements < SIZE)


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


@triton.jit(do_not_specialize=["num_experts", "M"])
def dual_wgrad_kernel(
    grad, rows, out_masters, out_slots, offsets, order, slot_stride, num_experts, M,
    N: tl.constexpr, K: tl.constexpr, MASTERS: tl.constexpr, SHARE: tl.constexpr, ADD: tl.constexpr, DESC: tl.constexpr,
    DESC_OUT: tl.constexpr, DESC_SLOTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr,
    GROUP: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr, SNAKE: tl.constexpr,
):  # fmt: skip
    """Weight gradient [N, K] of each expert: grad_RN.T @ rows_RK over its rows.

    SHARE: 0 for all experts in the order of `order`, 1 for the masters among them, 2 for the slots one after the other
    and the masters without rows, which get their zeros here. `num_experts`: of `order` (SHARE 2: slots).
    """
    ROW_BLOCKS: tl.constexpr = (N + BM - 1) // BM
    COLUMN_BLOCKS: tl.constexpr = (K + BN - 1) // BN
    BLOCKS: tl.constexpr = ROW_BLOCKS * COLUMN_BLOCKS
    programs = tl.num_programs(0)
    if SHARE == 2:
        _clear_idle_masters(out_masters, offsets, M, N * K, MASTERS)
    total = num_experts * BLOCKS
    for turn in tl.range(0, tl.cdiv(total, programs), flatten=FLATTEN):
        lane = tl.program_id(0)
        if SNAKE:
            lane = tl.where(turn % 2 == 0, lane, programs - 1 - lane)
        index = turn * programs + lane
        live = index < total
        index = tl.minimum(index, total - 1)
        place = index // BLOCKS
        expert = M + place if SHARE == 2 else tl.load(order + place)
        if SHARE == 1:
            live = live & (expert < M)
        m, n = block_of(index % BLOCKS, ROW_BLOCKS, COLUMN_BLOCKS, GROUP)
        first = tl.load(offsets + expert)
        count = tl.load(offsets + expert + 1) - first
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
            if SHARE == 1:
                _store_master(out_masters, acc, expert, m * BM, n * BN, N, K, BM, BN, DESC_OUT, SPLIT)
            elif SHARE == 2:
                _store_slot(
                    out_slots, acc, expert - M, m * BM, n * BN, slot_stride, N, K, BM, BN, DESC_SLOTS, ADD
                )  # fmt: skip
            elif expert < M:
                _store_master(out_masters, acc, expert, m * BM, n * BN, N, K, BM, BN, DESC_OUT, SPLIT)
            else:
                _store_slot(
                    out_slots, acc, expert - M, m * BM, n * BN, slot_stride, N, K, BM, BN, DESC_SLOTS, ADD
                )  # fmt: skip
