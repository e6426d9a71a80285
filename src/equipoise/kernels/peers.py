"""Launches of the kernels that work in memory which the ranks of a group share: transfers of experts, rows of tokens.

Each has a channel of its own and is called by all ranks in the same order, on streams whose order is the same
everywhere. None waits on the host; those that wait on the device do so within the limit of the control words.

Shapes: P ranks, M masters and R slots per rank, L local physical experts, J = P * L, T tokens, K slots per token,
D features.
"""

import math
import time
from typing import NamedTuple

import torch

from equipoise.kernels.streams import synchronize

CHANNELS = 256
"""Operations that can have a channel of their own."""
CONTROL_WORDS = 32
"""int64 words of each channel's counters, and of the words before them."""
LIMIT, STATUS = 0, 1
"""Where the control words hold the spins that a wait may take, and the address of the status."""
FAILED, MISSING, RUN, NEEDED_ROWS, ROW_CAPACITY = 0, 1, 2, 3, 4
"""Where the status (int64, memory of the host) says which channel (plus one) waited in vain, for which rank, at which
of its runs; and how many rows a rank would have had to receive, where buffers hold fewer."""

PUSH_PROGRAMS, PULL_PROGRAMS = 32, 32
"""Multiprocessors that a transfer beside other work takes at most."""


def padded(count: int) -> int:
    """The next power of 2, at least 2."""
    return max(1 << max(count - 1, 0).bit_length(), 2)


