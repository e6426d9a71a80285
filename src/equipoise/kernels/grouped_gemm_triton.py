"""Grouped products whose weights lie in two storages, in Triton: forward and the rows' gradient.

A program walks tiles of the masters, then tiles of the replicas: two loops of one body, each over a weight operand that
does not change inside of it, so that both are pipelined. Operands are tensor descriptors, or plain pointers where a
device or an alignment allows none; the same kernel serves both.

Shapes: R rows, C contracted features, O output features, L = M + S local physical experts. Sizes of the weights are
compile-time constants; everything about the rows is read on the device.
"""

import triton
import triton.language as tl


@triton.jit
def ragged_coordinates(first, count, row):
    """The three leading coordinates of row `row` of the rows first .. first + count of a ragged descriptor.

    The descriptor's two extra dimensions have strides that cancel modulo 2^64 (`triton.tools.ragged_tma`), so that the
    hardware's bound is the group's end: rows past it read 0 and are not written.
    """
    rows = tl.full((), 1 << 30, tl.int32)  # that the descriptor claims to have
    return rows, first + count, rows - count + row


@triton.jit
def block_of(index, num_row_blocks, COLUMN_BLOCKS: tl.constexpr, GROUP: tl.constexpr):
    """Block of rows and block of columns: rows first, in bands of GROUP, so that operands stay in the cache."""
    width = GROUP * COLUMN_BLOCKS
    first = index // width * GROUP
    height = tl.minimum(num_row_blocks - first, GROUP)
    local = index % width
    return first + local % height, local // height


@triton.jit
def share_of_level(work, lanes, slices):
    """Of all the work of a launch, in any unit, that of this program's level: from, to.

    Programs have levels, `lanes` of each. A level takes one of `slices` parts, or half of what those before it have
    left if that is less, and the last one the rest. So nobody who wants a multiprocessor waits for long, and all of
    them end together, whenever each became free.
    """
    most, left = tl.cdiv(work, slices), work
    level = tl.program_id(0) // lanes
    for _ in range(level):
        left -= tl.minimum(most, tl.cdiv(left, 2))
    is_last = level == tl.num_programs(0) // lanes - 1
    return work - left, work - left + tl.where(is_last, left, tl.minimum(most, tl.cdiv(left, 2)))


@triton.jit
def load_block(
    x, row, column, end, stride, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """[BR, BC] of a matrix; 0 past its edges."""
    if DESC:
        value = x.load([row, column])
    else:
        rows = row + tl.arange(0, BR)
        columns = column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        value = tl.load(x + rows.to(tl.int64)[:, None] * stride + columns[None, :], mask=mask, other=0.0)
    return value


@triton.jit
def load_weight(
    w, expert, row, column, stride, HEIGHT: tl.constexpr, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    DESC: tl.constexpr,
):  # fmt: skip
    """[BR, BC] of one expert's matrix [HEIGHT, WIDTH]; 0 past its edges. `stride` from expert to expert."""
    if DESC:
        value = w.load([expert, row, column]).reshape(BR, BC)
    else:
        value = load_block(w + expert.to(tl.int64) * stride, row, column, HEIGHT, WIDTH, WIDTH, BR, BC, False)
    return value


@triton.jit
def store_rows(
    y, value, first, end, column, WIDTH: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr, DESC: tl.constexpr
):
    """Stores [BR, BC] at the rows from `first` that lie before `end`."""
    if DESC:
        c0, c1, c2 = ragged_coordinates(first, tl.minimum(end - first, BR), 0)
        y.store([c0, c1, c2, column], value.reshape(1, 1, BR, BC))
    else:
        rows = first + tl.arange(0, BR)
        columns = column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < WIDTH)[None, :]
        tl.store(y + rows.to(tl.int64)[:, None] * WIDTH + columns[None, :], value, mask=mask)


