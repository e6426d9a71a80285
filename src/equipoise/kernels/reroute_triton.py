"""Triton form of the reroute and of `make_permutation`: a stable counting sort of the slots, in two launches.

First launch: how often each block of slots names each expert and, in further programs, the table of instances: physical
experts in the order in which they take an expert's tokens, each with the place on the line of all sorted tokens where
its tokens begin. Second launch: each block adds up the counts of the blocks before it, ranks its own slots by comparing
them with each other, and looks up the instance of the resulting place by bisection. Where the counts are many, a
launch between the two turns them into sums over blocks. Integer arithmetic without atomics.

Comparisons lie with the slots that are ranked along the lanes, so that each thread adds up its own slot's: the sum over
the other axis would cross lanes, which costs more than the comparisons.

Shapes: T tokens, K slots per token, B blocks of slots, E experts (or destinations), P ranks, M masters and R slots per
rank, J = P * (M + R) physical experts.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch
from equipoise.kernels.operators import operator
from equipoise.kernels.peers import padded
from equipoise.kernels.permute import Permutation

BLOCK_SLOTS = 128
MOST_UNSCANNED_COUNTS = 8192
"""Counts (blocks x experts) that every block can add up by itself sooner than a launch of its own would."""


@triton.jit
def _instance_key(p, slot_expert_ptr, rank, J: tl.constexpr, M: tl.constexpr, R: tl.constexpr, E: tl.constexpr):
    """Expert of physical experts `p` (E if none), and a key that sorts by expert, here first, masters before slots."""
    owner = p // (M + R)
    local = p % (M + R)
    is_slot = local >= M
    hosted = tl.load(slot_expert_ptr + owner * R + local - M, mask=is_slot & (p < J), other=-1)
    expert = tl.where(is_slot, tl.where(hosted < 0, E, hosted), owner * M + local)
    expert = tl.where(p < J, expert, E)
    return expert, expert * 4 + (owner != rank).to(tl.int32) * 2 + is_slot.to(tl.int32)


@triton.jit
def _write_instances(
    part,
    slot_expert_ptr,
    send_ptr,
    table_ptr,
    rank,
    J: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Table [3, J], sorted: begin of each instance on the line, its physical id, and what to add to get the row. Behind
    it the start of each expert on the line, then the line's length."""
    p = part * CHUNK + tl.arange(0, CHUNK)
    expert, key = _instance_key(p, slot_expert_ptr, rank, J, M, R, E)
    other = tl.arange(0, BLOCK_J)
    other_expert, other_key = _instance_key(other, slot_expert_ptr, rank, J, M, R, E)
    send = tl.load(send_ptr + other, mask=other < J, other=0)
    is_lower = (other[None, :] < p[:, None]) & (other < J)[None, :]
    is_before = (other_key[None, :] < key[:, None]) | ((other_key[None, :] == key[:, None]) & is_lower)
    is_before = is_before & (other < J)[None, :]
    place = tl.sum(is_before.to(tl.int32), 1)
    begin = tl.sum(tl.where(is_before, send[None, :], 0), 1)
    first_row = tl.sum(tl.where(is_lower, send[None, :], 0), 1)
    start = tl.sum(tl.where(other_expert[None, :] < expert[:, None], send[None, :], 0), 1)
    tl.store(table_ptr + place, begin, mask=p < J)
    tl.store(table_ptr + J + place, p, mask=p < J)
    tl.store(table_ptr + 2 * J + place, first_row - begin, mask=p < J)
    tl.store(table_ptr + 3 * J + expert, start, mask=(p < J) & (p % (M + R) < M))
    if part == 0:
        tl.store(table_ptr + 3 * J + E, tl.sum(send, 0))


