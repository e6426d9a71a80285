"""Weights of replicas to their hosts, and their gradients home, between ranks that reach each other's memory.

Persistent kernels with a bounded number of programs, driven by the plan on the device. The order of uses is theirs:

    push   begin: my slots are free, wait for all;   end: my copies are there, wait for all
    pull   begin: my gradients are there, wait for all;   end: I have read yours, wait for all

So when a push has run, this rank's replicas are complete, and when a pull has run, its gradient slots are free.

Shapes: P ranks, M masters and R slots per rank, S = P * R slots.
"""

import triton
import triton.language as tl

from equipoise.kernels.signals_triton import NUMBER_BITS, current_run, end_run, signal_peers, wait_for_peers


@triton.jit
def _expert_address(address, table_ptr, index, expert_bytes, IS_TABLE: tl.constexpr):
    """Of an expert in one stacked tensor, or in tensors of their own."""
    if IS_TABLE:
        return tl.load(table_ptr + index)
    else:
        return address + index * expert_bytes


@triton.jit
def _first_part(pid, num_programs, done):
    """The first tile of this program's when `done` tiles have been dealt out in turn."""
    return (pid - done % num_programs + num_programs) % num_programs


@triton.jit(do_not_specialize=["channel", "rank", "address", "expert_bytes", "num_steps"])
def push_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    slot_expert_ptr,  # int32 [S]
    address,  # of this rank's stacked masters
    table_ptr,  # int64 [M], of masters in tensors of their own
    slots_ptr,  # int64 [P], every rank's slots
    expert_bytes,
    num_steps,  # an expert's words in units of STEP
    STEP: tl.constexpr,
    WORD: tl.constexpr,
    IS_TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    run = current_run(control_ptr, channel)
    if pid == 0:
        signal_peers(pads_ptr, channel, rank, run << NUMBER_BITS, False, P, P_PAD)
    slot_S = tl.arange(0, S_PAD)
    expert_S = tl.load(slot_expert_ptr + slot_S, mask=slot_S < S, other=-1)
    is_mine_S = (expert_S >= rank * M) & (expert_S < rank * M + M)
    place_S = tl.cumsum(is_mine_S.to(tl.int32), 0)
    count = tl.sum(is_mine_S.to(tl.int32), 0)
    num_words = num_steps * STEP  # known to divide by STEP, so that masks do not split vectors
    num_parts = tl.cdiv(num_words, BLOCK)
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    done = pid * 0
    for task in range(0, count):
        this_S = is_mine_S & (place_S == task + 1)
        slot = tl.sum(tl.where(this_S, slot_S, 0), 0)
        local = (tl.sum(tl.where(this_S, expert_S, 0), 0) - rank * M).to(tl.int64)
        source = _expert_address(address, table_ptr, local, expert_bytes, IS_TABLE).to(tl.pointer_type(WORD))
        target = tl.load(slots_ptr + slot // R) + (slot % R).to(tl.int64) * expert_bytes
        target = target.to(tl.pointer_type(WORD))
        if ALIGNED:
            source = tl.multiple_of(source, 16)
            target = tl.multiple_of(target, 16)
        first = _first_part(pid, num_programs, done)
        done += num_parts
        at = first.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        words = tl.load(source + at, mask=at < num_words)
        if task == 0:  # what is read here is no peer's
            wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
        for part in range(first, num_parts, num_programs):  # the next part is on its way while this one leaves
            after = (zero + part + num_programs) * BLOCK + tl.arange(0, BLOCK)
            following = tl.load(source + after, mask=after < num_words)
            at = (zero + part) * BLOCK + tl.arange(0, BLOCK)
            tl.store(target + at, words, mask=at < num_words)
            words = following
    end_run(control_ptr, pads_ptr, channel, rank, run, num_programs, P, P_PAD)


@triton.jit(do_not_specialize=["channel", "rank", "address", "expert_bytes", "num_steps"])
def pull_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    slot_expert_ptr,  # int32 [S]
    address,  # of this rank's stacked masters' gradients
    table_ptr,  # int64 [M]
    slots_ptr,  # int64 [P], every rank's slot gradients, FP32
    expert_bytes,  # of a master's gradient
    num_steps,
    STEP: tl.constexpr,
    DTYPE: tl.constexpr,
    IS_TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds the replicas' gradients to their masters', in FP32, in order of physical id; rounds once."""
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    run = current_run(control_ptr, channel)
    if pid == 0:
        signal_peers(pads_ptr, channel, rank, run << NUMBER_BITS, False, P, P_PAD)
    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
    slot_S = tl.arange(0, S_PAD)
    expert_S = tl.load(slot_expert_ptr + slot_S, mask=slot_S < S, other=-1)
    num_elements = num_steps * STEP
    num_parts = tl.cdiv(num_elements, BLOCK)
    slot_bytes = num_elements.to(tl.int64) * 4
    zero = tl.zeros([], tl.int64)
    done = pid * 0
    for local in range(0, M):
        is_its_S = expert_S == rank * M + local
        count = tl.sum(is_its_S.to(tl.int32), 0)
        if count > 0:
            place_S = tl.cumsum(is_its_S.to(tl.int32), 0)
            slot = tl.sum(tl.where(is_its_S & (place_S == 1), slot_S, 0), 0)
            source = tl.load(slots_ptr + slot // R) + (slot % R).to(tl.int64) * slot_bytes
            source = source.to(tl.pointer_type(tl.float32))
            index = zero + local
            target = _expert_address(address, table_ptr, index, expert_bytes, IS_TABLE).to(tl.pointer_type(DTYPE))
            if ALIGNED:
                source = tl.multiple_of(source, 16)
                target = tl.multiple_of(target, 16)
            first = _first_part(pid, num_programs, done)
            done += num_parts
            at = first.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
            gradient = tl.load(source + at, mask=at < num_elements, other=0.0)
            for part in range(first, num_parts, num_programs):
                after = (zero + part + num_programs) * BLOCK + tl.arange(0, BLOCK)
                following = tl.load(source + after, mask=after < num_elements, other=0.0)
                at = (zero + part) * BLOCK + tl.arange(0, BLOCK)
                total = tl.load(target + at, mask=at < num_elements, other=0.0).to(tl.float32) + gradient
                for number in range(1, count):
                    more = tl.sum(tl.where(is_its_S & (place_S == number + 1), slot_S, 0), 0)
                    other = tl.load(slots_ptr + more // R) + (more % R).to(tl.int64) * slot_bytes
                    other = other.to(tl.pointer_type(tl.float32))
                    if ALIGNED:
                        other = tl.multiple_of(other, 16)
                    total += tl.load(other + at, mask=at < num_elements, other=0.0)
                tl.store(target + at, total.to(DTYPE), mask=at < num_elements)
                gradient = following
    end_run(control_ptr, pads_ptr, channel, rank, run, num_programs, P, P_PAD)
