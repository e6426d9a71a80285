"""Launches of the kernels that work in memory which the ranks of a group share: signals, transfers of experts.

`kernels/rows.py` has those for rows of tokens.

Each has a channel of its own and is called by all ranks in the same order, on streams whose order is the same
everywhere. None waits on the host; those that wait on the device do so within the limit of the control words.

Shapes: P ranks, M masters and R slots per rank.
"""

import math
import time
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from equipoise.kernels.launching import launch as run_kernel
from equipoise.kernels.streams import synchronize

CHANNELS = 256
"""Operations that can have a channel of their own."""
CONTROL_WORDS = 32
"""int64 words of each channel's counters, and of the words before them."""
LIMIT, STATUS = 0, 1
"""Where the control words hold the spins that a wait may take, and the address of the status."""
FAILED, MISSING, RUN, NEEDED_ROWS, ROW_CAPACITY, HAS_LEFT = 0, 1, 2, 3, 4, 5
"""Where the status (int64, memory of the host) says which channel (plus one) waited in vain, for which rank, at which
of its runs, and whether that rank has abandoned the group; and how many rows a rank would have had to receive, where
buffers hold fewer."""

DESCRIBED_BLOCK = 4096
"""Elements of a block that a descriptor loads: experts that are not made of whole ones are loaded by pointers."""
LEAST_SHARE = 5
"""A transfer takes one of so many of a device's multiprocessors at most, unless the caller says how many."""


def padded(count: int) -> int:
    """The next power of 2, at least 2."""
    return max(1 << max(count - 1, 0).bit_length(), 2)


class Signals(NamedTuple):
    """How the ranks of a group take turns; see `kernels/signals_triton.py`.

    control: int64 on the device, CONTROL_WORDS for the group and as many for each channel. pads_P: int64, the address
    of every rank's pad, int64 [2 * CHANNELS + 1, P]. rank, num_ranks: this one's, and P.
    """

    control: torch.Tensor
    pads_P: torch.Tensor
    rank: int
    num_ranks: int


