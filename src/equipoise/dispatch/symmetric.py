"""Dispatcher over memory that the ranks of the EP group share: rows are written straight to their places at the peers,
and the experts' outputs are read from where they lie.

No host sync and no split sizes: places come from the counts of all ranks, which are on the device, and shapes are
static. A rank can receive `capacity` rows; the kernels check it, and `SymmetricSpace.check` raises on the host. Results
are those of `all_to_all`, row for row.

One exchange each way, in the forward and in the backward:

    dispatch             tokens to the experts' ranks       backward: gradients read from there, summed
    combine              outputs read from there, summed    backward: gradients to the experts' ranks, weighted there

Where the experts multiply by the rows' weights (`weighs_rows`), these go with the tokens, and their gradients come back
with the rows'. Combine adds what is there and keeps nothing, and its backward sends plain gradients. What comes back is
added up where it lies (`fold_rows`), so that each rank is asked for one row of a token, not for one of each expert.

All of them use equal pieces of memory, lent as tensors (`LeasedMemory`). Arrived rows keep theirs until the backward,
so that saving them costs no copy; a forward that would take one of the last two copies rows out of it, since an
exchange that is under way needs two: one that rows arrive in, and one that the experts write to.

Shapes: T tokens, K slots per token, D features, P ranks, L local physical experts, J = P * L, C rows at most.
"""

import gc
import logging
from typing import NamedTuple

import torch

from equipoise.dispatch.base import AnyExchange, DeviceExchange, Dispatched
from equipoise.dispatch.holders import num_holders, num_holders_alone
from equipoise.errors import ConfigError
from equipoise.kernels.permute import make_permutation
from equipoise.kernels.rows import (
    MAX_PLACES,
    MAX_RANKS,
    Exchange,
    Places,
    RowLayout,
    copy_rows,
    exchange_counts,
    fold_rows,
    gather_rows,
    row_launch,
    send_gradients,
    send_rows,
    spread_rows,
)
from equipoise.symmetric.leased import LeasedMemory, Part
from equipoise.symmetric.space import SymmetricSpace

logger = logging.getLogger(__name__)
FEW_BYTES = 2**25
"""Rows of the largest dispatch up to which every token is sent to all of its places: the link then takes less time for
the copies than the host for launching the kernel that would make them."""
UNDER_WAY = 2
"""Pieces that an exchange takes for a moment: for rows that arrive, and for what experts write."""


class _Memory(NamedTuple):
    """What the first dispatch allocates: pieces of `capacity` rows, then their records and weights; made for tokens of
    `num_slots` slots in all, `width` features and at most `item_bytes` each."""

    pieces: LeasedMemory
    capacity: int
    num_slots: int
    width: int
    item_bytes: int

    @property
    def weight_offset(self) -> int:
        return self.pieces.piece_bytes - _rounded(4 * self.capacity)

    @property
    def record_offset(self) -> int:
        return self.weight_offset - _rounded(4 * self.capacity)

    def rows(self, dtype: torch.dtype) -> Part:
        return Part(0, (self.capacity, self.width), dtype)


