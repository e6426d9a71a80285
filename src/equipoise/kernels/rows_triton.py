"""Rows of tokens straight to their places at the ranks of their experts, and back, through memory that peers reach.

Each kernel is one exchange: it tells the peers which piece of memory they are to write to, waits for theirs, writes its
rows, and returns when everybody's rows for this rank have arrived. Rows lie at an expert's rank by local expert, then
by source rank, then in token order; behind the rows of the piece, each has a record of where it came from.

A token that goes to several experts of one rank is sent there once, to the place of the first; the records of the
others name that place, and the rank copies the row there itself.

Shapes: P ranks, L local (physical) experts, J = P * L, T tokens of this rank, K slots per token, D features, C rows
at most here.
"""

import triton
import triton.language as tl

from equipoise.kernels.signals_triton import (
    NUMBER_BITS,
    current_run,
    end_run,
    pad_words,
    signal_peers,
    wait_for_peers,
)

NUMBER_MASK = tl.constexpr(2**20 - 1)
NEEDED_ROWS, ROW_CAPACITY = tl.constexpr(3), tl.constexpr(4)
PLACE_BITS = tl.constexpr(28)
PLACE_MASK = tl.constexpr(2**28 - 1)
"""A record is rank << 56 | (place of the row to copy from + 1) << 28 | slot."""


@triton.jit
def _begin(control_ptr, pads_ptr, channel, rank, piece, P: tl.constexpr, P_PAD: tl.constexpr):
    run = current_run(control_ptr, channel)
    if tl.program_id(0) == 0:
        signal_peers(pads_ptr, channel, rank, (run << NUMBER_BITS) + piece, False, P, P_PAD)
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    return run


@triton.jit
def _piece_of(peer, pads_word_ptr, pieces_ptr, piece_bytes):
    """Address of the memory that a peer has named in this exchange."""
    return tl.load(pieces_ptr + peer) + (tl.load(pads_word_ptr + peer) & NUMBER_MASK) * piece_bytes


@triton.jit
def _target(slot, target_ptr):
    """Whether a slot has a row, its expert's rank, and the place there."""
    target = tl.load(target_ptr + slot)
    known = tl.maximum(target, 0)  # a slot without a row looks up rank 0, and writes nothing
    return target >= 0, (known >> 32).to(tl.int32), known & 0x7FFFFFFF


@triton.jit(do_not_specialize=["channel", "rank", "piece", "num_tokens", "piece_bytes", "record_offset"])
def send_rows_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    piece,
    pieces_ptr,  # int64 [P]
    piece_bytes,
    x_ptr,  # words [T, W]
    target_ptr,  # int64 [T, K]
    origin_ptr,  # int32 [T, K]
    num_tokens,
    record_offset,
    K: tl.constexpr,
    W: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        for start in tl.static_range(0, W, BLOCK):
            w = start + tl.arange(0, BLOCK)
            words = tl.load(x_ptr + (zero + token) * W + w, mask=w < W)
            for k in tl.static_range(K):
                slot = (zero + token) * K + k
                is_row, peer, place = _target(slot, target_ptr)
                origin = tl.load(origin_ptr + slot)
                base = _piece_of(peer, named_ptr, pieces_ptr, piece_bytes)
                target = (base + place * (W * WORD_BYTES)).to(tl.pointer_type(WORD))
                if ALIGNED:
                    target = tl.multiple_of(target, 16)
                width = tl.where(is_row & (origin < 0), W, 0)
                tl.store(target + w, words, mask=w < width)
                if start == 0:
                    record = (base + record_offset).to(tl.pointer_type(tl.int64))
                    code = (rank.to(tl.int64) << (2 * PLACE_BITS)) + ((origin + 1).to(tl.int64) << PLACE_BITS) + slot
                    tl.store(record + place, code, mask=is_row)
    end_run(control_ptr, pads_ptr, channel, rank, run, tl.num_programs(0), P, P_PAD)