class Signals(NamedTuple):
    """How the ranks of a group take turns; see `kernels/signals_triton.py`.

    control: int64 on the device, CONTROL_WORDS for the group and as many for each channel. pads_P: int64, the address
    of every rank's pad, int64 [CHANNELS, 2, P]. rank, num_ranks: this one's, and P.
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
    programs: int = PUSH_PROGRAMS,
    block: int = 4096,
    warps: int = 8,
) -> None:
    """Copies masters of this rank into the slots that host them, everywhere. When it has run, this rank's slots are
    complete.

    Args:
        slot_expert: int32 [P * R], the plan's, on the device.
        masters: one tensor [M, ...] (`stacked`) or M tensors, each expert's elements in order.
        slots_P: addresses of every rank's slots [R, ...], of the masters' dtype.
    """
    import triton.language as tl

    from equipoise.kernels.transfer_triton import push_kernel

    address, expert_bytes, table = _expert_addresses(masters, stacked)
    words = words_of(expert_bytes, *(tensor.data_ptr() for tensor in masters))
    S = slot_expert.numel()
    push_kernel[(programs,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        slot_expert,
        address,
        slots_P if table is None else table,
        slots_P,
        expert_bytes,
        *_steps(expert_bytes // words.num_bytes),
        WORD=getattr(tl, words.dtype),
        IS_TABLE=table is not None,
        ALIGNED=words.aligned,
        M=num_masters,
        R=S // signals.num_ranks,
        S=S,
        S_PAD=padded(S),
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=block,
        num_warps=warps,
    )


def pull_gradients(
    signals: Signals,
    channel: int,
    slot_expert: torch.Tensor,
    gradients: list[torch.Tensor],
    stacked: bool,
    slots_P: torch.Tensor,
    num_masters: int,
    programs: int = PULL_PROGRAMS,
    block: int = 8192,
    warps: int = 16,
) -> None:
    """Adds the FP32 gradients of replicas to those of this rank's masters, in place, in order of physical id. When it
    has run, this rank's gradient slots may be written again.

    `gradients`: FP32, BF16 or FP16, laid out as `masters` of `push_weights`; `slots_P`: addresses of FP32 [R, ...].
    """
    import triton.language as tl

    from equipoise.kernels.transfer_triton import pull_kernel

    names = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
    address, expert_bytes, table = _expert_addresses(gradients, stacked)
    words = words_of(expert_bytes, *(tensor.data_ptr() for tensor in gradients))
    S = slot_expert.numel()
    pull_kernel[(programs,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        slot_expert,
        address,
        slots_P if table is None else table,
        slots_P,
        expert_bytes,
        *_steps(expert_bytes // gradients[0].element_size()),
        DTYPE=getattr(tl, names[gradients[0].dtype]),
        IS_TABLE=table is not None,
        ALIGNED=words.aligned,
        M=num_masters,
        R=S // signals.num_ranks,
        S=S,
        S_PAD=padded(S),
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=block,
        num_warps=warps,
    )


class RowLayout(NamedTuple):
    """Where this rank's rows go and how many come.

    target_TK: int64, rank << 32 | place there, -1 for none. origin_TK: int32, the place of an earlier slot of the token
    at the same rank, else -1. counts_L: int64, rows of each local expert here. total: int32 [1], their sum.
    """

    target_TK: torch.Tensor
    origin_TK: torch.Tensor
    counts_L: torch.Tensor
    total: torch.Tensor


MAX_PLACES, MAX_RANKS = 2**28, 256
"""What the records of rows can name."""


def exchange_counts(
    signals: Signals, channel: int, tables_P: torch.Tensor, counts_J: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of all ranks for each physical expert, and of the ranks before this one: both int32 [J].

    `tables_P`: addresses of every rank's int32 [2, P, J].
    """
    from equipoise.kernels.rows_triton import exchange_counts_kernel

    J = counts_J.numel()
    quota_J = torch.empty(J, dtype=torch.int32, device=counts_J.device)
    before_J = torch.empty_like(quota_J)
    exchange_counts_kernel[(1,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        tables_P,
        counts_J,
        quota_J,
        before_J,
        J,
        padded(J),
        signals.num_ranks,
        padded(signals.num_ranks),
        num_warps=4,
    )
    return quota_J, before_J


def make_layout(
    signals: Signals,
    ids_TK: torch.Tensor,
    row_TK: torch.Tensor,
    send_J: torch.Tensor,
    quota_J: torch.Tensor,
    before_J: torch.Tensor,
    capacity: int,
) -> RowLayout:
    """One small launch. `ids_TK`: physical ids; `row_TK`: places among this rank's rows sorted by them; `send_J`: this
    rank's rows for each physical expert; any integers. The others are int32. `capacity`: rows that a rank can hold."""
    from equipoise.kernels.rows_triton import address_rows_kernel

    J = send_J.numel()
    L = J // signals.num_ranks
    T, K = ids_TK.shape
    device = send_J.device
    target_TK = torch.empty(T, K, dtype=torch.int64, device=device)
    origin_TK = torch.empty(T, K, dtype=torch.int32, device=device)
    counts_L = torch.empty(L, dtype=torch.int64, device=device)
    total = torch.empty(1, dtype=torch.int32, device=device)
    block = 128 if device.type != "cpu" else 16
    address_rows_kernel[(max(-(-T // block), 1),)](
        signals.control,
        send_J,
        quota_J,
        before_J,
        ids_TK,
        row_TK,
        target_TK,
        origin_TK,
        counts_L,
        total,
        signals.rank,
        capacity,
        T,
        J,
        L,
        K,
        padded(J),
        padded(L),
        block,
        num_warps=4,
    )
    return RowLayout(target_TK, origin_TK, counts_L, total)


class Pieces(NamedTuple):
    """Memory that is lent piece by piece: every rank's address, bytes of a piece, and the one that peers write to."""

    addresses_P: torch.Tensor
    piece_bytes: int
    number: int


def _row_words(rows: torch.Tensor) -> tuple[Words, int]:
    num_bytes = rows.shape[1] * rows.element_size()
    words = words_of(num_bytes, rows.data_ptr())
    return words, num_bytes // words.num_bytes


def _block(width: int, most: int) -> int:
    return min(max(1 << max(width - 1, 0).bit_length(), 16), most)


class RowLaunch(NamedTuple):
    """Grid and warps of the row kernels."""

    programs: int
    warps: int


def row_launch(device: torch.device) -> RowLaunch:
    """Programs that fill the device, or two where they run one after another."""
    if device.type == "cpu":
        return RowLaunch(2, 1)
    return RowLaunch(4 * torch.cuda.get_device_properties(device).multi_processor_count, 4)


def send_rows(
    signals: Signals,
    channel: int,
    x_TD: torch.Tensor,
    layout: RowLayout,
    pieces: Pieces,
    rows_RD: torch.Tensor,
    record_R: torch.Tensor,
    launch: RowLaunch | None = None,
) -> None:
    """Each token to the places of its slots with an id. `rows_RD` and `record_R` (int64) are this rank's piece, its
    records at the same offset on every rank."""
    import triton.language as tl

    from equipoise.kernels.rows_triton import send_rows_kernel, spread_rows_kernel

    words, W = _row_words(x_TD)
    T, K = layout.target_TK.shape
    launch = launch or row_launch(x_TD.device)
    send_rows_kernel[(launch.programs,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        pieces.number,
        pieces.addresses_P,
        pieces.piece_bytes,
        x_TD.view(_WORDS[words.num_bytes]),
        layout.target_TK,
        layout.origin_TK,
        T,
        record_R.data_ptr() - rows_RD.data_ptr(),
        K=K,
        W=W,
        WORD=getattr(tl, words.dtype),
        WORD_BYTES=words.num_bytes,
        ALIGNED=words.aligned,
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=_block(W, 2048),
        num_warps=launch.warps,
    )
    if K > 1:
        rows = rows_RD.view(_WORDS[words.num_bytes])
        spread_rows_kernel[(launch.programs,)](
            rows, record_R, layout.total, W=W, BLOCK=_block(W, 2048), num_warps=launch.warps
        )


_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def return_rows(
    signals: Signals,
    channel: int,
    rows_RD: torch.Tensor,
    record_R: torch.Tensor,
    total: torch.Tensor,
    pieces: Pieces,
    num_slots: int,
    launch: RowLaunch | None = None,
) -> None:
    """Each of the first `total` rows to its slot at its source. `num_slots`: rows that a piece holds."""
    import triton.language as tl

    from equipoise.kernels.rows_triton import return_rows_kernel

    words, W = _row_words(rows_RD)
    launch = launch or row_launch(rows_RD.device)
    return_rows_kernel[(launch.programs,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        pieces.number,
        pieces.addresses_P,
        pieces.piece_bytes,
        rows_RD.view(_WORDS[words.num_bytes]),
        record_R,
        total,
        num_slots,
        W=W,
        WORD=getattr(tl, words.dtype),
        WORD_BYTES=words.num_bytes,
        ALIGNED=words.aligned,
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=_block(W, 2048),
        num_warps=launch.warps,
    )


def send_gradients(
    signals: Signals,
    channel: int,
    grad_TD: torch.Tensor,
    rows_SD: torch.Tensor,
    weights_TK: torch.Tensor,
    layout: RowLayout,
    pieces: Pieces,
    want_weights: bool,
    launch: RowLaunch | None = None,
) -> torch.Tensor | None:
    """Weight times gradient of each slot to its row's place; returns the weights' gradients, if wanted.

    `rows_SD`: [T * K, D], the rows that were summed.
    """
    from equipoise.kernels.rows_triton import send_gradients_kernel

    T, K = weights_TK.shape
    D = grad_TD.shape[1]
    words, _ = _row_words(grad_TD)
    grad_weights = torch.empty_like(weights_TK) if want_weights else None
    launch = launch or row_launch(grad_TD.device)
    send_gradients_kernel[(launch.programs,)](
        signals.control,
        signals.pads_P,
        channel,
        signals.rank,
        pieces.number,
        pieces.addresses_P,
        pieces.piece_bytes,
        grad_TD,
        rows_SD,
        weights_TK,
        weights_TK if grad_weights is None else grad_weights,
        layout.target_TK,
        T,
        K=K,
        D=D,
        ITEM_BYTES=grad_TD.element_size(),
        ALIGNED=words.aligned,
        WANT_WEIGHTS=want_weights,
        P=signals.num_ranks,
        P_PAD=padded(signals.num_ranks),
        BLOCK=_block(D, 4096),
        num_warps=launch.warps,
    )
    return grad_weights
