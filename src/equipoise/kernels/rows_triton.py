"""Rows of tokens straight to their places at the ranks of their experts, and back, through memory that peers reach.

Each exchange is one kernel: it tells the peers which piece of memory is meant, waits for their word, moves its rows,
and returns when everybody has ended. Rows lie at an expert's rank by local expert, then by source rank, then in token
order.

    send     this rank's tokens into the peers' pieces
    gather   rows out of the peers' pieces, summed for each token of this rank

A token that goes to several experts of one rank is sent there once, to the place of its first slot there, the head.
Each place has a record that leads from the head to the places of the token's other slots, and the rank copies the row
to these itself. A token of this rank's own goes to all of its places here at once, while others' are on their way; and
where rows are so few that another launch takes longer, every token to all of its places everywhere. On the way back the
rank can fold a token's rows into the head's, and only that one is read from afar.

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
FOLLOWER = tl.constexpr(2**30)
OWN = tl.constexpr(2**29)
PLACE_MASK = tl.constexpr(2**28 - 1)
"""A record (int32) is the next place of the token here plus one, or 0; with FOLLOWER added where it is not the head,
and OWN where the sender writes the place itself: if it is its own, and to all of few rows."""


@triton.jit
def _targets(layout_ptr, L: tl.constexpr):
    """int64 [T * K]: rank << 32 | place there; -1 where there is none. A layout is int64: rows of each local expert
    here [L], their sum, the targets, then the records (int32 [T * K])."""
    return layout_ptr + (L + 1)


@triton.jit
def _records(layout_ptr, num_slots, L: tl.constexpr):
    """int32 [T * K], of the targets' places."""
    return (layout_ptr + (L + 1) + num_slots).to(tl.pointer_type(tl.int32))


@triton.jit
def _begin(control_ptr, pads_ptr, channel, rank, piece, P: tl.constexpr, P_PAD: tl.constexpr):
    """The run, after this rank's piece has been named."""
    run = current_run(control_ptr, channel)
    if tl.program_id(0) == 0:
        signal_peers(pads_ptr, channel, rank, (run << NUMBER_BITS) + piece, False, P, P_PAD)
    return run


@triton.jit
def _locate(slot, target_ptr, named_ptr, pieces_ptr, piece_bytes):
    """Whether a slot has a row, the address of the memory that its expert's rank has named in this exchange, and the
    place there."""
    target = tl.load(target_ptr + slot)
    known = tl.maximum(target, 0)  # a slot without a row looks up rank 0, and moves nothing
    peer = (known >> 32).to(tl.int32)
    named = tl.load(named_ptr + peer) & NUMBER_MASK
    return target >= 0, tl.load(pieces_ptr + peer) + named * piece_bytes, known & 0x7FFFFFFF


@triton.jit
def _place(slot, is_token, ids_ptr, row_ptr, shift_J, capacity, L: tl.constexpr):
    """Of slots: whether they have a row, its rank and its place there."""
    expert = tl.load(ids_ptr + slot, mask=is_token, other=-1).to(tl.int32)
    known = tl.maximum(expert, 0)
    place = tl.load(row_ptr + slot, mask=is_token, other=0).to(tl.int32) + tl.gather(shift_J, known, 0)
    return (expert >= 0) & (place >= 0) & (place < capacity), known // L, place


