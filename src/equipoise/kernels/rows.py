"""Launches of the kernels that move rows of tokens through memory which the ranks of a group share.

Each is called by all ranks in the same order, with a channel of its own; none waits on the host. See
`kernels/rows_triton.py`.

Shapes: P ranks, L local physical experts, J = P * L, T tokens, K slots per token, D features, C rows at most here.
"""

from collections.abc import Callable
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch

from equipoise.kernels.launching import Launcher, launch
from equipoise.kernels.peers import Signals, Words, padded, words_of

RowMaker = Callable[[torch.dtype], torch.Tensor]
"""Makes unset memory for the rows that experts return, or for their rows' gradient: of as many rows as arrived. Not for
compiled code."""

MAX_PLACES, MAX_RANKS = 2**28, 256
"""What the records of rows can name."""


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


class Exchange:
    """One operation of all ranks in pieces of memory for rows, which peers reach.

    addresses_P: where every rank's pieces begin. num_bytes: of one. record_offset, weight_offset: where in it the rows'
    records (int32 [C]) and weights (float32 [C]) are. sends_all: tokens go to all of their places, and `spread_rows`
    has nothing to do; the same for all exchanges of one layout, on every rank.
    """

    def __init__(
        self,
        signals: Signals,
        channel: int,
        grid: RowLaunch,
        addresses_P: torch.Tensor,
        num_bytes: int,
        record_offset: int,
        weight_offset: int,
        sends_all: bool,
    ) -> None:
        self.num_ranks, self.grid = signals.num_ranks, grid
        self.record_offset, self.weight_offset, self.sends_all = record_offset, weight_offset, sends_all
        self._bound = signals.control, signals.pads_P, channel, signals.rank, addresses_P, num_bytes
        self._launchers: dict[tuple[Any, ...], Launcher] = {}

    def launcher(self, form: tuple[Any, ...], make: Callable[..., tuple[Any, dict[str, Any]]]) -> Launcher:
        """Of the kernel and the constants that `make(*form)` gives, with what all kernels of an exchange take: the
        channel's, and P."""
        known = self._launchers.get(form)
        if known is None:
            kernel, constants = make(*form)
            sizes: dict[str, Any] = {"P": self.num_ranks, "P_PAD": padded(self.num_ranks)}
            known = self._launchers[form] = Launcher(kernel, self.grid.warps, self._bound, **constants, **sizes)
        return known


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


class RowLayout:
    """Where this rank's rows went and how many came: one tensor, laid out as `kernels/rows_triton.py` says."""

    def __init__(self, table: torch.Tensor, num_local: int) -> None:
        self.table, self.num_local = table, num_local

    @staticmethod
    def empty(num_slots: int, num_local: int, device: torch.device) -> "RowLayout":
        size = num_local + 1 + num_slots + (num_slots + 1) // 2
        return RowLayout(torch.empty(size, dtype=torch.int64, device=device), num_local)

    @cached_property
    def counts_L(self) -> torch.Tensor:
        """int64, rows of each local expert here."""
        return self.table[: self.num_local]


@lru_cache(maxsize=4096)
def _row_words(num_bytes: int, offset: int) -> tuple[Words, int]:
    """Words of a row that begins `offset` bytes behind a multiple of 16, and their number."""
    words = words_of(num_bytes, offset)
    return words, num_bytes // words.num_bytes


def _words(rows: torch.Tensor) -> tuple[Words, int]:
    return _row_words(rows.shape[1] * rows.element_size(), rows.data_ptr() % 16)


def _block(width: int, most: int) -> int:
    return min(max(1 << max(width - 1, 0).bit_length(), 16), most)


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
    sizes: dict[str, Any] = {"J": J, "J_PAD": padded(J), "P": signals.num_ranks, "P_PAD": padded(signals.num_ranks)}
    launch(exchange_counts_kernel, 1, arguments, 4, **sizes)
    return quota_J, before_J


