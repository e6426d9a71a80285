"""Weights of replicas to their hosts, and their gradients home, between ranks that reach each other's memory.

One persistent kernel with a bounded number of programs, driven by the plan on the device. The order of uses is its own:

    push   begin: my slots are free, wait for all;   end: my copies are there, wait for all
    pull   begin: my gradients are there, wait for all;   end: I have read yours, wait for all

So when a push has run, this rank's replicas are complete, and when a pull has run, its gradient slots are free.

Shapes: P ranks, M masters and R slots per rank, S = P * R slots.
"""

import triton
import triton.language as tl

from equipoise.kernels.signals_triton import NUMBER_BITS, current_run, end_run, signal_peers, wait_for_peers
from equipoise.kernels.triton_support import is_interpreted

COLUMNS = tl.constexpr(64)
"""Elements of a row of a block: whole lines of 128 bytes."""


@triton.jit
def _master(address, table_ptr, index, expert_bytes, IS_TABLE: tl.constexpr, DTYPE: tl.constexpr):
    """An expert in one stacked tensor, or in tensors of their own."""
    if IS_TABLE:
        return tl.load(table_ptr + index).to(tl.pointer_type(DTYPE))
    else:
        return (address + index * expert_bytes).to(tl.pointer_type(DTYPE))


@triton.jit
def _slot(slots_ptr, slot_S, this_S, slot_bytes, R: tl.constexpr, ALIGNED: tl.constexpr, DTYPE: tl.constexpr):
    """The one slot of all ranks that `this_S` marks."""
    slot = tl.sum(tl.where(this_S, slot_S, 0), 0)
    pointer = (tl.load(slots_ptr + slot // R) + (slot % R).to(tl.int64) * slot_bytes).to(tl.pointer_type(DTYPE))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


if is_interpreted():

    def see_in_descriptors() -> None:
        """Nothing: there is one way to memory."""

else:

    @triton.jit
    def see_in_descriptors():
        """What this program sees by plain reads, descriptors' loads that follow see too."""
        word = tl.inline_asm_elementwise(
            "fence.proxy.async; mov.u32 $0, $1;", "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        return word


@triton.jit
def load_anywhere(anywhere, base, pointer, ROWS: tl.constexpr):
    """[ROWS, COLUMNS] at an address that 16 divides. The descriptor's two first strides are 2^34 and 16 bytes, so that
    2^30 of each reach every address from any base, modulo 2^64."""
    offset = pointer.to(tl.int64) - base
    high, low = (offset >> 34) & 0x3FFFFFFF, (offset >> 4) & 0x3FFFFFFF
    return anywhere.load([high.to(tl.int32), low.to(tl.int32), 0, 0]).reshape(ROWS, COLUMNS)


@triton.jit(do_not_specialize=["channel", "rank", "address", "expert_bytes", "num_steps", "first_slot", "end_slot"])
def transfer_kernel(
    control_ptr,
    pads_ptr,
    channel,
    rank,
    slot_expert_ptr,  # int32 [S]
    address,  # of this rank's stacked masters, or their gradients
    table_ptr,  # int64 [M], of those in tensors of their own
    slots_ptr,  # int64 [P], every rank's slots, or their gradients
    expert_bytes,  # of a master
    num_steps,  # an expert's elements in units of STEP
    first_slot,  # of each rank's slots, those from here on
    end_slot,  # and before this one
    sources,  # a descriptor of all memory from the control words on, [.., .., ROWS, COLUMNS] of what is moved
    gradients,  # the same of the masters' gradients
    STEP: tl.constexpr,
    IS_PULL: tl.constexpr,
    DTYPE: tl.constexpr,  # of a master's elements; a push copies words
    SLOT_DTYPE: tl.constexpr,
    SLOT_ITEM_BYTES: tl.constexpr,
    IS_TABLE: tl.constexpr,
    ALIGNED: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    S: tl.constexpr,
    S_PAD: tl.constexpr,
    P: tl.constexpr,
    P_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    DESC: tl.constexpr,  # an expert is a number of whole blocks then
):
    """Push: masters to slots, one slot after the other. Pull: to each master's gradient those of its replicas, in FP32,
    in order of physical id; rounded once."""
    pid = tl.program_id(0)
    num_programs = tl.num_programs(0)
    run = current_run(control_ptr, channel)
    if pid == 0:
        signal_peers(pads_ptr, channel, rank, run << NUMBER_BITS, False, P, P_PAD)
    slot_S = tl.arange(0, S_PAD)
    is_meant_S = (slot_S < S) & (slot_S % R >= first_slot) & (slot_S % R < end_slot)
    expert_S = tl.load(slot_expert_ptr + slot_S, mask=is_meant_S, other=-1)
    is_mine_S = (expert_S >= rank * M) & (expert_S < rank * M + M)
    if IS_PULL:  # noqa: SIM102 - known when it is compiled
        if tl.sum(is_mine_S.to(tl.int32), 0) > 0:  # who pulls nothing leaves its multiprocessors to others
            wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
            if DESC:
                see_in_descriptors()
    number_S = tl.cumsum(is_mine_S.to(tl.int32), 0)
    num_elements = num_steps * STEP  # known to divide by STEP, so that masks do not split vectors
    slot_bytes = num_elements.to(tl.int64) * SLOT_ITEM_BYTES
    num_blocks = tl.cdiv(num_elements, BLOCK)
    base = control_ptr.to(tl.int64)
    ROWS: tl.constexpr = BLOCK // COLUMNS
    in_block_RC = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    zero = tl.zeros([], tl.int64)  # makes tensors of loop variables, which the interpreter has as integers
    dealt = pid * 0  # blocks so far, which programs get in turn
    num_tasks = M if IS_PULL else tl.sum(is_mine_S.to(tl.int32), 0)
    for task in range(0, num_tasks):
        if IS_PULL:
            local = zero + task
            is_its_S = expert_S == rank * M + task
        else:
            is_its_S = is_mine_S & (number_S == task + 1)
            local = (tl.sum(tl.where(is_its_S, expert_S, 0), 0) - rank * M).to(tl.int64)
        number_of_its_S = tl.cumsum(is_its_S.to(tl.int32), 0)
        count = tl.sum(is_its_S.to(tl.int32), 0)
        if count > 0:
            first_S = is_its_S & (number_of_its_S == 1)
            slot = _slot(slots_ptr, slot_S, first_S, slot_bytes, R, ALIGNED, SLOT_DTYPE)
            master = _master(address, table_ptr, local, expert_bytes, IS_TABLE, DTYPE)
            if ALIGNED:
                master = tl.multiple_of(master, 16)
            begin = (pid - dealt % num_programs + num_programs) % num_programs
            dealt += num_blocks
            if not IS_PULL:  # noqa: SIM102 - known when it is compiled
                if task == 0:
                    wait_for_peers(control_ptr, pads_ptr, channel, rank, run, False, P, P_PAD)
            if count == 1 or not IS_PULL:
                source, target = (slot, master) if IS_PULL else (master, slot)
                for block in tl.range(begin, num_blocks, num_programs, num_stages=STAGES):
                    at_RC = (zero + block) * BLOCK + in_block_RC
                    if DESC:
                        moved_RC = load_anywhere(sources, base, source + (zero + block) * BLOCK, ROWS)
                        if IS_PULL:
                            moved_RC += load_anywhere(gradients, base, target + (zero + block) * BLOCK, ROWS).to(
                                tl.float32
                            )
                        tl.store(target + at_RC, moved_RC.to(DTYPE))
                    else:
                        moved_RC = tl.load(source + at_RC, mask=at_RC < num_elements)
                        if IS_PULL:
                            moved_RC += tl.load(target + at_RC, mask=at_RC < num_elements).to(tl.float32)
                        tl.store(target + at_RC, moved_RC.to(DTYPE), mask=at_RC < num_elements)
            else:
                for block in range(begin, num_blocks, num_programs):
                    at_RC = (zero + block) * BLOCK + in_block_RC
                    total_RC = tl.load(master + at_RC, mask=at_RC < num_elements).to(tl.float32)
                    for number in range(0, count):
                        its_S = is_its_S & (number_of_its_S == number + 1)
                        its_slot = _slot(slots_ptr, slot_S, its_S, slot_bytes, R, ALIGNED, SLOT_DTYPE)
                        total_RC += tl.load(its_slot + at_RC, mask=at_RC < num_elements)
                    tl.store(master + at_RC, total_RC.to(DTYPE), mask=at_RC < num_elements)
    end_run(control_ptr, pads_ptr, channel, rank, run, num_programs, P, P_PAD)