@triton.jit
def spread_rows_kernel(
    rows_ptr,  # words [C, W]
    record_ptr,  # int64 [C]
    total_ptr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies rows to the places of the other experts here that their tokens go to."""
    total = tl.load(total_ptr)
    zero = tl.zeros([], tl.int64)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        origin = ((tl.load(record_ptr + row) >> PLACE_BITS) & PLACE_MASK) - 1
        if (origin >= 0) & (origin < total):
            for start in tl.static_range(0, W, BLOCK):
                w = start + tl.arange(0, BLOCK)
                words = tl.load(rows_ptr + origin * W + w, mask=w < W)
                tl.store(rows_ptr + (zero + row) * W + w, words, mask=w < W)


@triton.jit(do_not_specialize=["channel", "rank", "piece", "piece_bytes", "num_slots"])
def return_rows_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    piece,
    pieces_ptr,
    piece_bytes,
    rows_ptr,  # words [C, W]
    record_ptr,  # int64 [C]
    total_ptr,  # int32 [1], rows here
    num_slots,  # that a piece holds
    W: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Each row to the slot that it came from, at the slot's rank: [T * K, D]."""
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    total = tl.load(total_ptr)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        record = tl.load(record_ptr + row)
        peer = (record >> (2 * PLACE_BITS)) & 0xFF
        slot = record & PLACE_MASK
        is_row = (peer < P) & (slot < num_slots)  # always, unless a rank has failed
        base = _piece_of(tl.where(is_row, peer, 0), named_ptr, pieces_ptr, piece_bytes)
        target = (base + slot * (W * WORD_BYTES)).to(tl.pointer_type(WORD))
        if ALIGNED:
            target = tl.multiple_of(target, 16)
        width = tl.where(is_row, W, 0)
        for start in tl.static_range(0, W, BLOCK):
            w = start + tl.arange(0, BLOCK)
            words = tl.load(rows_ptr + (zero + row) * W + w, mask=w < W)
            tl.store(target + w, words, mask=w < width)
    end_run(control_ptr, pads_ptr, channel, rank, run, tl.num_programs(0), P, P_PAD)


@triton.jit(do_not_specialize=["channel", "rank", "piece", "num_tokens", "piece_bytes"])
def send_gradients_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    piece,
    pieces_ptr,
    piece_bytes,
    grad_ptr,  # [T, D]
    rows_ptr,  # [T * K, D], what the experts returned
    weights_ptr,  # [T, K]
    grad_weights_ptr,  # [T, K]
    target_ptr,
    num_tokens,
    K: tl.constexpr,
    D: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Backward of the weighted sum: each slot's weight times its token's gradient, to the row's place; and <gradient,
    row>, the weight's gradient."""
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        for k in tl.static_range(K):
            slot = (zero + token) * K + k
            is_row, peer, place = _target(slot, target_ptr)
            weight = tl.load(weights_ptr + slot).to(tl.float32)
            base = _piece_of(peer, named_ptr, pieces_ptr, piece_bytes)
            target = (base + place * (D * ITEM_BYTES)).to(tl.pointer_type(dtype))
            if ALIGNED:
                target = tl.multiple_of(target, 16)
            width = tl.where(is_row, D, 0)
            products = tl.zeros([BLOCK], tl.float32)
            for start in tl.static_range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                grad = tl.load(grad_ptr + (zero + token) * D + d, mask=d < D, other=0.0).to(tl.float32)
                if WANT_WEIGHTS:
                    row = tl.load(rows_ptr + slot * D + d, mask=d < width, other=0.0).to(tl.float32)
                    products += grad * row
                tl.store(target + d, (grad * weight).to(dtype), mask=d < width)
            if WANT_WEIGHTS:
                tl.store(grad_weights_ptr + slot, tl.sum(products, 0).to(grad_weights_ptr.dtype.element_ty))
    end_run(control_ptr, pads_ptr, channel, rank, run, tl.num_programs(0), P, P_PAD)


@triton.jit(do_not_specialize=["channel", "rank"])
def exchange_counts_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    tables_ptr,  # int64 [P], every rank's two tables [P, J], used in turn
    counts_ptr,  # int32 [J], this rank's rows for each physical expert
    quota_ptr,  # int32 [J], all ranks' rows for each
    before_ptr,  # int32 [J], those of the ranks before this one
    J: tl.constexpr,
    J_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
):
    """One program. A table is written again only after its owner's next exchange, hence after it was read."""
    run = current_run(control_ptr, channel)
    j = tl.arange(0, J_PAD)
    counts = tl.load(counts_ptr + j, mask=j < J, other=0).to(tl.int32)
    table = (run & 1) * (P * J)
    for peer in range(0, P):
        theirs = tl.load(tables_ptr + peer).to(tl.pointer_type(tl.int32)) + table
        tl.store(theirs + rank * J + j, counts, mask=j < J)
    signal_peers(pads_ptr, channel, rank, run << NUMBER_BITS, False, P, P_PAD)
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    mine = tl.load(tables_ptr + rank).to(tl.pointer_type(tl.int32)) + table
    quota = tl.zeros([J_PAD], tl.int32)
    before = tl.zeros([J_PAD], tl.int32)
    for peer in range(0, P):
        theirs_J = tl.load(mine + peer * J + j, mask=j < J, other=0, volatile=True)
        quota += theirs_J
        before += tl.where(peer < rank, theirs_J, 0)
    tl.store(quota_ptr + j, quota, mask=j < J)
    tl.store(before_ptr + j, before, mask=j < J)
    tl.store(control_ptr + (channel + 1) * 32, run)