@triton.jit(do_not_specialize=["num_slots", "num_blocks", "rank"])
def _count_kernel(
    ids_ptr,
    count_ptr,
    slot_expert_ptr,
    send_ptr,
    table_ptr,
    num_slots,
    num_blocks,
    rank,
    J: tl.constexpr,
    M: tl.constexpr,
    R: tl.constexpr,
    E: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_J: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block = tl.program_id(0)
    if block < num_blocks:
        slot = block * BLOCK + tl.arange(0, BLOCK)
        expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
        is_valid = (expert >= 0) & (expert < E)
        counts = tl.histogram(tl.where(is_valid, expert, 0), BLOCK_E)
        e = tl.arange(0, BLOCK_E)
        counts -= tl.where(e == 0, BLOCK - tl.sum(is_valid.to(tl.int32), 0), 0)
        tl.store(count_ptr + block * BLOCK_E + e, counts)
    elif HAS_PLAN:
        _write_instances(
            block - num_blocks,
            slot_expert_ptr,
            send_ptr,
            table_ptr,
            rank,
            J,
            M,
            R,
            E,
            BLOCK_J,
            CHUNK,
        )


@triton.jit(do_not_specialize=["num_blocks"])
def _scan_kernel(count_ptr, num_blocks, BLOCK_E: tl.constexpr, CHUNK_E: tl.constexpr, ROWS: tl.constexpr):
    """Counts [B, E] become sums over the blocks before, in place; row B gets the totals."""
    e = tl.program_id(0) * CHUNK_E + tl.arange(0, CHUNK_E)
    before = tl.zeros([CHUNK_E], tl.int32)
    for first in range(0, num_blocks, ROWS):
        block = first + tl.arange(0, ROWS)
        pointer = count_ptr + block[:, None].to(tl.int64) * BLOCK_E + e[None, :]
        counts = tl.load(pointer, mask=(block < num_blocks)[:, None], other=0)
        tl.store(pointer, before[None, :] + tl.cumsum(counts, 0) - counts, mask=(block < num_blocks)[:, None])
        before += tl.sum(counts, 0)
    tl.store(count_ptr + num_blocks.to(tl.int64) * BLOCK_E + e, before)


@triton.jit(do_not_specialize=["num_slots", "num_blocks"])
def _place_kernel(
    ids_ptr,
    count_ptr,
    table_ptr,
    physical_ptr,
    slot_ptr,
    row_ptr,
    valid_ptr,
    total_ptr,
    num_slots,
    num_blocks,
    J: tl.constexpr,
    E: tl.constexpr,
    HAS_PLAN: tl.constexpr,
    IS_SCANNED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_E: tl.constexpr,
    LOG4_J: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    block = tl.program_id(0)
    e = tl.arange(0, BLOCK_E)
    expert_start_ptr = table_ptr + 3 * J
    if IS_SCANNED:
        before = tl.load(count_ptr + block.to(tl.int64) * BLOCK_E + e)
        total = tl.load(count_ptr + num_blocks.to(tl.int64) * BLOCK_E + e)
    else:
        before = tl.zeros([BLOCK_E], tl.int32)
        total = tl.zeros([BLOCK_E], tl.int32)
        last = num_blocks
        if HAS_PLAN:  # the plan knows the totals
            last = block
        for first in range(0, last, ROWS):
            other = first + tl.arange(0, ROWS)
            counts = tl.load(count_ptr + other[:, None] * BLOCK_E + e[None, :], mask=(other < last)[:, None], other=0)
            before += tl.sum(tl.where((other < block)[:, None], counts, 0), 0)
            if not HAS_PLAN:
                total += tl.sum(counts, 0)
    if HAS_PLAN:
        num_valid = tl.load(expert_start_ptr + E)
        base = before + tl.load(expert_start_ptr + e, mask=e < E, other=0)
    else:
        num_valid = tl.sum(total, 0)
        base = before + tl.cumsum(total, 0) - total
        if block == 0:
            tl.store(total_ptr + e, total, mask=e < E)

    slot = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(ids_ptr + slot, mask=slot < num_slots, other=-1).to(tl.int32)
    is_valid = (expert >= 0) & (expert < E)
    same = tl.zeros([BLOCK], tl.int32)
    for first in tl.static_range(0, BLOCK, CHUNK):  # slots of this block before each slot, of the same expert
        other = block * BLOCK + first + tl.arange(0, CHUNK)
        other_expert = tl.load(ids_ptr + other, mask=other < num_slots, other=-1).to(tl.int32)
        is_before = (other_expert[:, None] == expert[None, :]) & (other[:, None] < slot[None, :])
        same += tl.sum(is_before.to(tl.int32), 0)
    start = tl.gather(base, tl.where(is_valid, expert, 0), 0)
    invalid = (~is_valid).to(tl.int32)
    unsorted = num_valid + block * BLOCK - tl.sum(before, 0) + tl.cumsum(invalid, 0) - invalid
    place = tl.where(is_valid, start + same, unsorted)

    row = place
    if HAS_PLAN:
        instance = tl.zeros([BLOCK], tl.int32)
        for step in tl.static_range(LOG4_J):  # by quarters: the last instance that begins at or before the place
            passed = tl.zeros([BLOCK], tl.int32)
            quarter = 4 ** (LOG4_J - 1 - step)
            for part in tl.static_range(1, 4):
                candidate = instance + part * quarter
                begin = tl.load(table_ptr + candidate, mask=candidate < J, other=2147483647)
                passed += (begin <= place).to(tl.int32)
            instance += passed * quarter
        shift = tl.load(table_ptr + 2 * J + instance)
        row = tl.where(is_valid, place + shift, place)
        instance_id = tl.load(table_ptr + J + instance)
        instance_id = tl.where(is_valid, instance_id, -1)
        tl.store(physical_ptr + slot, instance_id.to(physical_ptr.dtype.element_ty), mask=slot < num_slots)
    tl.store(row_ptr + slot, row, mask=slot < num_slots)
    tl.store(valid_ptr + slot, is_valid.to(tl.int8), mask=slot < num_slots)
    tl.store(slot_ptr + row, slot, mask=(slot < num_slots) & (row >= 0) & (row < num_slots))


def _launch(
    ids_TK: torch.Tensor,
    num_experts: int,
    plan: tuple[torch.Tensor, torch.Tensor, int, int] | None,
) -> tuple[torch.Tensor, ...]:
    """`plan`: slot_expert, send_J, num_ranks, rank. Returns physical_TK (empty without one) and the permutation, whose
    counts are unset with a plan: they are its sends."""
    ids_TK = ids_TK.contiguous()
    num_slots = ids_TK.numel()
    device = ids_TK.device
    slot_R = torch.empty(num_slots, dtype=torch.int32, device=device)
    row_TK = torch.empty(ids_TK.shape, dtype=torch.int32, device=device)
    valid_TK = torch.empty(ids_TK.shape, dtype=torch.bool, device=device)
    physical_TK = torch.empty_like(ids_TK) if plan is not None else ids_TK.new_empty(0)
    num_blocks = max(-(-num_slots // BLOCK_SLOTS), 1)
    block_e = max(padded(num_experts), 16)
    scratch = torch.empty((num_blocks + 1) * block_e, dtype=torch.int32, device=device)
    total = table = scratch  # the first is unused with a plan, the second without
    J, M, R, rank, parts, chunk = 1, 1, 0, 0, 0, 8
    slot_expert, send_J = scratch, scratch
    if plan is not None:
        slot_expert, send_J, num_ranks, rank = plan
        slot_expert, send_J = slot_expert.contiguous(), send_J.contiguous()
        J, M, R = send_J.numel(), num_experts // num_ranks, slot_expert.numel() // num_ranks
        table = torch.empty(3 * J + num_experts + 1, dtype=torch.int32, device=device)
        parts = -(-J // chunk)
    else:
        total = torch.empty(num_experts, dtype=torch.int32, device=device)
    block_j = max(padded(J), 16)
    has_plan, is_scanned = plan is not None, num_blocks * block_e > MOST_UNSCANNED_COUNTS
    arguments: tuple[Any, ...] = (
        ids_TK,
        scratch,
        slot_expert,
        send_J,
        table,
        num_slots,
        num_blocks,
        rank,
        J,
        M,
        R,
        num_experts,
        has_plan,
        BLOCK_SLOTS,
        block_e,
        block_j,
        chunk,
    )
    launch(_count_kernel, num_blocks + parts, arguments, 4)
    if is_scanned:
        launch(_scan_kernel, block_e // 4, (scratch, num_blocks, block_e, 4, 512), 4)
    arguments = (
        ids_TK,
        scratch,
        table,
        physical_TK,
        slot_R,
        row_TK,
        valid_TK.view(torch.int8),
        total,
        num_slots,
        num_blocks,
        J,
        num_experts,
        has_plan,
        is_scanned,
        BLOCK_SLOTS,
        block_e,
        (J.bit_length() + 1) // 2,
        max(1, 8192 // block_e),
        32,
    )
    launch(_place_kernel, num_blocks, arguments, 4)
    return physical_TK, slot_R, row_TK, valid_TK, total


def _fake_order(ids_TK: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return (
        ids_TK.new_empty(ids_TK.numel(), dtype=torch.int32),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.int32),
        ids_TK.new_empty(ids_TK.shape, dtype=torch.bool),
    )


@operator("sort_slots")
def sort_slots(
    ids_TK: torch.Tensor, num_destinations: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors of a `Permutation`, in its order, int32 and bool."""
    _, slot_R, row_TK, valid_TK, counts = _launch(ids_TK, num_destinations, None)
    return slot_R, row_TK, valid_TK, counts


@torch.library.register_fake("equipoise::sort_slots")
def _(ids_TK, num_destinations):
    return (*_fake_order(ids_TK), ids_TK.new_empty(num_destinations, dtype=torch.int32))


@operator("reroute")
def reroute_slots(
    ids_TK: torch.Tensor, slot_expert: torch.Tensor, send_J: torch.Tensor, num_experts: int, num_ranks: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Physical ids, then the tensors of their `Permutation` but for the counts, which are `send_J`."""
    physical_TK, slot_R, row_TK, valid_TK, _ = _launch(ids_TK, num_experts, (slot_expert, send_J, num_ranks, rank))
    return physical_TK, slot_R, row_TK, valid_TK


@torch.library.register_fake("equipoise::reroute")
def _(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank):
    return (ids_TK.new_empty(ids_TK.shape), *_fake_order(ids_TK))


def triton_permutation(ids_TK: torch.Tensor, num_destinations: int) -> Permutation:
    """See `make_permutation`; int32."""
    return Permutation(*sort_slots(ids_TK, num_destinations))


def triton_reroute(
    ids_TK: torch.Tensor, slot_expert: torch.Tensor, send_J: torch.Tensor, num_experts: int, num_ranks: int, rank: int
) -> tuple[torch.Tensor, Permutation]:
    """See `reroute_permutation`."""
    physical_TK, slot_R, row_TK, valid_TK = reroute_slots(ids_TK, slot_expert, send_J, num_experts, num_ranks, rank)
    return physical_TK, Permutation(slot_R, row_TK, valid_TK, send_J)