def _sending(
    sends_all: bool, has_weights: bool, J: int, L: int, K: int, W: int, words: Words, block_t: int
) -> tuple[Any, dict[str, Any]]:
    from equipoise.kernels.rows_triton import send_rows_kernel

    return send_rows_kernel, {
        "SENDS_ALL": sends_all,
        "HAS_WEIGHTS": has_weights,
        "J": J,
        "L": L,
        "K": K,
        "J_PAD": padded(J),
        "L_PAD": padded(L),
        "BLOCK_T": block_t,
        "W": W,
        "WORD": _triton_type(words),
        "WORD_BYTES": words.num_bytes,
        "ALIGNED": words.aligned,
        "BLOCK": _block(W, 2048),
    }


def send_rows(
    exchange: Exchange,
    piece: int,
    x_TD: torch.Tensor,
    places: Places,
    capacity: int,
    weights_TK: torch.Tensor | None = None,
) -> RowLayout:
    """Each token to the places of its slots with an id, and its weights (float32) if they are given. `piece`: the one
    that this rank names; `capacity`: C."""
    (T, K), J, device = places.ids_TK.shape, places.send_J.shape[0], x_TD.device
    L, (words, W) = J // exchange.num_ranks, _words(x_TD)
    layout = RowLayout.empty(T * K, L, device)
    form = exchange.sends_all, weights_TK is not None, J, L, K, W, words, 32 if device.type != "cpu" else 16
    launcher = exchange.launcher(form, _sending)
    launcher(
        exchange.grid.programs,
        piece,
        x_TD,
        places.send_J,
        places.quota_J,
        places.before_J,
        places.ids_TK,
        places.row_TK,
        layout.table if weights_TK is None else weights_TK,
        layout.table,
        T,
        capacity,
        exchange.record_offset,
        exchange.weight_offset,
    )
    return layout


@lru_cache(maxsize=256)
def _spreading(warps: int, L: int, K: int, W: int, words: Words | None) -> Launcher:
    """`words`: None with weights, whose rows are elements."""
    from equipoise.kernels.rows_triton import spread_rows_kernel

    word, most = (None, 4096) if words is None else (_triton_type(words), 2048)
    return Launcher(
        spread_rows_kernel, warps, L=L, K=K, W=W, WORD=word, HAS_WEIGHTS=words is None, BLOCK=_block(W, most)
    )


def spread_rows(
    rows_CD: torch.Tensor,
    record_C: torch.Tensor,
    layout: RowLayout,
    top_k: int,
    grid: RowLaunch,
    weights_C: torch.Tensor | None = None,
) -> None:
    """Rows of other ranks' heads to the other places of their tokens here, in place; each times its weight, if there
    are any."""
    if weights_C is not None:
        launcher = _spreading(grid.warps, layout.num_local, top_k, rows_CD.shape[1], None)
    elif top_k == 1:
        return
    else:
        words, W = _words(rows_CD)
        launcher = _spreading(grid.warps, layout.num_local, top_k, W, words)
    launcher(grid.copies, rows_CD, record_C, record_C if weights_C is None else weights_C, layout.table)


@lru_cache(maxsize=256)
def _folding(warps: int, L: int, K: int, D: int) -> Launcher:
    from equipoise.kernels.rows_triton import fold_rows_kernel

    return Launcher(fold_rows_kernel, warps, L=L, K=K, D=D, BLOCK=_block(D, 4096))


def fold_rows(rows_CD: torch.Tensor, record_C: torch.Tensor, layout: RowLayout, top_k: int, grid: RowLaunch) -> None:
    """Adds the rows of each token of other ranks into its head's, in place: in FP32, in order of k, rounded once. For
    `gather_rows` with `folded`. Not where the senders wrote all places themselves, or tokens have one slot."""
    launcher = _folding(grid.warps, layout.num_local, top_k, rows_CD.shape[1])
    launcher(grid.copies, rows_CD, record_C, layout.table)


@lru_cache(maxsize=256)
def _copying(warps: int, L: int, W: int, words: Words) -> Launcher:
    from equipoise.kernels.rows_triton import copy_rows_kernel

    return Launcher(copy_rows_kernel, warps, L=L, W=W, WORD=_triton_type(words), BLOCK=_block(W, 2048))


def copy_rows(rows_RD: torch.Tensor, out_CD: torch.Tensor, layout: RowLayout, grid: RowLaunch) -> None:
    """The rows that belong to somebody, into a piece."""
    words, W = _words(rows_RD)
    _copying(grid.warps, layout.num_local, W, words)(grid.copies, rows_RD, out_CD, layout.table)