def _rounded(num_bytes: int) -> int:
    return -(-num_bytes // 256) * 256


class _Handle(NamedTuple):
    """weights_TK: None where the experts have multiplied by them."""

    layout: RowLayout
    weights_TK: torch.Tensor | None
    record_C: torch.Tensor
    shape_TK: tuple[int, int]


class SymmetricDispatcher:
    """See the module docstring. One object serves all layers; calls are made in one order, on one stream at a time.

    Args:
        num_experts: (physical) experts J, split evenly over the space's ranks.
        space: of the EP group.
        capacity_factor: rows that a rank can receive, over the T * K of the largest rank. 0: enough for any routing.
        max_tokens: largest T that will come; 0 takes that of the first dispatch, over all ranks.
        num_buffers: one more than the forwards whose arrived rows are kept at once. There is one piece of memory more.
        few_bytes: see `FEW_BYTES`; the same on every rank.
        weighs_rows: experts get the rows' weights and multiply by them, and their ranks add up each token's rows.
    """

    def __init__(
        self,
        num_experts: int,
        space: SymmetricSpace,
        capacity_factor: float = 1.25,
        max_tokens: int = 0,
        num_buffers: int = 5,
        few_bytes: int = FEW_BYTES,
        weighs_rows: bool = False,
    ) -> None:
        self.space, self.num_experts, self.num_ranks = space, num_experts, space.num_ranks
        self.num_local_experts = num_experts // space.num_ranks
        self.capacity_factor, self.max_tokens, self.num_buffers = capacity_factor, max_tokens, num_buffers
        self.few_bytes, self.launch, self.weighs_rows = few_bytes, row_launch(space.device), weighs_rows
        self._holders_alone = num_holders_alone()
        names = ("count exchange", "dispatch", "combine", "backward of combine", "backward of dispatch")
        self._counts, self._dispatch, self._combine, self._combine_backward, self._dispatch_backward = map(
            space.channel, names
        )
        shape = (2, space.num_ranks, num_experts)
        self._tables_P = space.allocate(shape, torch.int32, "counts for a dispatch").pointers_P
        self._memory: _Memory | None = None
        self._exchanges: dict[int, Exchange] = {}
        self._records = self._weights = Part(0, (0,), torch.int32)
        self._has_warned = self._has_told = False

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers allocated by now."""
        pieces = None if self._memory is None else self._memory.pieces
        return 0 if pieces is None else pieces.num_pieces * pieces.piece_bytes

    def reserve(self, num_tokens: int, num_slots: int, width: int, item_bytes: int) -> _Memory:
        """The buffers, allocated at the first call: collective, and the only one that waits on the host. Sizes are the
        largest of all ranks'.

        Raises:
            RankFailure: a rank did not come to the first call in time.
            ConfigError: a later dispatch has more tokens, slots or bytes than the buffers were made for. Ranks cannot
                agree to make larger ones, which would be a host sync; the other ranks raise `RankFailure`.
        """
        memory = self._memory
        if memory is None:
            given = [max(num_tokens, self.max_tokens), num_slots, width, item_bytes]
            tokens, per_token, width, item_bytes = self.space.agree_max("sizes of the first dispatch", given)
            slots = max(tokens * per_token, 1)
            capacity = self.num_ranks * slots
            if self.num_ranks > MAX_RANKS or capacity >= MAX_PLACES:
                raise ConfigError(
                    f"the symmetric dispatcher serves {MAX_RANKS} ranks and {MAX_PLACES} rows of a rank at most, not "
                    f"{self.num_ranks} and {capacity}: choose smaller microbatches, or dispatcher all_to_all"
                )
            if self.capacity_factor:
                capacity = min(capacity, int(slots * self.capacity_factor) + self.num_local_experts)
            num_bytes = _rounded(capacity * width * item_bytes) + 2 * _rounded(4 * capacity)
            pieces = LeasedMemory(self.space, self.num_buffers + 1, num_bytes, "rows of tokens")
            memory = self._memory = _Memory(pieces, capacity, slots, width, item_bytes)
            self._records = Part(memory.record_offset, (capacity,), torch.int32)
            self._weights = Part(memory.weight_offset, (capacity,), torch.float32)
            sends_all = slots * width * item_bytes <= self.few_bytes
            for channel in (self._dispatch, self._combine, self._combine_backward, self._dispatch_backward):
                self._exchanges[channel] = Exchange(
                    self.space.signals,
                    channel,
                    self.launch,
                    pieces.memory.pointers_P,
                    pieces.piece_bytes,
                    memory.record_offset,
                    memory.weight_offset,
                    sends_all,
                )
        if num_tokens * num_slots > memory.num_slots or width != memory.width or item_bytes > memory.item_bytes:
            self.space.abandon()
            raise ConfigError(
                f"a dispatch of {num_tokens} x {num_slots} slots of {width} features of {item_bytes} bytes; the "
                f"buffers were made for {memory.num_slots} slots of {memory.width} features of {memory.item_bytes} "
                "bytes. Give the dispatcher the largest number of tokens as max_tokens"
            )
        return memory

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        """See `Dispatcher`. A `DeviceExchange` saves the exchange of counts and the sort; others are not needed.

        Raises:
            RankFailure, ConfigError: what the kernels have found out by now, see `SymmetricSpace.check`.
        """
        self.space.check()
        self.reserve(ids_TK.shape[0], ids_TK.shape[1], x_TD.shape[1], x_TD.element_size())
        found: list[_Handle] = []
        places = self.places(ids_TK, exchange)
        if self.weighs_rows:
            rows_CD, weights_C = _Dispatch.apply(x_TD, weights_TK.float(), self, places, found)
            handle = found[0]
            return Dispatched(rows_CD, handle.layout.counts_L, handle, self.make_rows, weights_C)
        rows_CD = _Dispatch.apply(x_TD, None, self, places, found)
        handle = found[0]._replace(weights_TK=weights_TK)
        return Dispatched(rows_CD, handle.layout.counts_L, handle, self.make_rows)

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """See `Dispatcher`. Rows that are in memory of `Dispatched.make_rows` are not copied, and with `weighs_rows`
        overwritten: combine them once."""
        keeps = handle.weights_TK is not None and torch.is_grad_enabled() and handle.weights_TK.requires_grad
        return _Combine.apply(rows_RD, handle.weights_TK, self, handle.layout, handle.record_C, handle.shape_TK, keeps)

    def make_rows(self, dtype: torch.dtype) -> torch.Tensor:
        """[C, D] in a free piece; in plain memory if there is none, or for another dtype."""
        memory = self._memory
        assert memory is not None
        free = memory.pieces.free(1)
        if not free or dtype.itemsize > memory.item_bytes:
            return torch.empty(memory.capacity, memory.width, dtype=dtype, device=self.space.device)
        return memory.pieces.lend(free[0], memory.rows(dtype))

    # The four exchanges.

    def places(self, ids_TK: torch.Tensor, exchange: AnyExchange = None) -> Places:
        """Where rows go, as far as it is known or has to be asked."""
        if isinstance(exchange, DeviceExchange):
            known = exchange.row_TK, exchange.send_J, exchange.quota_J, exchange.before_J
        else:
            permutation = make_permutation(ids_TK, self.num_experts)
            send_J = permutation.counts_E
            quota_before = exchange_counts(self.space.signals, self._counts, self._tables_P, send_J)
            known = permutation.row_TK, send_J, *quota_before
        return Places(ids_TK.contiguous(), *known)

    def _find_piece(self, is_kept: bool) -> tuple[int, bool]:
        """A piece for peers to write to, and whether results have to be copied out of it. `is_kept`: until a backward;
        else for the exchange under way."""
        assert self._memory is not None
        pool = self._memory.pieces
        free = pool.free(UNDER_WAY + 1)
        if len(free) <= UNDER_WAY and self.space.device.type == "cpu":
            gc.collect()  # Triton's interpreter leaves cycles of references to tensors
            free = pool.free(UNDER_WAY + 1)
        is_last = is_kept and len(free) <= UNDER_WAY
        if is_last and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "all but %d of the %d buffers of the symmetric dispatcher are in use; rows are copied. Raise "
                "dispatch.num_buffers to one more than the MoE layers and microbatches whose backward is outstanding",
                UNDER_WAY,
                pool.num_pieces,
            )
        if not free:
            raise RuntimeError(
                "the gradient of a dispatched row is kept beyond its backward (a hook, retain_grad), so the symmetric "
                "dispatcher has no buffer left: copy it, or raise dispatch.num_buffers"
            )
        return free[0], is_last

    def send(
        self, x_TD: torch.Tensor, places: Places, weights_TK: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, RowLayout, torch.Tensor | None]:
        """Rows [C, D] that arrived here, their records [C], where this rank's went, and the rows' weights [C]."""
        memory = self._memory
        assert memory is not None
        number, is_copied = self._find_piece(is_kept=True)
        rows = memory.pieces.lend(number, memory.rows(x_TD.dtype))
        record_C = memory.pieces.lend(number, self._records)
        weights_C = None if weights_TK is None else memory.pieces.lend(number, self._weights)
        exchange = self._exchanges[self._dispatch]
        layout = send_rows(exchange, number, x_TD, places, memory.capacity, weights_TK)
        if not exchange.sends_all:
            spread_rows(rows, record_C, layout, places.ids_TK.shape[1], self.launch)
        if is_copied:
            return rows.clone(), record_C.clone(), layout, None if weights_C is None else weights_C.clone()
        return rows, record_C, layout, weights_C

    def collect(
        self,
        channel: int,
        rows_RD: torch.Tensor,
        layout: RowLayout,
        shape_TK: tuple[int, int],
        weights_TK: torch.Tensor | None,
        keeps: bool,
        record_C: torch.Tensor,
        given_C: torch.Tensor | None = None,
        is_held: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """This rank's tokens' sums of (weighted) rows at their experts' ranks, and the rows [T * K, D] if they are
        kept, or their part [T, K] of what the experts' ranks give (float32); those of slots without an id are 0.
        `is_held`: others have the rows too, which have to stay as they are.

        Raises:
            ConfigError: the rows' elements are larger than the buffers were made for.
        """
        memory = self._memory
        assert memory is not None
        if rows_RD.element_size() > memory.item_bytes:
            self.space.abandon()
            raise ConfigError(
                f"experts returned rows of {rows_RD.dtype}; the buffers were made for elements of {memory.item_bytes} "
                "bytes, as the tokens have. Cast the rows to the tokens' dtype (products with weights_R are float32)"
            )
        exchange, takes = self._exchanges[channel], given_C is not None
        folds = self.weighs_rows and shape_TK[1] > 1 and not exchange.sends_all  # the same on every rank
        number, rows = memory.pieces.number_of(rows_RD), rows_RD
        if folds and is_held and number is not None:
            number = None
            if not self._has_told:
                self._has_told = True
                logger.info("others (hooks, sums) have the gradients of dispatched rows too: they are copied")
        if number is None:
            number, _ = self._find_piece(is_kept=False)
            rows = memory.pieces.lend(number, memory.rows(rows_RD.dtype))
            copy_rows(rows_RD, rows, layout, self.launch)
        if given_C is not None:
            memory.pieces.lend(number, self._weights).copy_(given_C)
        if folds:
            fold_rows(rows, record_C, layout, shape_TK[1], self.launch)
            if rows is rows_RD and not rows.is_inference():
                torch.autograd.graph.increment_version(rows)  # so that nobody's backward takes them for what they were
        return gather_rows(exchange, number, layout, shape_TK, rows, weights_TK, keeps, takes, folds)

    def send_weighted(
        self,
        grad_TD: torch.Tensor,
        rows_SD: torch.Tensor | None,
        weights_TK: torch.Tensor | None,
        layout: RowLayout,
        record_C: torch.Tensor,
        shape_TK: tuple[int, int],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients [C, D] of this rank's experts' outputs, and with `rows_SD` those of the weights."""
        memory = self._memory
        assert memory is not None
        number, _ = self._find_piece(is_kept=False)
        rows = memory.pieces.lend(number, memory.rows(grad_TD.dtype))
        exchange = self._exchanges[self._combine_backward]
        grad_weights = send_gradients(exchange, number, grad_TD, rows_SD, weights_TK, layout, shape_TK)
        if not exchange.sends_all:
            weights_C = None if weights_TK is None else memory.pieces.lend(number, self._weights)
            spread_rows(rows, record_C, layout, shape_TK[1], self.launch, weights_C)
        return rows, grad_weights


class _Dispatch(torch.autograd.Function):
    """Rows, and with weights those of the rows too."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, dispatcher, places, found):
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        rows_CD, record_C, layout, weights_C = dispatcher.send(x_TD.contiguous(), places, weights_TK)
        ctx.dispatcher, ctx.layout, ctx.shape_TK = dispatcher, layout, tuple(places.ids_TK.shape)
        ctx.save_for_backward(record_C)
        found.append(_Handle(layout, None, record_C, ctx.shape_TK))  # as outputs they would be in a cycle of references
        return rows_CD if weights_C is None else (rows_CD, weights_C)

    @staticmethod
    def backward(ctx, grad_CD, grad_weights_C=None):
        is_held = num_holders(grad_CD) > ctx.dispatcher._holders_alone
        channel, rows_CD = ctx.dispatcher._dispatch_backward, grad_CD.contiguous()
        grad_TD, grad_weights_TK = ctx.dispatcher.collect(
            channel, rows_CD, ctx.layout, ctx.shape_TK, None, False, *ctx.saved_tensors, grad_weights_C, is_held
        )
        return grad_TD, grad_weights_TK, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, dispatcher, layout, record_C, shape_TK, keeps):
        weights_TK = None if weights_TK is None else weights_TK.contiguous()
        channel, rows_RD = dispatcher._combine, rows_RD.contiguous()
        y_TD, rows_SD = dispatcher.collect(channel, rows_RD, layout, shape_TK, weights_TK, keeps, record_C)
        ctx.dispatcher, ctx.layout, ctx.shape_TK = dispatcher, layout, shape_TK
        ctx.save_for_backward(rows_SD, weights_TK, record_C)  # not kept on ctx, which outlives the backward
        return y_TD

    @staticmethod
    def backward(ctx, grad_TD):
        rows_SD, weights_TK, record_C = ctx.saved_tensors
        grad_rows, grad_weights = ctx.dispatcher.send_weighted(
            grad_TD.contiguous(), rows_SD, weights_TK, ctx.layout, record_C, ctx.shape_TK
        )
        return grad_rows, grad_weights, None, None, None, None, None
