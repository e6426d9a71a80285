"""The plan kernel: one launch from the load matrix to a rank's whole plan. See `kernels/plan.py` for the contract.

Programs of one warp in five roles, in order of program id, so that each waits for lower ids only: they are dispatched
first and wait for nobody higher, hence no deadlock (and Triton's interpreter, which runs one after another, works).
That is why these waits have no limit. The one for other ranks' counts has: it may be in vain.

    exchangers  one per rank, where counts are exchanged here: counts to that peer, wait for the peer's
    summers     columns of the load matrix to load_E, 16 each; none where the matrix is so small that (OWN_SUMS) every
                candidate adds up for itself sooner than it would hear from others
    candidates  one (target, rule) each: makes its moves in registers, logs them, offers its key to the best
    finishers   several per rank: read the winner's log and write quotas and sends, or receives, of a few of that rank's
                physical experts; a warp takes long over many
    sweeper     one, the last: when all have read them, sets the counters to what the next launch must find

Where LANES, ranks lie along the lanes and all experts of a rank in one lane. A choice is a reduction of integers over
one warp, of value and index packed into one: int32, which the hardware does in one instruction, while loads leave
enough high bits free; otherwise (IS_WIDE) the same code takes int64.

Shapes: P ranks, E experts, M masters and R slots per rank, L = M + R locals (of a finisher: LOCALS), S moves at most.
"""

import triton
import triton.language as tl

from equipoise.kernels.signals_triton import LEFT, WORDS, current_run, give_up, give_way, pad_words
from equipoise.kernels.signals_triton import NUMBER_BITS as SIGNAL_BITS

INT_MAX = tl.constexpr(2**31 - 1)
KEY_MAX = tl.constexpr(2**63 - 1)
VARIANT_BITS = tl.constexpr(3)
COPIES_BITS = tl.constexpr(16)
NUMBER_BITS = tl.constexpr(8)
VARIANT_MASK, COPIES_MASK, NUMBER_MASK = tl.constexpr(2**3 - 1), tl.constexpr(2**16 - 1), tl.constexpr(2**8 - 1)
PPM = tl.constexpr(1_000_000)
COLUMNS = tl.constexpr(16)
"""Experts that one summer adds up."""

BEST, SUMMED, ARRIVED, FINISHED, EXCHANGED, LOAD = (tl.constexpr(16 * k) for k in (0, 16, 24, 32, 33, 34))
"""Where the workspace (int64) holds what: the best offer and counters, each on its own cache line, then load_E (int32),
then the logs (int64 [candidates, S])."""
BEST_COPIES, SUMMED_COPIES, ARRIVED_COPIES, COUNTERS_PAD = (tl.constexpr(n) for n in (16, 8, 8, 64))
"""What hundreds of programs read over and over lies there several times, for some of them each: reads of one address
take turns, and took as long as the moves."""

FIRST_BITS, REACHED_BITS, FIRST = tl.constexpr(20), tl.constexpr(40), tl.constexpr(2**20)
"""The counter ARRIVED holds three: candidates that have ended, those of the lowest target, those that reached it."""
FIELD_MASK = tl.constexpr(2**20 - 1)


@triton.jit
def _acquire(counter_ptr):
    """After a wait: nothing that is read from here on is older than what the wait has seen.

    Triton 3.6 drops an atomic addition of nothing on NVIDIA, and ptxas then moves reads before the wait: the barrier
    keeps them here. Programs read through no stale line, since they read nothing that others write before they wait.
    """
    tl.atomic_add(counter_ptr, 0, sem="acquire")
    tl.debug_barrier()


@triton.jit
def _offer(best_ptr, key):
    """Makes it the best, in every copy, if it is."""
    copy = tl.arange(0, BEST_COPIES)
    tl.atomic_max(best_ptr + 16 * copy, tl.zeros([BEST_COPIES], tl.int64) + (key ^ KEY_MAX), sem="relaxed")


