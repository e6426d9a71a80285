"""Gradients of grouped weights in Triton: masters' and replicas' from one launch, each into its own storage.

Shapes: R rows, N x K one expert's weight, L = M + S local physical experts. An expert's gradient is the product of two
slices of rows; both read as 0 past the expert's last row, so nothing of a neighbour or of unowned rows enters.
"""

import triton
import triton.language as tl

from equipoise.kernels.grouped_gemm_triton import block_of, halves, load_block, ragged_coordinates, share_of_level

SLOT_COLUMNS = tl.constexpr(32)
"""Columns of FP32 that a descriptor stores at once: whole lines of 128 bytes."""


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
        for half in tl.static_range(2):
            part = left if half == 0 else right
            at = column + half * (BC // 2)
            if SPLIT == 2:
                first, second = halves(part, BR, BC // 2)
                out.store([expert, row, at], first.reshape(1, BR, BC // 4))
                out.store([expert, row, at + BC // 4], second.reshape(1, BR, BC // 4))
            else:
                out.store([expert, row, at], part.reshape(1, BR, BC // 2))
    else:
        out.store([expert, row, column], value.to(out.dtype).reshape(1, BR, BC))


@triton.jit
def _store_slot(
    out, value, slot, row, column, stride, N: tl.constexpr, K: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DESC: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Stores or adds [BR, BC]; by descriptors in parts of SLOT_COLUMNS columns, which take little shared memory.

    The memory adds to an element once per launch: the order of additions plays no part.
    """
    if DESC:
        _store_strips(out, value, slot, row, column, BR, BC, ADD)
    else:
        _store_matrix(out + slot.to(tl.int64) * stride, value, row, column, N, K, BR, BC, ADD)


@triton.jit
def _store_strips(out, value, slot, row, column, BR: tl.constexpr, BC: tl.constexpr, ADD: tl.constexpr):
    left, right = halves(value, BR, BC)
    for half in tl.static_range(2):
        quarters = halves(left if half == 0 else right, BR, BC // 2)
        for quarter in tl.static_range(2):
            at = column + half * (BC // 2) + quarter * (BC // 4)
            if BC == 4 * SLOT_COLUMNS:
                _store_strip(out, quarters[quarter], slot, row, at, BR, ADD)
            else:
                eighths = halves(quarters[quarter], BR, BC // 4)
                _store_strip(out, eighths[0], slot, row, at, BR, ADD)
                _store_strip(out, eighths[1], slot, row, at + BC // 8, BR, ADD)


@triton.jit
def _store_strip(out, value, slot, row, column, BR: tl.constexpr, ADD: tl.constexpr):
    strip = value.reshape(1, BR, SLOT_COLUMNS)
    if ADD:
        out.atomic_add([slot, row, column], strip)
    else:
        out.store([slot, row, column], strip)


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


@triton.jit
def _tile(
    turn, num_experts, shift, lanes, offsets, order, BLOCKS: tl.constexpr, BT: tl.constexpr, SNAKE: tl.constexpr
):  # fmt: skip
    """This program's tile of a turn: expert, block, the expert's first row and rows, steps (0: there is no tile).

    `turn` may be many. Tiles go round over the lanes, from lane `shift` on.
    """
    lane = tl.program_id(0) % lanes
    if SNAKE:
        lane = tl.where(turn % 2 == 0, lane, lanes - 1 - lane)
    tile = turn * lanes + (lane + lanes - shift) % lanes
    live = tile < num_experts * BLOCKS
    tile = tl.where(live, tile, 0)
    expert = tl.load(order + tile // BLOCKS)
    first = tl.load(offsets + expert)
    count = tl.load(offsets + expert + 1) - first
    return expert, tile % BLOCKS, first, count, tl.where(live, tl.maximum(tl.cdiv(count, BT), 1), 0)


@triton.jit
def _turns_of_level(
    num_experts, offsets, order, lanes, slices, BLOCKS: tl.constexpr, BT: tl.constexpr, E_PAD: tl.constexpr
):  # fmt: skip
    """The turns of this program's level, from and to: shares of the steps of all tiles, which differ from expert to
    expert."""
    begin, end = 0, tl.cdiv(num_experts * BLOCKS, lanes)
    if tl.num_programs(0) > lanes:
        index = tl.arange(0, E_PAD)
        expert = tl.load(order + index, mask=index < num_experts, other=0)
        count = tl.load(offsets + expert + 1) - tl.load(offsets + expert)
        steps = tl.where(index < num_experts, tl.maximum(tl.cdiv(count, BT), 1), 0).to(tl.int64)
        before = (tl.cumsum(steps, 0) - steps) * BLOCKS
        first, last = share_of_level(tl.sum(steps, 0) * BLOCKS, lanes, slices)
        steps = tl.maximum(steps, 1)
        most = tl.where(index < num_experts, BLOCKS, 0)
        begin = tl.cdiv(tl.sum(tl.minimum(tl.maximum(first - before, 0) // steps, most), 0).to(tl.int32), lanes)
        end = tl.cdiv(tl.sum(tl.minimum(tl.maximum(last - before, 0) // steps, most), 0).to(tl.int32), lanes)
    return begin, end


@triton.jit
def _walk(
    grad, rows, out, offsets, order, num_experts, first_expert, begin, end, shift, lanes, stride,
    N: tl.constexpr, K: tl.constexpr, IS_SLOTS: tl.constexpr, ADD: tl.constexpr, DESC: tl.constexpr,
    DESC_OUT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr,
    SPLIT: tl.constexpr, SNAKE: tl.constexpr,
):  # fmt: skip
    """Turns from `begin` to `end`: one loop over the steps of all their tiles, so that the next tile's first rows
    arrive while this one's last products and its output are under way. (Triton flattens no loops whose lengths depend
    on data. And with masters' and slots' outputs in one loop, ptxas runs its products one by one.)
    """
    ROW_BLOCKS: tl.constexpr = (N + BM - 1) // BM
    COLUMN_BLOCKS: tl.constexpr = (K + BN - 1) // BN
    BLOCKS: tl.constexpr = ROW_BLOCKS * COLUMN_BLOCKS
    MANY: tl.constexpr = 256
    all_steps = 0
    for start in range(begin, end, MANY):
        turns = start + tl.arange(0, MANY)
        tiles = _tile(turns, num_experts, shift, lanes, offsets, order, BLOCKS, BT, SNAKE)
        all_steps += tl.sum(tl.where(turns < end, tiles[4], 0), 0)
    zero = tl.program_id(0) * 0
    expert, first, count, m, n, steps = zero, zero, zero, zero, zero, zero + 1
    turn, step = begin + zero, zero
    acc = tl.zeros((BM, BN), tl.float32)
    for _ in tl.range(0, all_steps):
        step += 1
        if step == steps:
            expert, block, first, count, steps = _tile(
                turn, num_experts, shift, lanes, offsets, order, BLOCKS, BT, SNAKE
            )
            m, n = block_of(block, ROW_BLOCKS, COLUMN_BLOCKS, GROUP)
            turn += 1
            step = zero
        a = load_group(grad, first, count, step * BT, m * BM, N, BT, BM, DESC)
        b = load_group(rows, first, count, step * BT, n * BN, K, BT, BN, DESC)
        acc = tl.dot(a.T, b, acc, input_precision="ieee")
        is_last = step == steps - 1
        if IS_SLOTS and ADD:
            is_last = is_last & (count > 0)
        if is_last:
            if IS_SLOTS:
                _store_slot(out, acc, expert - first_expert, m * BM, n * BN, stride, N, K, BM, BN, DESC_OUT, ADD)
            else:
                _store_master(out, acc, expert, m * BM, n * BN, N, K, BM, BN, DESC_OUT, SPLIT)
            acc = tl.zeros((BM, BN), tl.float32)


@triton.jit(do_not_specialize=["M", "S", "lanes", "slices"])
def dual_wgrad_kernel(
    grad, rows, out_masters, out_slots, offsets, order, slot_stride, M, S, lanes, slices,
    N: tl.constexpr, K: tl.constexpr, E_PAD: tl.constexpr, HAS_MASTERS: tl.constexpr, HAS_SLOTS: tl.constexpr,
    ADD: tl.constexpr, DESC: tl.constexpr, DESC_OUT: tl.constexpr, DESC_SLOTS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BT: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr, SNAKE: tl.constexpr,
):  # fmt: skip
    """Weight gradient [N, K] of each expert: grad_RN.T @ rows_RK over its rows.

    Without HAS_MASTERS somebody else makes the masters' gradients, and here those without rows get their zeros.

    A slot's tile moves four times the bytes of a master's. So each program has its slots' tiles at a time of its own,
    between masters' tiles, when the others leave the memory time for them.
    """
    BLOCKS: tl.constexpr = ((N + BM - 1) // BM) * ((K + BN - 1) // BN)
    begin, end = 0, 0
    if HAS_MASTERS:
        begin, end = _turns_of_level(M, offsets, order, lanes, slices, BLOCKS, BT, E_PAD)
    else:
        _clear_idle_masters(out_masters, offsets, M, N * K, E_PAD)
    if HAS_SLOTS:
        middle = begin + (end - begin) * (tl.program_id(0) % lanes) // lanes
        shift = M * BLOCKS % lanes if HAS_MASTERS else 0
        slots_begin, slots_end = _turns_of_level(S, offsets, order + M, lanes, slices, BLOCKS, BT, E_PAD)
        if HAS_MASTERS:
            _walk(
                grad, rows, out_masters, offsets, order, M, 0, begin, middle, 0, lanes, 0, N, K, False, ADD, DESC,
                DESC_OUT, BM, BN, BT, GROUP, SPLIT, SNAKE,
            )  # fmt: skip
        _walk(
            grad, rows, out_slots, offsets, order + M, S, M, slots_begin, slots_end, shift, lanes, slot_stride, N, K,
            True, ADD, DESC, DESC_SLOTS, BM, BN, BT, GROUP, SPLIT, SNAKE,
        )  # fmt: skip
        if HAS_MASTERS:
            _walk(
                grad, rows, out_masters, offsets, order, M, 0, middle, end, 0, lanes, 0, N, K, False, ADD, DESC,
                DESC_OUT, BM, BN, BT, GROUP, SPLIT, SNAKE,
            )  # fmt: skip
    elif HAS_MASTERS:
        _walk(
            grad, rows, out_masters, offsets, order, M, 0, begin, end, 0, lanes, 0, N, K, False, ADD, DESC, DESC_OUT,
            BM, BN, BT, GROUP, SPLIT, SNAKE,
        )  # fmt: skip