@triton.jit
def halves(value, BR: tl.constexpr, BC: tl.constexpr):
    """The left and the right half of [BR, BC]."""
    return tl.split(value.reshape(BR, 2, BC // 2).permute(0, 2, 1))


@triton.jit
def _phase(
    x, w, bias, y, offsets, expert_W, row_W, num_rows, tile_start, tile_end, expert_start, stride, first, last, lanes,
    C: tl.constexpr, O: tl.constexpr, TRANSPOSED: tl.constexpr, DESC: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """The tiles of one operand among those of this program, which are every `lanes`-th from `first` and before `last`,
    counted in blocks of an output."""
    COLUMNS: tl.constexpr = (O + BN - 1) // BN
    start = tile_start * COLUMNS
    begin = first + tl.cdiv(tl.maximum(start - first, 0), lanes) * lanes
    for index in tl.range(begin, tl.minimum(tile_end * COLUMNS, last), lanes, flatten=FLATTEN):
        m, n = block_of(index - start, tile_end - tile_start, COLUMNS, GROUP)
        expert = tl.load(expert_W + tile_start + m)
        row = tl.load(row_W + tile_start + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in tl.range(0, (C + BK - 1) // BK):
            a = load_block(x, row, k * BK, num_rows, C, C, BM, BK, DESC)
            if TRANSPOSED:
                b = load_weight(w, expert - expert_start, n * BN, k * BK, stride, O, C, BN, BK, DESC).T
            else:
                b = load_weight(w, expert - expert_start, k * BK, n * BN, stride, C, O, BK, BN, DESC)
            acc = tl.dot(a, b, acc, input_precision="ieee")
        end = tl.load(offsets + expert + 1)
        if HAS_BIAS:
            columns = n * BN + tl.arange(0, BN)
            values = tl.load(bias + (expert - expert_start).to(tl.int64) * O + columns, mask=columns < O, other=0.0)
            acc += values.to(tl.float32)[None, :]
        dtype = y.dtype if DESC else y.dtype.element_ty
        if SPLIT:
            left, right = halves(acc, BM, BN)
            store_rows(y, left.to(dtype), row, end, n * BN, O, BM, BN // 2, DESC)
            store_rows(y, right.to(dtype), row, end, n * BN + BN // 2, O, BM, BN // 2, DESC)
        else:
            store_rows(y, acc.to(dtype), row, end, n * BN, O, BM, BN, DESC)


@triton.jit(do_not_specialize=["num_rows", "M", "lanes", "slices"])
def dual_gemm_kernel(
    x, masters, slots, master_bias, slot_bias, y, offsets, expert_W, row_W, num_3, num_rows, master_stride, slot_stride,
    M, lanes, slices, C: tl.constexpr, O: tl.constexpr, TRANSPOSED: tl.constexpr, HAS_MASTERS: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HALF: tl.constexpr, HAS_BIAS: tl.constexpr, DESC: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """y_RO = x_RC times each row's expert's weight: [O, C] if TRANSPOSED (the forward), else [C, O] (its gradient).
    Rows of masters, of slots, or both; of slots, those of the first or the second half if HALF is 1 or 2."""
    COLUMNS: tl.constexpr = (O + BN - 1) // BN
    masters_end = tl.load(num_3)
    slots_start = tl.load(num_3 + (1 if HALF == 2 else 0))
    slots_end = tl.load(num_3 + (1 if HALF == 1 else 2))
    start = 0 if HAS_MASTERS else slots_start * COLUMNS
    end = (slots_end if HAS_SLOTS else masters_end) * COLUMNS
    begin, before = share_of_level(tl.cdiv(end - start, lanes), lanes, slices)
    first, last = start + begin * lanes + tl.program_id(0) % lanes, start + before * lanes
    if HAS_MASTERS:
        _phase(
            x, masters, master_bias, y, offsets, expert_W, row_W, num_rows, 0, masters_end, 0, master_stride, first,
            last, lanes, C, O, TRANSPOSED, DESC, HAS_BIAS, BM, BN, BK, GROUP, FLATTEN, SPLIT,
        )  # fmt: skip
    if HAS_SLOTS:
        _phase(
            x, slots, slot_bias, y, offsets, expert_W, row_W, num_rows, slots_start, slots_end, M, slot_stride, first,
            last, lanes, C, O, TRANSPOSED, DESC, HAS_BIAS, BM, BN, BK, GROUP, FLATTEN, SPLIT,
        )  # fmt: skip