@triton.jit
def _await(counter_ptr, enough):
    """Returns once the counter is `enough`, with all that was written before the others raised it.

    Plain reads do not queue up behind each other in the cache as atomic ones do, nor hold up those who count.
    """
    while tl.load(counter_ptr, volatile=True) < enough:
        pass
    _acquire(counter_ptr)


@triton.jit
def _await_winner(counter_ptr, num_candidates, num_variants):
    """Returns once the best offer is final: all candidates have ended, or those of the lowest target and one reached
    it, since nobody has a lower score and equal scores go to the lower target."""
    waits = num_candidates > 0
    while waits:
        seen = tl.load(counter_ptr, volatile=True)
        is_decided = (((seen >> FIRST_BITS) & FIELD_MASK) == num_variants) & ((seen >> REACHED_BITS) > 0)
        waits = ((seen & FIELD_MASK) < num_candidates) & (is_decided == 0)
    _acquire(counter_ptr)


@triton.jit
def _key(score, number, copies, variant):
    """int64: orders plans by score, then target, then copies, then rule."""
    rank = (number.to(tl.int64) << (COPIES_BITS + VARIANT_BITS)) + (copies.to(tl.int64) << VARIANT_BITS) + variant
    return (score.to(tl.int64) << (NUMBER_BITS + COPIES_BITS + VARIANT_BITS)) + rank


@triton.jit
def _pack(value, code, BITS: tl.constexpr, IS_WIDE: tl.constexpr):
    """Value and index (0 to 2 ** BITS - 1) in one integer, so that one reduction finds both.

    int32, where |value| is below 2 ** (30 - BITS); int64 if IS_WIDE.
    """
    if IS_WIDE:
        return (value.to(tl.int64) << BITS) + code
    else:
        return (value << BITS) + code


@triton.jit
def _unpack(packed, BITS: tl.constexpr):
    return (packed >> BITS).to(tl.int32), (packed & ((1 << BITS) - 1)).to(tl.int32)