def time_spins(signals: Signals, channel: int) -> tuple[int, float]:
    """Spins that the limit allows and the seconds that they take, by waiting in vain on a channel that nobody uses.

    For setup: waits for the device. The caller has set a limit, and clears the status afterwards.
    """
    from equipoise.kernels.signals_triton import wait_kernel

    device = signals.control.device
    spins = int(signals.control[LIMIT])
    started = time.perf_counter()
    wait_kernel[(1,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        signals.num_ranks,
        padded(signals.num_ranks),
        num_warps=1,
    )
    synchronize(device)
    return spins, time.perf_counter() - started


def abandon(signals: Signals) -> None:
    """Tells all ranks that this one takes part in nothing any more."""
    from equipoise.kernels.signals_triton import abandon_kernel

    abandon_kernel[(signals.num_ranks,)](signals.pads_P, signals.rank, P=signals.num_ranks, num_warps=1)


class Words(NamedTuple):
    """How memory is copied: `dtype` of a word as Triton's name, its bytes, and whether addresses divide by 16."""

    dtype: str
    num_bytes: int
    aligned: bool


def words_of(num_bytes: int, *addresses: int) -> Words:
    """The largest words that pieces of `num_bytes` at these addresses, one after the other, are made of."""
    common = num_bytes
    for address in addresses:
        common |= address
    for size, name in ((8, "int64"), (4, "int32"), (2, "int16")):
        if common % size == 0:
            return Words(name, size, common % 16 == 0)
    return Words("int8", 1, False)


def _expert_addresses(tensors: list[torch.Tensor], stacked: bool) -> tuple[int, int, torch.Tensor | None]:
    """Address of the first expert, bytes of one, and a table of addresses unless they are one after the other."""
    first = tensors[0]
    if stacked:
        return first.data_ptr(), first[0].numel() * first.element_size(), None
    num_bytes = first.numel() * first.element_size()
    addresses = [tensor.data_ptr() for tensor in tensors]
    if addresses == list(range(first.data_ptr(), first.data_ptr() + num_bytes * len(tensors), num_bytes)):
        return first.data_ptr(), num_bytes, None
    table = torch.tensor(addresses, dtype=torch.int64)
    if first.device.type != "cpu":
        table = table.pin_memory().to(first.device, non_blocking=True)
    return first.data_ptr(), num_bytes, table


def _steps(count: int) -> tuple[int, int]:
    """A count as a multiple of the largest power of 2 up to 16."""
    step = math.gcd(count, 16)
    return count // step, step


def push_weights(
    signals: Signals,
    channel: int,
    slot_expert: torch.Tensor,
    masters: list[torch.Tensor],
    stacked: bool,
    slots_P: torch.Tensor,
    num_masters: int,
    programs: int = 0,
    slots: range | None = None,
) -> None:
    """Copies masters of this rank into the slots that host them, everywhere. When it has run, this rank's slots are
    complete.

    Args:
        slot_expert: int32 [P * R], the plan's, on the device.
        masters: one tensor [M, ...] (`stacked`) or M tensors, each expert's elements in order.
        slots_P: addresses of every rank's slots [R, ...], of the masters' dtype.
        programs: multiprocessors that this takes at most; 0: few that still move about what the links carry.
        slots: only these of each rank.
    """
    experts = _Experts.of(masters, stacked)
    words = experts.words
    moves = _Moves.of(masters[0].device, experts, words.num_bytes, is_pull=False, programs=programs)
    if moves.described:
        words = Words("int32", 4, True)
    dtype, num_bytes = words.dtype, words.num_bytes
    _transfer(signals, channel, slot_expert, experts, slots_P, num_masters, dtype, num_bytes, False, moves, slots)


def pull_gradients(
    signals: Signals,
    channel: int,
    slot_expert: torch.Tensor,
    gradients: list[torch.Tensor],
    stacked: bool,
    slots_P: torch.Tensor,
    num_masters: int,
    programs: int = 0,
) -> None:
    """Adds the FP32 gradients of replicas to those of this rank's masters, in place, in order of physical id. When it
    has run, this rank's gradient slots may be written again.

    `gradients`: FP32, BF16 or FP16, laid out as `masters` of `push_weights`; `slots_P`: addresses of FP32 [R, ...];
    `programs`: as there.
    """
    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    experts, dtype = _Experts.of(gradients, stacked), gradients[0].dtype
    moves = _Moves.of(gradients[0].device, experts, dtype.itemsize, is_pull=True, programs=programs)
    _transfer(signals, channel, slot_expert, experts, slots_P, num_masters, names[dtype], dtype.itemsize, True, moves)


class _Experts(NamedTuple):
    """Where a rank's experts are: the first one's address, bytes of one, a table of addresses unless they lie one after
    the other, and the words that they are made of."""

    address: int
    num_bytes: int
    table: torch.Tensor | None
    words: Words

    @staticmethod
    def of(tensors: list[torch.Tensor], stacked: bool) -> "_Experts":
        address, num_bytes, table = _expert_addresses(tensors, stacked)
        return _Experts(address, num_bytes, table, words_of(num_bytes, *(tensor.data_ptr() for tensor in tensors)))


class _Moves(NamedTuple):
    """How a transfer moves memory: programs, elements at a time, warps, blocks on their way at a time, and whether
    descriptors load them: these take no registers for what is on its way, so fewer programs do."""

    programs: int
    block: int
    warps: int
    stages: int
    described: bool

    @staticmethod
    def of(device: torch.device, experts: _Experts, item_bytes: int, is_pull: bool, programs: int) -> "_Moves":
        """`item_bytes`: of a gradient's elements, or of the words of a weight."""
        from equipoise.kernels.grouped_launch_triton import has_descriptors, num_multiprocessors

        moved_bytes = item_bytes if is_pull else 4  # of an element, at the masters'
        is_whole = lambda block: experts.words.aligned and experts.num_bytes % (block * moved_bytes) == 0  # noqa: E731
        if device.type == "cpu":  # programs run one after another
            return _Moves(programs or 2, 1024, 4, 1, is_whole(1024) and has_descriptors(device))
        most = max(num_multiprocessors(device) // LEAST_SHARE, 1)
        is_nvidia = device.type == "cuda" and torch.version.hip is None
        stages = 0
        if is_nvidia and is_whole(DESCRIBED_BLOCK) and has_descriptors(device):
            spare = _shared_memory(device) - 8192
            stages = min(spare // (DESCRIBED_BLOCK * (4 + is_pull * item_bytes)), 8)
        if stages >= 4:
            return _Moves(programs or min(12 if is_pull else 16, most), DESCRIBED_BLOCK, 4, stages, True)
        return _Moves(programs or min(24 if is_pull else 16, most), 2048, 8, 4 if is_nvidia else 2, False)


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program may have at most."""
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


def _transfer(
    signals: Signals,
    channel: int,
    slot_expert: torch.Tensor,
    experts: _Experts,
    slots_P: torch.Tensor,
    num_masters: int,
    dtype: str,
    item_bytes: int,
    is_pull: bool,
    moves: _Moves,
    slots: range | None = None,
) -> None:
    """`dtype`, `item_bytes`: of a master's elements, or of the words that are copied."""
    import triton.language as tl

    from equipoise.kernels.transfer_triton import transfer_kernel

    S = slot_expert.numel()
    slots = range(S // signals.num_ranks) if slots is None else slots  # an empty one is no slot
    num_steps, step = _steps(experts.num_bytes // item_bytes)
    arguments = (
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        slot_expert,
        experts.address,
        slots_P if experts.table is None else experts.table,
        slots_P,
        experts.num_bytes,
        num_steps,
        slots.start,
        slots.stop,
        _anywhere(signals.control, moves.block, torch.float32 if is_pull else torch.int32) if moves.described else None,
        _anywhere(signals.control, moves.block, getattr(torch, dtype)) if moves.described and is_pull else None,
    )
    run_kernel(
        transfer_kernel,
        moves.programs,
        arguments,
        moves.warps,
        STEP=step,
        IS_PULL=is_pull,
        DTYPE=getattr(tl, dtype),
        SLOT_DTYPE=tl.float32 if is_pull else getattr(tl, dtype),
        SLOT_ITEM_BYTES=4 if is_pull else item_bytes,
        IS_TABLE=experts.table is not None,
        ALIGNED=experts.words.aligned,
        M=num_masters,
        R=S // signals.num_ranks,
        S=S,
        S_PAD=padded(S),
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=moves.block,
        STAGES=moves.stages,
        DESC=moves.described,
    )


@lru_cache(maxsize=16)
def _anywhere(control: torch.Tensor, block: int, dtype: torch.dtype) -> Any:
    """A descriptor of all memory: see `load_anywhere`."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    from equipoise.kernels.transfer_triton import COLUMNS

    rows, columns, size = block // COLUMNS.value, COLUMNS.value, dtype.itemsize
    shape, strides = [1 << 30, 1 << 30, rows, columns], [(1 << 34) // size, 16 // size, columns, 1]
    return TensorDescriptor(control.view(dtype), shape, strides, [1, 1, rows, columns])
