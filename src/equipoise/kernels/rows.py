"""Launches of the kernels that move rows of tokens through memory which the ranks of a group share.

Each is called by all ranks in the same order, with a channel of its own; none waits on the host. See
`kernels/rows_triton.py`.

Shapes: P ranks, L local physical experts, J = P * L, T tokens, K slots per token, D features, C rows at most here.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from equipoise.kernels.launching import launch
from equipoise.kernels.peers import Signals, Words, padded, words_of

RowMaker = Callable[[torch.dtype], torch.Tensor]
"""Makes unset memory for the rows that experts return, or for their rows' gradient: of as many rows as arrived. Not for
compiled code."""

MAX_PLACES, MAX_RANKS = 2**28, 256
"""What the records of rows can name."""
_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


class RowLaunch(NamedTuple):
    """Grids and warps of the row kernels. programs: of exchanges, all of which have to run at once; copies: of those
    that wait for nobody."""

    programs: int
    copies: int
    warps: int


def row_launch(device: torch.device) -> RowLaunch:
    """Programs that fill the device, or two where they run one after another."""
    if device.type == "cpu":
        return RowLaunch(2, 2, 1)
    number = torch.cuda.get_device_properties(device).multi_processor_count
    return RowLaunch(4 * number, 16 * number, 4)


class Piece(NamedTuple):
    """Memory for rows that peers reach, the same on every rank but for its number.

    addresses_P: where every rank's pieces begin. num_bytes: of one. number: the one that this rank names.
    record_offset, weight_offset: where in it the rows' records (int32 [C]) and weights (float32 [C]) are.
    """

    addresses_P: torch.Tensor
    num_bytes: int
    number: int
    record_offset: int
    weight_offset: int


class Exchange(NamedTuple):
    """One operation of all ranks."""

    signals: Signals
    channel: int
    piece: Piece
    launch: RowLaunch


class Places(NamedTuple):
    """What decides where rows go; any integers, quota_J and before_J int32.

    ids_TK: physical ids. row_TK: places among this rank's rows sorted by them. send_J: this rank's rows for each
    physical expert. quota_J: all ranks'. before_J: those of the ranks before this one.
    """

    ids_TK: torch.Tensor
    row_TK: torch.Tensor
    send_J: torch.Tensor
    quota_J: torch.Tensor
    before_J: torch.Tensor


class RowLayout(NamedTuple):
    """Where this rank's rows went and how many came.

    target_TK: int64, rank << 32 | place there, -1 for none. record_TK: int32, the records of these places. counts_L:
    int64, rows of each local expert here. total: int32 [1], their sum.
    """

    target_TK: torch.Tensor
    record_TK: torch.Tensor
    counts_L: torch.Tensor
    total: torch.Tensor


def _row_words(rows: torch.Tensor) -> tuple[Words, int, torch.Tensor]:
    """Words of a row, their number, and the rows as words."""
    num_bytes = rows.shape[1] * rows.element_size()
    words = words_of(num_bytes, rows.data_ptr())
    return words, num_bytes // words.num_bytes, rows.view(_WORDS[words.num_bytes])


def _block(width: int, most: int) -> int:
    return min(max(1 << max(width - 1, 0).bit_length(), 16), most)


def _run(kernel: Any, exchange: Exchange, *arguments: Any, **constants: Any) -> None:
    """Launches an exchange: what all of them take, then their own."""
    signals, piece, grid = exchange.signals, exchange.piece, exchange.launch
    common = (
        signals.control,
        signals.pads_P,
        exchange.channel,
        signals.rank,
        piece.number,
        piece.addresses_P,
        piece.num_bytes,
    )
    ranks = {"P": signals.num_ranks, "P_PAD": padded(signals.num_ranks)}
    launch(kernel, grid.programs, (*common, *arguments), grid.warps, **constants, **ranks)


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
    arguments = (signals.control, signals.pads_P, channel, signals.rank, tables_P, counts_J, quota_J, before_J)
    sizes = {"J": J, "J_PAD": padded(J), "P": signals.num_ranks, "P_PAD": padded(signals.num_ranks)}
    launch(exchange_counts_kernel, 1, arguments, 4, **sizes)
    return quota_J, before_J


def send_rows(
    exchange: Exchange, x_TD: torch.Tensor, places: Places, capacity: int, rows_CD: torch.Tensor
) -> RowLayout:
    """Each token to the places of its slots with an id. `rows_CD`: this rank's piece, as rows; `capacity`: C."""
    from equipoise.kernels.rows_triton import send_rows_kernel

    J = places.send_J.numel()
    L = J // exchange.signals.num_ranks
    T, K = places.ids_TK.shape
    empty = lambda *shape, dtype: torch.empty(*shape, dtype=dtype, device=x_TD.device)  # noqa: E731
    layout = RowLayout(
        empty(T, K, dtype=torch.int64),
        empty(T, K, dtype=torch.int32),
        empty(L, dtype=torch.int64),
        empty(1, dtype=torch.int32),
    )
    words, W, x = _row_words(x_TD)
    _run(
        send_rows_kernel,
        exchange,
        x,
        places.send_J,
        places.quota_J,
        places.before_J,
        places.ids_TK,
        places.row_TK,
        *layout,
        T,
        capacity,
        exchange.piece.record_offset,
        J=J,
        L=L,
        K=K,
        J_PAD=padded(J),
        L_PAD=padded(L),
        BLOCK_T=32 if x_TD.device.type != "cpu" else 16,
        W=W,
        WORD=_triton_type(words),
        WORD_BYTES=words.num_bytes,
        ALIGNED=words.aligned,
        BLOCK=_block(W, 2048),
    )
    return layout