@triton.jit
def _lowest_target(home_MP, load_P, is_rank_P, tolerated, R: tl.constexpr, IS_WIDE: tl.constexpr):
    """The larger of `tolerated` and the load below which slots cannot take every excess (int32).

    The surplus sum(min(t - load, hosted)) is concave in t, so Newton's steps from below never pass the crossing.
    """
    M_PAD: tl.constexpr = home_MP.shape[0]
    P_PAD: tl.constexpr = home_MP.shape[1]
    code_MP = tl.arange(0, M_PAD)[:, None] * P_PAD + tl.arange(0, P_PAD)[None, :]
    hosted = 0
    left_MP = home_MP
    for _ in tl.static_range(R):
        most = tl.max(tl.max(left_MP, 0), 0)
        code = tl.max(tl.max(tl.where(left_MP == most, code_MP, -1), 0), 0)
        hosted += tl.maximum(most, 0)
        left_MP = tl.where(code_MP == code, -1, left_MP)
    target = tolerated
    surplus = tl.full([], -1, tl.int64)
    while surplus < 0:
        room_P = tl.where(is_rank_P, target - load_P, 0)
        gain_P = tl.minimum(room_P, hosted)
        surplus = tl.sum(gain_P.to(tl.int64), 0) if IS_WIDE else tl.sum(gain_P, 0).to(tl.int64)
        slope = tl.sum(((room_P < hosted) & is_rank_P).to(tl.int32), 0)
        if surplus < 0:
            target += ((slope - 1 - surplus) // slope).to(tl.int32)
    return target


@triton.jit
def _run_candidate(
    best_ptr,
    copy_ptr,
    log_ptr,
    home_MP,
    load_P,
    rank_P,
    master_M,
    tolerated,
    ceiling,
    number,
    variant,
    step,
    sign,
    is_fit,
    threshold,
    fill,
    min_tokens,
    copy_tokens,
    P: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    DOMAIN: tl.constexpr,
    HAS_COPY_TIME: tl.constexpr,
    RANK_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    CAP: tl.constexpr,
    IS_WIDE: tl.constexpr,
):
    """One rule towards one target, as `run_candidates` of balance/planner.py; offers its key to `best_ptr`, of which it
    reads the copy at `copy_ptr`. Returns whether no rank is above the target.

    `ceiling` is the score of moving nothing. A candidate ends as soon as its key cannot become the best any more.
    A rank's code is its complement, so that the lowest rank has the largest, with its free slots in the low bits.

    A move is a chain of dependent steps, and its length is the time that a plan takes. One reduction is left in it, the
    search of the receiver. All else is known or found beside it: the next giver is this one or the first of the others,
    whose loads no move changes; how much moves depends on the giver's largest expert, not on which one moves.
    """
    LAST_RANK: tl.constexpr = (1 << RANK_BITS) - 1
    LAST_MASTER: tl.constexpr = (1 << MASTER_BITS) - 1
    NONE: tl.constexpr = -(2**62) if IS_WIDE else -(2**30) - 1
    ALL: tl.constexpr = 2**62 if IS_WIDE else 2**31 - 1
    is_rank_P = rank_P < P
    target64 = tolerated.to(tl.int64)
    if number > 1:
        start = _lowest_target(home_MP, load_P, is_rank_P, tolerated, R, IS_WIDE).to(tl.int64)
        target64 = start + (start * step >> 20)
    is_reached = target64 >= ceiling
    if target64 + copy_tokens < ceiling:
        target = target64.to(tl.int32)
        room_P = tl.where(is_rank_P, target - load_P, 0)
        # Made from the loads (whose sign is 0) so that the compiler lays them over the lanes alike.
        free_P = tl.where(is_rank_P, R + (load_P >> 31), 0)
        sent_P = load_P >> 31
        code_P = LAST_RANK - rank_P
        is_paired_rule = fill < 0
        fill = tl.where(is_paired_rule, R, fill)
        copies = 0
        offer = tl.full([], 0, tl.int64)
        busiest = 0
        space = 0
        receiver = 0
        slots_left = 0
        pair = sign > 2  # no
        live = sign < 2  # yes
        worst, code = _unpack(
            tl.max(tl.where(room_P < 0, _pack(-room_P * sign, code_P, RANK_BITS, IS_WIDE), NONE), 0), RANK_BITS
        )
        giver = LAST_RANK - code
        excess = worst * sign
        size_M = tl.sum(tl.where((rank_P == giver)[None, :], home_MP, 0), 1)
        most = tl.max(size_M, 0)
        while live:
            # The best offer as it was a move ago: nobody waits for the memory.
            bound = _key(target64 + busiest * copy_tokens, number, copies + 1, variant)
            can_win = bound < (offer ^ KEY_MAX)
            offer = tl.load(copy_ptr, volatile=True)

            is_giver_P = rank_P == giver
            over_P = tl.where((room_P < 0) & (rank_P != giver), _pack(-room_P * sign, code_P, RANK_BITS, IS_WIDE), NONE)
            other_key = tl.max(over_P, 0)

            want = tl.maximum(excess, min_tokens)
            enough = tl.where(is_fit, tl.minimum(want, most), threshold)
            open_P = tl.where(free_P > 0, tl.maximum(room_P, 0), 0)
            if DOMAIN < P:
                open_P = tl.where(rank_P // DOMAIN == giver // DOMAIN, open_P, 0)
            slots_code_P = (code_P << SLOT_BITS) + (free_P if SLOT_BITS > 0 else 0)
            # The smallest room that is enough, else the largest.
            fits_P = _pack(CAP - open_P, slots_code_P, RANK_BITS + SLOT_BITS, IS_WIDE)
            short_P = _pack(open_P - CAP - 1, slots_code_P, RANK_BITS + SLOT_BITS, IS_WIDE)
            closest, code = _unpack(tl.max(tl.where(open_P >= enough, fits_P, short_P), 0), RANK_BITS + SLOT_BITS)
            receiver = tl.where(pair, receiver, LAST_RANK - (code >> SLOT_BITS))
            space = tl.where(pair, space, CAP - (closest ^ (closest >> 31)))
            slots = tl.where(pair, slots_left, code & ((1 << SLOT_BITS) - 1)) if SLOT_BITS > 0 else 1

            other_worst, code = _unpack(other_key, RANK_BITS)
            other = LAST_RANK - code
            other_size_M = tl.sum(tl.where((rank_P == other)[None, :], home_MP, 0), 1)
            other_most = tl.max(other_size_M, 0)

            move = tl.minimum(tl.where(slots <= fill, space, tl.minimum(want, space)), most)
            live = move >= min_tokens
            move = tl.where(live, move, 0)
            # The smallest expert that has them.
            sized_M = tl.where(size_M >= move, _pack(size_M, master_M, MASTER_BITS, IS_WIDE), ALL)
            master = (tl.min(sized_M, 0) & LAST_MASTER).to(tl.int32)

            entry = (giver * M + master) * (P * R) + receiver * R + R - slots
            tl.store(log_ptr + copies, (move.to(tl.int64) << 32) + entry, mask=live)
            copies += live.to(tl.int32)
            is_receiver_P = rank_P == receiver
            room_P += tl.where(is_giver_P, move, 0) - tl.where(is_receiver_P, move, 0)
            free_P -= (is_receiver_P & live).to(tl.int32)
            size_M -= tl.where(master_M == master, move, 0)
            home_MP = tl.where(is_giver_P[None, :], size_M[:, None], home_MP)
            if HAS_COPY_TIME:
                sent_P += (is_giver_P & live).to(tl.int32)
                now = tl.maximum(tl.sum(tl.where(is_giver_P, sent_P, 0), 0), R - slots + 1)
                busiest = tl.where(live, tl.maximum(busiest, now), busiest)
            excess -= move
            space -= move
            slots_left = slots - 1
            pair = is_paired_rule & live & (space >= min_tokens) & (slots > 1)

            own_key = tl.where(excess > 0, _pack(excess * sign, LAST_RANK - giver, RANK_BITS, IS_WIDE), NONE)
            stays = pair | (own_key > other_key)
            live = live & can_win & (tl.maximum(own_key, other_key) != NONE)
            giver = tl.where(stays, giver, other)
            excess = tl.where(stays, excess, other_worst * sign)
            most = tl.where(stays, tl.max(size_M, 0), other_most)
            size_M = tl.where(stays, size_M, other_size_M)
        if copies > 0:
            top = (target - tl.min(tl.where(is_rank_P, room_P, INT_MAX), 0)).to(tl.int64)
            key = _key(tl.maximum(top, target64) + busiest * copy_tokens, number, copies, variant)
            if key < (offer ^ KEY_MAX):
                _offer(best_ptr, key)
            is_reached = top <= target64
    return is_reached


@triton.jit
def _write(
    owner, source, local_L, is_send, log_ptr, copies, one, load_ptr, load_E_ptr,
    slot_expert_ptr, quota_ptr, send_ptr, recv_ptr, before_ptr,
    P: tl.constexpr, E: tl.constexpr, R: tl.constexpr, P_PAD: tl.constexpr, S_PAD: tl.constexpr,
    HAS_EXCHANGE: tl.constexpr,
):  # fmt: skip
    """Some physical experts of rank `owner`: who they are, their quotas, and what rank `source` sends to them; see
    balance/splits.py. Everything is loaded before anything is added up: one wait for the memory after that for the log.
    """
    M: tl.constexpr = E // P
    S: tl.constexpr = max(P * R, 1)
    # Experts by moves from the start, and all loads alike: nothing is laid over the lanes anew.
    move_LS = tl.broadcast_to(tl.arange(0, S_PAD)[None, :], [local_L.shape[0], S_PAD])
    is_move_LS = move_LS < copies
    entry_LS = tl.load(log_ptr + move_LS * one, mask=is_move_LS, other=0)
    code_LS = (entry_LS & 0xFFFFFFFF).to(tl.int32)
    tokens_LS = (entry_LS >> 32).to(tl.int32)
    expert_LS = tl.where(is_move_LS, code_LS // S, -1)
    slot_LS = tl.where(is_move_LS, code_LS % S, -1)
    slot_rank_LS = slot_LS // max(R, 1)
    own_LS = tl.load(load_ptr + slot_rank_LS * E + expert_LS, mask=is_move_LS, other=0)

    is_local_L = local_L < M + R
    is_master_L = local_L < M
    slot_L = owner * R + local_L - M
    is_here_LS = (slot_LS == slot_L[:, None]) & (~is_master_L & is_local_L)[:, None]
    hosted_L = tl.sum(tl.where(is_here_LS, expert_LS + 1, 0), 1) - 1
    expert_L = tl.where(is_master_L, owner * M + local_L, hosted_L)
    is_used_L = expert_L >= 0
    home_L = expert_L // M
    load_L = tl.load(load_E_ptr + expert_L, mask=is_used_L, other=0)
    home_own_L = tl.load(load_ptr + home_L * E + expert_L, mask=is_used_L, other=0)
    source_L = tl.load(load_ptr + source * E + expert_L, mask=is_used_L, other=0)
    rank_P = tl.arange(0, P_PAD)
    column_LP = load_ptr + rank_P[None, :] * E + expert_L[:, None]
    column_LP = tl.load(column_LP, mask=is_used_L[:, None] & (rank_P < source)[None, :], other=0)

    own_LS = tl.minimum(own_LS, tokens_LS)
    is_same_LS = expert_LS == tl.where(is_used_L, expert_L, -2)[:, None]
    kept_L = load_L - tl.sum(tl.where(is_same_LS, tokens_LS, 0), 1)
    home_own_L = tl.minimum(home_own_L, kept_L)
    quota_L = tl.where(is_master_L, kept_L, tl.sum(tl.where(is_here_LS, tokens_LS, 0), 1))
    own_L = tl.where(is_master_L, home_own_L, tl.sum(tl.where(is_here_LS, own_LS, 0), 1))
    is_earlier_LS = is_same_LS & (slot_LS < slot_L[:, None])
    first_L = kept_L - home_own_L + tl.sum(tl.where(is_earlier_LS, tokens_LS - own_LS, 0), 1)
    first_L = tl.where(is_master_L, 0, first_L)

    earlier_own_LS = tl.where(slot_rank_LS < source, own_LS, 0)
    here_own_LS = tl.where(slot_rank_LS == source, own_LS, 0)
    earlier_own_L = tl.sum(tl.where(is_same_LS, earlier_own_LS, 0), 1)
    earlier_own_L += tl.where(home_L < source, home_own_L, 0)
    here_own_L = tl.sum(tl.where(is_same_LS, here_own_LS, 0), 1)
    here_own_L += tl.where(home_L == source, home_own_L, 0)
    start_L = tl.sum(column_LP, 1) - earlier_own_L
    end_L = tl.minimum(start_L + source_L - here_own_L, first_L + quota_L - own_L)
    sent_L = tl.maximum(end_L - tl.maximum(start_L, first_L), 0) + tl.where(source == owner, own_L, 0)

    at_L = tl.where(is_send, owner, source) * (M + R) + local_L
    if is_send:
        tl.store(slot_expert_ptr + slot_L, expert_L, mask=~is_master_L & is_local_L)
        tl.store(quota_ptr + at_L, quota_L, mask=is_local_L)
        tl.store(send_ptr + at_L, sent_L, mask=is_local_L)
        if HAS_EXCHANGE:
            before_L = tl.minimum(tl.maximum(start_L - first_L, 0), quota_L - own_L)
            before_L += tl.where(owner < source, own_L, 0)
            tl.store(before_ptr + at_L, before_L, mask=is_local_L)
    else:
        tl.store(recv_ptr + at_L, sent_L, mask=is_local_L)


@triton.jit
def _exchange(
    peer, counts_ptr, workspace_ptr, control_ptr, pads_ptr, tables_ptr, channel, rank, run,
    P: tl.constexpr, E: tl.constexpr, E_PAD: tl.constexpr,
):  # fmt: skip
    """Writes this rank's counts into a peer's table and waits for the peer's in this one's."""
    e = tl.arange(0, E_PAD)
    counts = tl.load(counts_ptr + e, mask=e < E, other=0)
    half = (run & 1) * (P * E)
    theirs = tl.load(tables_ptr + peer).to(tl.pointer_type(tl.int32)) + half + rank * E
    tl.store(theirs + e, counts, mask=e < E)
    tl.debug_barrier()
    goal = run << SIGNAL_BITS
    tl.atomic_xchg(pad_words(pads_ptr, peer, channel, False, P) + rank, goal, sem="release", scope="sys")
    word = pad_words(pads_ptr, rank, channel, False, P) + peer
    limit = tl.load(control_ptr, volatile=True)
    spins = tl.zeros([], tl.int64)
    left_ptr = tl.load(pads_ptr + rank).to(tl.pointer_type(tl.int64)) + LEFT * P + peer
    while (tl.load(word, volatile=True) < goal) & (tl.load(left_ptr, volatile=True) == 0) & (spins < limit):
        spins += 1
        give_way()
    if tl.atomic_add(word, tl.zeros([], tl.int64), sem="acquire", scope="sys") < goal:
        give_up(control_ptr, channel, peer, run, tl.load(left_ptr, volatile=True) > 0)
        mine = tl.load(tables_ptr + rank).to(tl.pointer_type(tl.int32)) + half + peer * E
        tl.store(mine + e, tl.zeros([E_PAD], tl.int32), mask=e < E)  # a plan of what is there ends
    tl.debug_barrier()
    tl.atomic_add(workspace_ptr + EXCHANGED, 1, sem="release")


@triton.jit(do_not_specialize=["channel", "rank", "tolerance_ppm", "min_tokens", "copy_tokens", "num_targets"])
def plan_kernel(
    rules_ptr,  # int32 [V, 4]: giver's sign, whether the receiver fits, its threshold, fill
    steps_ptr,  # int32 [K]
    workspace_ptr,  # int64
    rank,
    tolerance_ppm,
    min_tokens,
    copy_tokens,
    num_targets,
    control_ptr,  # this and the next three only with HAS_EXCHANGE
    pads_ptr,
    tables_ptr,  # int64 [P], every rank's int32 [2, P, E], used in turn
    channel,
    load_ptr,  # int32 [P, E]; with HAS_EXCHANGE [E], this rank's, and all ranks' is what they write into the tables
    slot_expert_ptr,
    quota_ptr,
    send_ptr,
    recv_ptr,
    before_ptr,  # this and the next only with HAS_EXCHANGE: int32 [P * (M + R)], sends of the ranks before this one
    total_ptr,  # int32 [E], load of each expert
    P: tl.constexpr,
    E: tl.constexpr,
    R: tl.constexpr,
    DOMAIN: tl.constexpr,
    NUM_VARIANTS: tl.constexpr,
    OWN_SUMS: tl.constexpr,
    HAS_COPY_TIME: tl.constexpr,
    LANES: tl.constexpr,
    P_PAD: tl.constexpr,
    M_PAD: tl.constexpr,
    LOCALS: tl.constexpr,
    PARTS: tl.constexpr,
    S_PAD: tl.constexpr,
    RANK_BITS: tl.constexpr,
    SLOT_BITS: tl.constexpr,
    MASTER_BITS: tl.constexpr,
    HAS_EXCHANGE: tl.constexpr,
    E_PAD: tl.constexpr,
):
    M: tl.constexpr = E // P
    S: tl.constexpr = P * R
    EXCHANGERS: tl.constexpr = P if HAS_EXCHANGE else 0
    SUMMERS: tl.constexpr = 0 if OWN_SUMS else (E + COLUMNS - 1) // COLUMNS
    FINISHERS: tl.constexpr = 2 * PARTS * P
    num_candidates = num_targets * NUM_VARIANTS
    # A 1 that the compiler does not know hides what are neighbours in memory, over which it would lay the lanes.
    one = 1 - (num_targets >> 30)
    load_E_ptr = (workspace_ptr + LOAD).to(tl.pointer_type(tl.int32))
    logs_ptr = workspace_ptr + LOAD + E
    run = tl.zeros([], tl.int64)
    counts_ptr = load_ptr
    if HAS_EXCHANGE:
        run = current_run(control_ptr, channel)
        load_ptr = tl.load(tables_ptr + rank).to(tl.pointer_type(tl.int32)) + (run & 1) * (P * E)
    pid = tl.program_id(0) - EXCHANGERS
    if pid < 0:
        if HAS_EXCHANGE:
            _exchange(
                pid + EXCHANGERS, counts_ptr, workspace_ptr, control_ptr, pads_ptr, tables_ptr, channel, rank, run,
                P, E, E_PAD,
            )  # fmt: skip
    elif pid < SUMMERS:
        if HAS_EXCHANGE:
            _await(workspace_ptr + EXCHANGED, P)
        column = pid * COLUMNS + tl.arange(0, COLUMNS)
        rank_P = tl.arange(0, P_PAD)
        load_PC = tl.load(
            load_ptr + rank_P[:, None] * E + column[None, :],
            mask=(rank_P < P)[:, None] & (column < E)[None, :],
            other=0,
        )
        load_C = tl.sum(load_PC, 0)
        tl.store(load_E_ptr + column, load_C, mask=column < E)
        if HAS_EXCHANGE:
            tl.store(total_ptr + column, load_C, mask=column < E)
        tl.debug_barrier()
        tl.atomic_add(workspace_ptr + SUMMED + 16 * tl.arange(0, SUMMED_COPIES), 1, sem="release")
    elif pid < SUMMERS + num_candidates:
        index = pid - SUMMERS
        number = index // NUM_VARIANTS + 1
        variant = index % NUM_VARIANTS
        sign = tl.load(rules_ptr + variant * 4)
        is_fit = tl.load(rules_ptr + variant * 4 + 1) > 0
        threshold = tl.load(rules_ptr + variant * 4 + 2)
        threshold = tl.where(threshold < 0, min_tokens, threshold)
        fill = tl.load(rules_ptr + variant * 4 + 3)
        step = tl.load(steps_ptr + tl.maximum(number - 2, 0)).to(tl.int64)
        rank_P = tl.arange(0, P_PAD)
        master_M = tl.arange(0, M_PAD)
        expert_PM = rank_P[:, None] * M + (master_M * (one if LANES else 1))[None, :]
        is_expert_PM = (rank_P < P)[:, None] & (master_M < M)[None, :]
        if OWN_SUMS:
            if HAS_EXCHANGE:
                _await(workspace_ptr + EXCHANGED, P)
            home_PM = tl.zeros([P_PAD, M_PAD], tl.int32)
            for source in tl.static_range(P):
                home_PM += tl.load(load_ptr + source * E + expert_PM, mask=is_expert_PM, other=0)
            if index == 0:
                tl.store(load_E_ptr + expert_PM, home_PM, mask=is_expert_PM)
                if HAS_EXCHANGE:
                    tl.store(total_ptr + expert_PM, home_PM, mask=is_expert_PM)
        else:
            _await(workspace_ptr + SUMMED + 16 * (index % SUMMED_COPIES), SUMMERS)
            home_PM = tl.load(load_E_ptr + expert_PM, mask=is_expert_PM, other=0)
        home_MP = tl.trans(home_PM)
        load_P = tl.sum(home_MP, 0)
        total = tl.full([], 0, tl.int32)
        for first in tl.static_range(0, P, DOMAIN):
            total = tl.maximum(total, tl.sum(tl.where((rank_P >= first) & (rank_P < first + DOMAIN), load_P, 0), 0))
        total64 = total.to(tl.int64)
        tolerated64 = total64 * (PPM + tolerance_ppm) // (DOMAIN * PPM)
        tolerated64 = tl.maximum(tolerated64, (total64 + DOMAIN - 1) // DOMAIN)
        top = tl.max(load_P, 0)
        ceiling = tl.maximum(top.to(tl.int64), tolerated64)
        best_ptr = workspace_ptr + BEST
        if index == 0:
            _offer(best_ptr, _key(ceiling, index, index, index))
        is_reached = tolerated64 >= ceiling
        if tolerated64 + copy_tokens < ceiling:
            tolerated = tolerated64.to(tl.int32)
            copy_ptr = best_ptr + 16 * (index % BEST_COPIES)
            log_ptr = logs_ptr + index.to(tl.int64) * S
            CAP: tl.constexpr = (1 << (30 - max(RANK_BITS + SLOT_BITS, MASTER_BITS))) - 1
            if top < CAP:
                is_reached = _run_candidate(
                    best_ptr, copy_ptr, log_ptr, home_MP, load_P, rank_P, master_M, tolerated, ceiling, number,
                    variant, step, sign, is_fit, threshold, fill, min_tokens, copy_tokens, P, M, R, DOMAIN,
                    HAS_COPY_TIME, RANK_BITS, SLOT_BITS, MASTER_BITS, CAP, False,
                )  # fmt: skip
            else:
                is_reached = _run_candidate(
                    best_ptr, copy_ptr, log_ptr, home_MP, load_P, rank_P, master_M, tolerated, ceiling, number,
                    variant, step, sign, is_fit, threshold, fill, min_tokens, copy_tokens, P, M, R, DOMAIN,
                    HAS_COPY_TIME, RANK_BITS, SLOT_BITS, MASTER_BITS, 2**31 - 1, True,
                )  # fmt: skip
        arrived = tl.full([], 1, tl.int64)
        if not HAS_COPY_TIME:  # else the score is not the target alone
            reached = (is_reached.to(tl.int64) << REACHED_BITS) + FIRST
            arrived += tl.where(number == 1, reached, 0)
        tl.debug_barrier()
        tl.atomic_add(workspace_ptr + ARRIVED + 16 * tl.arange(0, ARRIVED_COPIES), arrived, sem="release")
    elif pid < SUMMERS + num_candidates + FINISHERS:
        finisher = pid - SUMMERS - num_candidates
        this = finisher // (2 * PARTS)
        part = finisher % PARTS
        _await_winner(workspace_ptr + ARRIVED + 16 * (finisher % ARRIVED_COPIES), num_candidates, NUM_VARIANTS)
        key = tl.load(workspace_ptr + BEST) ^ KEY_MAX
        # The key is never negative; that the count depends on it keeps the order.
        tl.atomic_add(workspace_ptr + FINISHED, 1, mask=key >= 0, sem="relaxed")
        variant = (key & VARIANT_MASK).to(tl.int32)
        copies = ((key >> VARIANT_BITS) & COPIES_MASK).to(tl.int32)
        number = ((key >> (VARIANT_BITS + COPIES_BITS)) & NUMBER_MASK).to(tl.int32)
        index = tl.maximum(number - 1, 0) * NUM_VARIANTS + variant
        is_send = finisher // PARTS % 2 == 0
        _write(
            tl.where(is_send, this, rank), tl.where(is_send, rank, this), part * LOCALS + tl.arange(0, LOCALS), is_send,
            logs_ptr + index.to(tl.int64) * S, copies, one, load_ptr, load_E_ptr,
            slot_expert_ptr, quota_ptr, send_ptr, recv_ptr, before_ptr, P, E, R, P_PAD, S_PAD, HAS_EXCHANGE,
        )  # fmt: skip
    else:
        arrived_ptr = workspace_ptr + ARRIVED + 16 * tl.arange(0, ARRIVED_COPIES)
        while tl.min(tl.load(arrived_ptr, volatile=True) & FIELD_MASK, 0) < num_candidates:
            pass
        while tl.load(workspace_ptr + FINISHED, volatile=True) < FINISHERS:
            pass
        cell = tl.arange(0, COUNTERS_PAD)
        tl.store(workspace_ptr + 16 * cell, tl.zeros([COUNTERS_PAD], tl.int64), mask=cell < LOAD // 16)
        if HAS_EXCHANGE:
            tl.store(control_ptr + (channel + 1) * WORDS, run)