@triton.jit
def _address_tokens(
    control_ptr, send_ptr, quota_ptr, before_ptr, ids_ptr, row_ptr, layout_ptr, rank, capacity, num_tokens,
    SENDS_ALL: tl.constexpr,
    J: tl.constexpr, L: tl.constexpr, K: tl.constexpr, J_PAD: tl.constexpr, L_PAD: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Where the rows of this program's tokens go; by the first program, how many come here. Every rank sees it if any
    rank would get more than its buffers hold."""
    j = tl.arange(0, J_PAD)
    quota = tl.load(quota_ptr + j, mask=j < J, other=0)
    send = tl.load(send_ptr + j, mask=j < J, other=0).to(tl.int32)
    first = tl.cumsum(quota, 0) - quota
    first -= tl.gather(first, (j // L) * L, 0)
    before = tl.load(before_ptr + j, mask=j < J, other=0)
    shift = first + before - (tl.cumsum(send, 0) - send)
    target_ptr, record_ptr = _targets(layout_ptr, L), _records(layout_ptr, num_tokens.to(tl.int64) * K, L)
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    num_programs = tl.num_programs(0)
    for start in range(tl.program_id(0), num_tokens, num_programs * BLOCK_T):
        token = zero + start + tl.arange(0, BLOCK_T) * num_programs
        is_token = token < num_tokens
        for k in tl.static_range(K):
            is_row, peer, place = _place(token * K + k, is_token, ids_ptr, row_ptr, shift, capacity, L)
            record = tl.zeros([BLOCK_T], tl.int32)
            for other in tl.static_range(K):
                if other != k:
                    is_other, its_peer, its_place = _place(
                        token * K + other, is_token, ids_ptr, row_ptr, shift, capacity, L
                    )
                    is_here = is_other & (its_peer == peer)
                    if other < k:
                        record = tl.where(is_here, FOLLOWER, record)
                    else:
                        record = tl.where(is_here & (record & PLACE_MASK == 0), record + its_place + 1, record)
            record += tl.where(SENDS_ALL | (peer == rank), OWN, 0)
            target = tl.where(is_row, (peer.to(tl.int64) << 32) + place, -1)
            tl.store(target_ptr + token * K + k, target, mask=is_token)
            tl.store(record_ptr + token * K + k, record, mask=is_token)
    if tl.program_id(0) == 0:
        local = tl.arange(0, L_PAD)
        mine = tl.load(quota_ptr + rank * L + local, mask=local < L, other=0)
        end = tl.cumsum(mine, 0)
        counts = tl.minimum(end, capacity) - tl.minimum(end - mine, capacity)
        tl.store(layout_ptr + local, counts.to(tl.int64), mask=local < L)
        tl.store(layout_ptr + L, tl.minimum(tl.sum(mine, 0), capacity).to(tl.int64))
        needed = tl.max(tl.where(j < J, first + quota, 0), 0)
        if needed > capacity:
            status = tl.load(control_ptr + 1).to(tl.pointer_type(tl.int64))
            tl.store(status + ROW_CAPACITY, capacity.to(tl.int64))
            tl.store(status + NEEDED_ROWS, needed.to(tl.int64))


@triton.jit(
    do_not_specialize=[
        "channel", "rank", "piece", "num_tokens", "piece_bytes", "record_offset", "weight_offset", "capacity"
    ]
)  # fmt: skip
def send_rows_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    pieces_ptr,  # int64 [P]
    piece_bytes,
    piece,
    x_ptr,  # [T, W] words
    send_ptr,  # [J], this rank's rows for each physical expert
    quota_ptr,  # int32 [J], all ranks' rows for each
    before_ptr,  # int32 [J], those of the ranks before this one
    ids_ptr,  # [T, K], physical
    row_ptr,  # [T, K], places among this rank's rows, sorted by physical expert
    weights_ptr,  # float32 [T, K]
    layout_ptr,  # out
    num_tokens,
    capacity,
    record_offset,  # of the records in a piece
    weight_offset,  # of the rows' weights in a piece
    SENDS_ALL: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    J: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    J_PAD: tl.constexpr,
    L_PAD: tl.constexpr,
    BLOCK_T: tl.constexpr,
    W: tl.constexpr,
    WORD: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Finds the places, then sends each token once to each other rank that it goes to, or to every place; and with
    weights each slot's to its place."""
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    _address_tokens(
        control_ptr, send_ptr, quota_ptr, before_ptr, ids_ptr, row_ptr, layout_ptr, rank, capacity, num_tokens,
        SENDS_ALL, J, L, K, J_PAD, L_PAD, BLOCK_T,
    )  # fmt: skip
    # In it is a barrier, behind which this program's threads see each other's targets.
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    target_ptr, record_ptr = _targets(layout_ptr, L), _records(layout_ptr, num_tokens.to(tl.int64) * K, L)
    words_ptr = x_ptr.to(tl.pointer_type(WORD))
    zero = tl.zeros([], tl.int64)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        for start in tl.static_range(0, W, BLOCK):
            w = start + tl.arange(0, BLOCK)
            words = tl.load(words_ptr + (zero + token) * W + w, mask=w < W)
            for k in tl.static_range(K):
                slot = (zero + token) * K + k
                is_row, base, place = _locate(slot, target_ptr, named_ptr, pieces_ptr, piece_bytes)
                record = tl.load(record_ptr + slot)
                target = (base + place * (W * WORD_BYTES)).to(tl.pointer_type(WORD))
                if ALIGNED:
                    target = tl.multiple_of(target, 16)
                width = tl.where(is_row & ((record < FOLLOWER) | (record & OWN > 0)), W, 0)
                tl.store(target + w, words, mask=w < width)
                if start == 0:
                    tl.store((base + record_offset).to(tl.pointer_type(tl.int32)) + place, record, mask=is_row)
                    if HAS_WEIGHTS:
                        weight = tl.load(weights_ptr + slot)
                        tl.store((base + weight_offset).to(tl.pointer_type(tl.float32)) + place, weight, mask=is_row)
    end_run(control_ptr, pads_ptr, channel, rank, run, tl.num_programs(0), P, P_PAD)


@triton.jit(do_not_specialize=["channel", "rank", "piece", "num_tokens", "piece_bytes", "weight_offset"])
def send_gradients_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    pieces_ptr,
    piece_bytes,
    piece,
    grad_ptr,  # [T, D]
    rows_ptr,  # [T * K, D], what the experts returned
    weights_ptr,  # [T, K]
    grad_weights_ptr,  # [T, K]
    layout_ptr,
    num_tokens,
    weight_offset,  # of the rows' weights in a piece
    L: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    WANT_WEIGHTS: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Backward of the weighted sum: each token's gradient once to each of its ranks, and each slot's weight to its
    place, or times the weight to each place; and <gradient, row>, the weight's gradient. Or of the plain sum: the
    gradient alone."""
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    target_ptr, record_ptr = _targets(layout_ptr, L), _records(layout_ptr, num_tokens.to(tl.int64) * K, L)
    zero = tl.zeros([], tl.int64)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        for k in tl.static_range(K):
            slot = (zero + token) * K + k
            is_row, base, place = _locate(slot, target_ptr, named_ptr, pieces_ptr, piece_bytes)
            record = tl.load(record_ptr + slot)
            is_own = record & OWN > 0
            is_sent = is_row & ((record < FOLLOWER) | is_own)
            if HAS_WEIGHTS:
                weight = tl.load(weights_ptr + slot).to(tl.float32)
                tl.store((base + weight_offset).to(tl.pointer_type(tl.float32)) + place, weight, mask=is_row)
            target = (base + place * (D * ITEM_BYTES)).to(tl.pointer_type(dtype))
            if ALIGNED:
                target = tl.multiple_of(target, 16)
            products = tl.zeros([BLOCK], tl.float32)
            for start in tl.static_range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                grad = tl.load(grad_ptr + (zero + token) * D + d, mask=d < D, other=0.0)
                sent = grad
                if HAS_WEIGHTS:
                    sent = tl.where(is_own, (grad.to(tl.float32) * weight).to(dtype), grad)
                tl.store(target + d, sent, mask=d < tl.where(is_sent, D, 0))
                if WANT_WEIGHTS:
                    row = tl.load(rows_ptr + slot * D + d, mask=d < tl.where(is_row, D, 0), other=0.0)
                    products += grad.to(tl.float32) * row.to(tl.float32)
            if WANT_WEIGHTS:
                tl.store(grad_weights_ptr + slot, tl.sum(products, 0).to(grad_weights_ptr.dtype.element_ty))
    end_run(control_ptr, pads_ptr, channel, rank, run, tl.num_programs(0), P, P_PAD)


@triton.jit
def spread_rows_kernel(
    rows_ptr,  # [C, W] words, or elements with HAS_WEIGHTS
    record_ptr,  # int32 [C]
    weights_ptr,  # float32 [C]
    layout_ptr,
    L: tl.constexpr,
    K: tl.constexpr,
    W: tl.constexpr,
    WORD: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copies the head's row to the token's other places here; with weights, each times that of its place. Not where the
    sender has done so."""
    total = tl.load(layout_ptr + L).to(tl.int32)
    words_ptr = rows_ptr
    if not HAS_WEIGHTS:
        words_ptr = rows_ptr.to(tl.pointer_type(WORD))
    zero = tl.zeros([], tl.int64)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        record = tl.load(record_ptr + row)
        if (record >= 0) & (record < OWN):
            for start in tl.static_range(0, W, BLOCK):
                w = start + tl.arange(0, BLOCK)
                words = tl.load(words_ptr + (zero + row) * W + w, mask=w < W)
                if HAS_WEIGHTS:
                    head = (words.to(tl.float32) * tl.load(weights_ptr + row)).to(words.dtype)
                    tl.store(words_ptr + (zero + row) * W + w, head, mask=w < W)
                place = (record & PLACE_MASK) - 1
                hops = 0
                while (place >= 0) & (place < total) & (hops < K - 1):
                    copy = words
                    if HAS_WEIGHTS:
                        copy = (words.to(tl.float32) * tl.load(weights_ptr + place)).to(words.dtype)
                    tl.store(words_ptr + (zero + place) * W + w, copy, mask=w < W)
                    place = (tl.load(record_ptr + place) & PLACE_MASK) - 1
                    hops += 1


@triton.jit
def fold_rows_kernel(
    rows_ptr,  # [C, D]
    record_ptr,  # int32 [C]
    layout_ptr,
    L: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds to the head's row those of the token's other places here, in FP32, in order of k; rounded once. Not where
    the token is this rank's own, or the sender has written all places itself."""
    total = tl.load(layout_ptr + L).to(tl.int32)
    dtype: tl.constexpr = rows_ptr.dtype.element_ty
    zero = tl.zeros([], tl.int64)
    for row in range(tl.program_id(0), total, tl.num_programs(0)):
        record = tl.load(record_ptr + row)
        if (record > 0) & (record < OWN):
            for start in tl.static_range(0, D, BLOCK):
                d = start + tl.arange(0, BLOCK)
                folded = tl.load(rows_ptr + (zero + row) * D + d, mask=d < D, other=0.0).to(tl.float32)
                place = (record & PLACE_MASK) - 1
                hops = 0
                while (place >= 0) & (place < total) & (hops < K - 1):
                    folded += tl.load(rows_ptr + (zero + place) * D + d, mask=d < D, other=0.0).to(tl.float32)
                    place = (tl.load(record_ptr + place) & PLACE_MASK) - 1
                    hops += 1
                tl.store(rows_ptr + (zero + row) * D + d, folded.to(dtype), mask=d < D)


@triton.jit
def copy_rows_kernel(
    rows_ptr, out_ptr, layout_ptr, L: tl.constexpr, W: tl.constexpr, WORD: tl.constexpr, BLOCK: tl.constexpr
):
    """The first rows, as words [C, W]."""
    source, target = rows_ptr.to(tl.pointer_type(WORD)), out_ptr.to(tl.pointer_type(WORD))
    zero = tl.zeros([], tl.int64)
    for row in range(tl.program_id(0), tl.load(layout_ptr + L).to(tl.int32), tl.num_programs(0)):
        for start in tl.static_range(0, W, BLOCK):
            w = start + tl.arange(0, BLOCK)
            words = tl.load(source + (zero + row) * W + w, mask=w < W)
            tl.store(target + (zero + row) * W + w, words, mask=w < W)


@triton.jit
def _load_peer_row(
    slot, d, named_ptr, pieces_ptr, piece_bytes, target_ptr, record_ptr,
    D: tl.constexpr, ITEM_BYTES: tl.constexpr, DTYPE: tl.constexpr, ALIGNED: tl.constexpr, FOLDED: tl.constexpr,
):  # fmt: skip
    """A slot's row where it lies, zeros if it has none, or if it is folded into another."""
    is_row, base, place = _locate(slot, target_ptr, named_ptr, pieces_ptr, piece_bytes)
    if FOLDED:
        record = tl.load(record_ptr + slot)
        is_row = is_row & ((record < FOLLOWER) | (record & OWN > 0))
    row = (base + place * (D * ITEM_BYTES)).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        row = tl.multiple_of(row, 16)
    return tl.load(row + d, mask=d < tl.where(is_row, D, 0), other=0.0), is_row


@triton.jit(do_not_specialize=["channel", "rank", "piece", "num_tokens", "piece_bytes", "weight_offset"])
def gather_rows_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    pieces_ptr,
    piece_bytes,
    piece,
    layout_ptr,
    weights_ptr,  # [T, K]
    kept_ptr,  # [T * K, D], out: the rows themselves
    taken_ptr,  # float32 [T, K], out: what lies at the peers as the rows' weights
    out_ptr,  # [T, D]
    num_tokens,
    weight_offset,
    L: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    ITEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    KEEPS_ROWS: tl.constexpr,
    TAKES_WEIGHTS: tl.constexpr,
    FOLDED: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The sum over a token's slots of (weight times) the row that lies at the peer, in FP32, in order of k."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    run = _begin(control_ptr, pads_ptr, channel, rank, piece, P, P_PAD)
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    named_ptr = pad_words(pads_ptr, rank, channel, False, P)
    target_ptr, record_ptr = _targets(layout_ptr, L), _records(layout_ptr, num_tokens.to(tl.int64) * K, L)
    zero = tl.zeros([], tl.int64)
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        if TAKES_WEIGHTS:
            for k in tl.static_range(K):
                slot = (zero + token) * K + k
                is_there, base, place = _locate(slot, target_ptr, named_ptr, pieces_ptr, piece_bytes)
                theirs = (base + weight_offset).to(tl.pointer_type(tl.float32)) + place
                tl.store(taken_ptr + slot, tl.load(theirs, mask=is_there, other=0.0))
        for start in tl.static_range(0, D, BLOCK):
            d = start + tl.arange(0, BLOCK)
            first = (zero + token) * K
            total = tl.zeros([BLOCK], tl.float32)
            row, is_row = _load_peer_row(
                first, d, named_ptr, pieces_ptr, piece_bytes, target_ptr, record_ptr, D, ITEM_BYTES, dtype, ALIGNED,
                FOLDED,
            )  # fmt: skip
            for k in tl.static_range(K):
                following, is_following = row, is_row
                if k + 1 < K:  # on its way while this one is used
                    following, is_following = _load_peer_row(
                        first + k + 1, d, named_ptr, pieces_ptr, piece_bytes, target_ptr, record_ptr, D, ITEM_BYTES,
                        dtype, ALIGNED, FOLDED,
                    )  # fmt: skip
                if KEEPS_ROWS:
                    tl.store(kept_ptr + (first + k) * D + d, row, mask=d < D)
                picked = row.to(tl.float32)
                if HAS_WEIGHTS:
                    picked *= tl.load(weights_ptr + first + k, mask=is_row, other=0.0).to(tl.float32)
                total += picked
                row, is_row = following, is_following
            tl.store(out_ptr + (zero + token) * D + d, total.to(dtype), mask=d < D)
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