def _gathering(
    L: int, K: int, D: int, item_bytes: int, aligned: bool, has_weights: bool, keeps: bool, takes: bool, folded: bool
) -> tuple[Any, dict[str, Any]]:
    from equipoise.kernels.rows_triton import gather_rows_kernel

    return gather_rows_kernel, {
        "L": L,
        "K": K,
        "D": D,
        "ITEM_BYTES": item_bytes,
        "ALIGNED": aligned,
        "HAS_WEIGHTS": has_weights,
        "KEEPS_ROWS": keeps,
        "TAKES_WEIGHTS": takes,
        "FOLDED": folded,
        "BLOCK": _block(D, 4096),
    }


def gather_rows(
    exchange: Exchange,
    piece: int,
    layout: RowLayout,
    shape_TK: tuple[int, int],
    like_CD: torch.Tensor,
    weights_TK: torch.Tensor | None,
    keeps: bool,
    takes: bool = False,
    folded: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The sums [T, D] over each token's slots of (weight times) the row in the piece that its expert's rank has named,
    in FP32, in the dtype of `like_CD`, this rank's rows. `keeps`: also the rows themselves [T * K, D]; or `takes`: also
    what lies there as their weights, float32 [T, K]. `folded`: every rank has folded its rows (`fold_rows`)."""
    (T, K), D = shape_TK, like_CD.shape[1]
    dtype, device, has_weights = like_CD.dtype, like_CD.device, weights_TK is not None
    out_TD = torch.empty(T, D, dtype=dtype, device=device)
    more = torch.empty(T * K, D, dtype=dtype, device=device) if keeps else None
    more = torch.empty(T, K, dtype=torch.float32, device=device) if takes else more
    form = layout.num_local, K, D, dtype.itemsize, _words(like_CD)[0].aligned, has_weights, keeps, takes, folded
    weights = layout.table if weights_TK is None else weights_TK
    kept, taken = more if keeps else out_TD, more if takes else layout.table
    exchange.launcher(form, _gathering)(
        exchange.grid.programs, piece, layout.table, weights, kept, taken, out_TD, T, exchange.weight_offset
    )
    return out_TD, more


def _sending_gradients(
    L: int, K: int, D: int, item_bytes: int, aligned: bool, has_weights: bool, wants_weights: bool
) -> tuple[Any, dict[str, Any]]:
    from equipoise.kernels.rows_triton import send_gradients_kernel

    return send_gradients_kernel, {
        "L": L,
        "K": K,
        "D": D,
        "ITEM_BYTES": item_bytes,
        "ALIGNED": aligned,
        "HAS_WEIGHTS": has_weights,
        "WANT_WEIGHTS": wants_weights,
        "BLOCK": _block(D, 4096),
    }


def send_gradients(
    exchange: Exchange,
    piece: int,
    grad_TD: torch.Tensor,
    rows_SD: torch.Tensor | None,
    weights_TK: torch.Tensor | None,
    layout: RowLayout,
    shape_TK: tuple[int, int],
) -> torch.Tensor | None:
    """Each token's gradient to the heads of its slots, and their weights if there are; here to all of its slots,
    weighted. Returns the weights' gradients if there are `rows_SD` [T * K, D], the rows that were summed."""
    (T, K), D = shape_TK, grad_TD.shape[1]
    grad_weights = None if rows_SD is None or weights_TK is None else torch.empty_like(weights_TK)
    aligned = _words(grad_TD)[0].aligned
    form = layout.num_local, K, D, grad_TD.element_size(), aligned, weights_TK is not None, grad_weights is not None
    weights = layout.table if weights_TK is None else weights_TK
    exchange.launcher(form, _sending_gradients)(
        exchange.grid.programs,
        piece,
        grad_TD,
        grad_TD if rows_SD is None else rows_SD,
        weights,
        weights if grad_weights is None else grad_weights,
        layout.table,
        T,
        exchange.weight_offset,
    )
    return grad_weights


def _triton_type(words: Words) -> Any:
    import triton.language as tl

    return getattr(tl, words.dtype)