@triton.jit(do_not_specialize=["rank", "capacity", "num_tokens"])
def address_rows_kernel(
    control_ptr,
    send_ptr,  # [J], this rank's rows for each physical expert
    quota_ptr,  # int32 [J], all ranks' rows for each
    before_ptr,  # int32 [J], those of the ranks before this one
    ids_ptr,  # [T, K], physical
    row_ptr,  # [T, K], places among this rank's rows, sorted by physical expert
    target_ptr,  # int64 [T, K]: rank << 32 | place there; -1 where there is none
    origin_ptr,  # int32 [T, K]: the place of an earlier slot of the token at that rank, else -1
    counts_ptr,  # int64 [L], rows of each local expert here
    total_ptr,  # int32 [1], their sum
    rank,
    capacity,
    num_tokens,
    J: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    J_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Where rows go, and how many come. Every rank sees it if any rank would get more than its buffers hold."""
    j = tl.arange(0, J_PAD)
    quota = tl.load(quota_ptr + j, mask=j < J, other=0)
    send = tl.load(send_ptr + j, mask=j < J, other=0).to(tl.int32)
    first = tl.cumsum(quota, 0) - quota
    first -= tl.gather(first, (j // L) * L, 0)
    before = tl.load(before_ptr + j, mask=j < J, other=0)
    shift = first + before - (tl.cumsum(send, 0) - send)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    is_token = token < num_tokens
    for k in tl.static_range(K):
        slot = token.to(tl.int64) * K + k
        expert = tl.load(ids_ptr + slot, mask=is_token, other=-1).to(tl.int32)
        known = tl.maximum(expert, 0)
        place = tl.load(row_ptr + slot, mask=is_token, other=0).to(tl.int32) + tl.gather(shift, known, 0)
        is_row = (expert >= 0) & (place >= 0) & (place < capacity)
        peer = known // L
        target = tl.where(is_row, (peer.to(tl.int64) << 32) + place, -1)
        origin = tl.full([BLOCK_T], -1, tl.int32)
        for earlier in tl.static_range(K):
            if earlier < k:
                other = tl.load(ids_ptr + slot - k + earlier, mask=is_token, other=-1).to(tl.int32)
                other_known = tl.maximum(other, 0)
                other_place = tl.load(row_ptr + slot - k + earlier, mask=is_token, other=0).to(tl.int32)
                other_place += tl.gather(shift, other_known, 0)
                is_same = (other >= 0) & (other_known // L == peer) & (other_place >= 0) & (other_place < capacity)
                origin = tl.where(is_same & (origin < 0), other_place, origin)
        tl.store(target_ptr + slot, target, mask=is_token)
        tl.store(origin_ptr + slot, origin, mask=is_token)
    if tl.program_id(0) == 0:
        local = tl.arange(0, L_PAD)
        mine = tl.load(quota_ptr + rank * L + local, mask=local < L, other=0)
        end = tl.cumsum(mine, 0)
        counts = tl.minimum(end, capacity) - tl.minimum(end - mine, capacity)
        tl.store(counts_ptr + local, counts.to(tl.int64), mask=local < L)
        tl.store(total_ptr, tl.minimum(tl.sum(mine, 0), capacity))
        needed = tl.max(tl.where(j < J, first + quota, 0), 0)
        if needed > capacity:
            status = tl.load(control_ptr + 1).to(tl.pointer_type(tl.int64))
            tl.store(status + ROW_CAPACITY, capacity.to(tl.int64))
            tl.store(status + NEEDED_ROWS, needed.to(tl.int64))