def spread_rows(
    rows_CD: torch.Tensor,
    record_C: torch.Tensor,
    total: torch.Tensor,
    top_k: int,
    grid: RowLaunch,
    weights_C: torch.Tensor | None = None,
) -> None:
    """Heads' rows to the other places of their tokens here, in place; every row times its weight, if there are any."""
    from equipoise.kernels.rows_triton import spread_rows_kernel

    if top_k == 1 and weights_C is None:
        return
    _, W, rows = _row_words(rows_CD)
    if weights_C is not None:
        W, rows = rows_CD.shape[1], rows_CD
    has_weights = weights_C is not None
    arguments = (rows, record_C, record_C if weights_C is None else weights_C, total)
    block = _block(W, 4096 if has_weights else 2048)
    launch(spread_rows_kernel, grid.copies, arguments, grid.warps, K=top_k, W=W, HAS_WEIGHTS=has_weights, BLOCK=block)


def copy_rows(rows_RD: torch.Tensor, out_CD: torch.Tensor, total: torch.Tensor, grid: RowLaunch) -> None:
    """The first `total` rows into a piece."""
    from equipoise.kernels.rows_triton import copy_rows_kernel

    _, W, rows = _row_words(rows_RD)
    arguments = (rows, out_CD.view(rows.dtype), total)
    launch(copy_rows_kernel, grid.copies, arguments, grid.warps, W=W, BLOCK=_block(W, 2048))


def gather_rows(
    exchange: Exchange, target_TK: torch.Tensor, like_CD: torch.Tensor, weights_TK: torch.Tensor | None, keeps: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums [T, D] over each token's slots of (weight times) the row in the piece that its expert's rank has named,
    in FP32, in the dtype of `like_CD`, this rank's rows. `keeps`: also the rows themselves [T * K, D]."""
    from equipoise.kernels.rows_triton import gather_rows_kernel

    T, K = target_TK.shape
    D = like_CD.shape[1]
    out_TD = like_CD.new_empty(T, D)
    kept_SD = like_CD.new_empty(T * K, D) if keeps else None
    _run(
        gather_rows_kernel,
        exchange,
        target_TK,
        target_TK if weights_TK is None else weights_TK,
        out_TD if kept_SD is None else kept_SD,
        out_TD,
        T,
        K=K,
        D=D,
        ITEM_BYTES=like_CD.element_size(),
        ALIGNED=_row_words(like_CD)[0].aligned,
        HAS_WEIGHTS=weights_TK is not None,
        KEEPS_ROWS=keeps,
        BLOCK=_block(D, 4096),
    )
    return out_TD, kept_SD


def send_gradients(
    exchange: Exchange,
    grad_TD: torch.Tensor,
    rows_SD: torch.Tensor | None,
    weights_TK: torch.Tensor,
    layout: RowLayout,
) -> torch.Tensor | None:
    """Each token's gradient to the heads of its slots, and their weights. Returns the weights' gradients if there are
    `rows_SD` [T * K, D], the rows that were summed."""
    from equipoise.kernels.rows_triton import send_gradients_kernel

    T, K = weights_TK.shape
    D = grad_TD.shape[1]
    grad_weights = None if rows_SD is None else torch.empty_like(weights_TK)
    _run(
        send_gradients_kernel,
        exchange,
        grad_TD,
        grad_TD if rows_SD is None else rows_SD,
        weights_TK,
        weights_TK if grad_weights is None else grad_weights,
        layout.target_TK,
        layout.record_TK,
        T,
        exchange.piece.weight_offset,
        K=K,
        D=D,
        ITEM_BYTES=grad_TD.element_size(),
        ALIGNED=_row_words(grad_TD)[0].aligned,
        WANT_WEIGHTS=rows_SD is not None,
        BLOCK=_block(D, 4096),
    )
    return grad_weights


def _triton_type(words: Words) -> Any:
    import triton.language as tl

    return getattr(tl, words.dtype)
