"""Dispatcher over memory that the ranks of the EP group share: rows are written straight to their places at the peers.

No host sync and no split sizes: places come from the counts of all ranks, which are on the device, and shapes are
static. A rank can receive `capacity` rows; the kernels check it, and `SymmetricSpace.check` raises on the host. Results
are those of `all_to_all`, row for row.

Rows arrive in memory that is lent to the caller (`LeasedMemory`), so that saving them for the backward costs no copy.
It comes back when the last tensor on it dies. A forward that would take the last piece copies rows out of it, so that
a backward, which needs one for a moment, always finds one.

One exchange each way, in the forward and in the backward:

    dispatch             x to the experts' ranks           backward: gradients back to the slots, summed
    combine              outputs back to the slots, summed backward: weighted gradients to the experts' ranks

Shapes: T tokens, K slots per token, D features, P ranks, L local physical experts, J = P * L, C rows at most.
"""

import gc
import logging
from typing import NamedTuple

import torch

from equipoise.dispatch.base import AnyExchange, DeviceExchange, Dispatched
from equipoise.errors import ConfigError
from equipoise.kernels.peers import (
    MAX_PLACES,
    MAX_RANKS,
    Pieces,
    RowLayout,
    exchange_counts,
    make_layout,
    return_rows,
    row_launch,
    send_gradients,
    send_rows,
)
from equipoise.kernels.permute import gather_slots, make_permutation
from equipoise.symmetric.leased import LeasedMemory, part
from equipoise.symmetric.space import SymmetricSpace

logger = logging.getLogger(__name__)


class _Memory(NamedTuple):
    """What the first dispatch allocates. rows: pieces of C rows, with their records behind. slots: pieces of S rows."""

    rows: LeasedMemory
    slots: LeasedMemory
    capacity: int
    num_slots: int
    width: int
    item_bytes: int


class _Handle(NamedTuple):
    layout: RowLayout
    weights_TK: torch.Tensor
    valid_TK: torch.Tensor | None
    record_R: torch.Tensor


class SymmetricDispatcher:
    """See the module docstring. One object serves all layers; calls are made in one order, on one stream at a time.

    Args:
        num_experts: (physical) experts J, split evenly over the space's ranks.
        space: of the EP group.
        capacity_factor: rows that a rank can receive, over the T * K of the largest rank. 0: enough for any routing.
        max_tokens: largest T that will come; 0 takes that of the first dispatch, over all ranks.
        num_buffers: pieces of memory, each way: one more than the forwards whose results are kept at once.
    """

    def __init__(
        self,
        num_experts: int,
        space: SymmetricSpace,
        capacity_factor: float = 1.25,
        max_tokens: int = 0,
        num_buffers: int = 5,
    ) -> None:
        self.space, self.num_experts, self.num_ranks = space, num_experts, space.num_ranks
        self.num_local_experts = num_experts // space.num_ranks
        self.capacity_factor, self.max_tokens, self.num_buffers = capacity_factor, max_tokens, num_buffers
        self.launch = row_launch(space.device)
        names = ("count exchange", "dispatch", "combine", "backward of combine", "backward of dispatch")
        self._counts, self._dispatch, self._combine, self._combine_backward, self._dispatch_backward = map(
            space.channel, names
        )
        self._tables_P = space.allocate((2, space.num_ranks, num_experts), torch.int32).pointers_P
        self._memory: _Memory | None = None
        self._numbers: torch.Tensor | None = None
        self._has_warned = False

    @property
    def num_bytes(self) -> int:
        """Memory of the buffers allocated by now."""
        if self._memory is None:
            return 0
        return sum(part.num_pieces * part.piece_bytes for part in (self._memory.rows, self._memory.slots))

    def reserve(self, num_tokens: int, num_slots: int, width: int, item_bytes: int) -> _Memory:
        """The buffers, allocated at the first call: collective, and the only one that waits on the host.

        Raises:
            ConfigError: a later dispatch has more tokens, slots or bytes than the buffers were made for.
        """
        memory = self._memory
        if memory is None:
            tokens, per_token, width, item_bytes = self.space.agree_max(
                [max(num_tokens, self.max_tokens), num_slots, width, item_bytes]
            )
            slots = max(tokens * per_token, 1)
            capacity = self.num_ranks * slots
            if self.num_ranks > MAX_RANKS or capacity >= MAX_PLACES:
                raise ConfigError(
                    f"the symmetric dispatcher serves {MAX_RANKS} ranks and {MAX_PLACES} rows of a rank at most, not "
                    f"{self.num_ranks} and {capacity}: choose smaller microbatches, or dispatcher all_to_all"
                )
            if self.capacity_factor:
                capacity = min(capacity, int(slots * self.capacity_factor) + self.num_local_experts)
            row_bytes = width * item_bytes
            records = -(-capacity * row_bytes // 256) * 256
            rows = LeasedMemory(self.space, self.num_buffers, records + capacity * 8)
            returned = LeasedMemory(self.space, self.num_buffers, slots * row_bytes)
            memory = self._memory = _Memory(rows, returned, capacity, slots, width, item_bytes)
        if num_tokens * num_slots > memory.num_slots or width != memory.width or item_bytes > memory.item_bytes:
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
        memory = self.reserve(ids_TK.shape[0], ids_TK.shape[1], x_TD.shape[1], x_TD.element_size())
        if isinstance(exchange, DeviceExchange):
            row_TK, valid_TK, send_J = exchange.row_TK, exchange.valid_TK, exchange.send_J
            quota_J, before_J = exchange.quota_J, exchange.before_J
        else:
            permutation = make_permutation(ids_TK, self.num_experts)
            row_TK, valid_TK, send_J = permutation.row_TK, permutation.valid_TK, permutation.counts_E
            quota_J, before_J = exchange_counts(self.space.signals, self._counts, self._tables_P, send_J)
        layout = make_layout(
            self.space.signals, ids_TK.contiguous(), row_TK, send_J, quota_J, before_J, memory.capacity
        )
        records: list[torch.Tensor] = []
        rows_RD = _Dispatch.apply(x_TD, self, layout, valid_TK, records)
        return Dispatched(rows_RD, layout.counts_L, _Handle(layout, weights_TK, valid_TK, records[0]))

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        """See `Dispatcher`."""
        return _Combine.apply(rows_RD, handle.weights_TK, self, handle)

    # The four exchanges.

    def _lend(self, pool: LeasedMemory, is_kept: bool) -> tuple[Pieces, torch.Tensor, bool]:
        """A piece for peers to write to, its bytes, and whether results have to be copied out of it. `is_kept`: until a
        backward; else until the caller's next exchange."""
        if pool.num_free < 2 and self.space.device.type == "cpu":
            gc.collect()  # Triton's interpreter leaves cycles of references to tensors
        is_last = is_kept and pool.num_free == 1
        if is_last and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "all but one of the %d buffers of the symmetric dispatcher are in use; results are copied. Raise "
                "dispatch.num_buffers to one more than the MoE layers and microbatches whose backward is outstanding",
                self.num_buffers,
            )
        if pool.num_free == 0:
            raise RuntimeError(
                "the gradient of a dispatched row is kept beyond its backward (a hook, retain_grad), so the symmetric "
                "dispatcher has no buffer left: copy it, or raise dispatch.num_buffers"
            )
        index, memory = pool.lend()
        return Pieces(pool.memory.pointers_P, pool.piece_bytes, index), memory, is_last

    def slot_numbers(self, layout: RowLayout) -> torch.Tensor:
        """0, 1, ... in the shape of the ids."""
        number = layout.target_TK.numel()
        if self._numbers is None:
            assert self._memory is not None
            self._numbers = torch.arange(self._memory.num_slots, device=layout.target_TK.device)
        return self._numbers[:number].view(layout.target_TK.shape)

    def _rows(self, memory: _Memory, piece: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return part(piece, 0, (memory.capacity, memory.width), dtype)

    def send(self, x_TD: torch.Tensor, layout: RowLayout) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [C, D] that arrived here, and their records [C]."""
        assert self._memory is not None
        memory = self._memory
        pieces, piece, is_copied = self._lend(memory.rows, is_kept=True)
        offset = memory.rows.piece_bytes - -(-memory.capacity * 8 // 256) * 256
        rows, records = self._rows(memory, piece, x_TD.dtype), part(piece, offset, (memory.capacity,), torch.int64)
        send_rows(self.space.signals, self._dispatch, x_TD, layout, pieces, rows, records, self.launch)
        return (rows.clone(), records.clone()) if is_copied else (rows, records)

    def give_back(self, channel: int, rows_RD: torch.Tensor, layout: RowLayout, record_R: torch.Tensor) -> torch.Tensor:
        """Rows [T * K, D] that came back to this rank's slots; those without an id hold anything."""
        assert self._memory is not None
        memory = self._memory
        pieces, piece, is_copied = self._lend(memory.slots, is_kept=channel == self._combine)
        return_rows(self.space.signals, channel, rows_RD, record_R, layout.total, pieces, memory.num_slots, self.launch)
        slots = part(piece, 0, (layout.target_TK.numel(), memory.width), rows_RD.dtype)
        return slots.clone() if is_copied else slots

    def send_weighted(
        self,
        grad_TD: torch.Tensor,
        rows_SD: torch.Tensor,
        weights_TK: torch.Tensor,
        layout: RowLayout,
        want_weights: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Gradients [C, D] of this rank's experts' outputs, and those of the weights."""
        assert self._memory is not None
        memory = self._memory
        pieces, piece, _ = self._lend(memory.rows, is_kept=False)
        grad_weights = send_gradients(
            self.space.signals,
            self._combine_backward,
            grad_TD,
            rows_SD,
            weights_TK,
            layout,
            pieces,
            want_weights,
            self.launch,
        )
        return self._rows(memory, piece, rows_SD.dtype), grad_weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, dispatcher, layout, valid_TK, records):
        rows_RD, record_R = dispatcher.send(x_TD.contiguous(), layout)
        ctx.dispatcher, ctx.layout = dispatcher, layout
        ctx.save_for_backward(record_R, valid_TK)  # not kept on ctx, which outlives the backward
        records.append(record_R)  # as an output it would be in a cycle of references
        return rows_RD

    @staticmethod
    def backward(ctx, grad_RD):
        dispatcher, layout = ctx.dispatcher, ctx.layout
        record_R, valid_TK = ctx.saved_tensors
        slots = dispatcher.give_back(dispatcher._dispatch_backward, grad_RD.contiguous(), layout, record_R)
        grad_TD = gather_slots(slots, dispatcher.slot_numbers(layout), valid_TK, None, grad_RD.dtype)
        return grad_TD, None, None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, weights_TK, dispatcher, handle):
        slots_SD = dispatcher.give_back(dispatcher._combine, rows_RD.contiguous(), handle.layout, handle.record_R)
        ctx.dispatcher, ctx.layout = dispatcher, handle.layout
        ctx.save_for_backward(slots_SD, weights_TK)
        row_TK = dispatcher.slot_numbers(handle.layout)
        return gather_slots(slots_SD, row_TK, handle.valid_TK, weights_TK, rows_RD.dtype)

    @staticmethod
    def backward(ctx, grad_TD):
        slots_SD, weights_TK = ctx.saved_tensors
        grad_rows, grad_weights = ctx.dispatcher.send_weighted(
            grad_TD.contiguous(), slots_SD, weights_TK.contiguous(), ctx.layout, ctx.needs_input_grad[1]
        )
        return grad_rows, grad_weights, None, None
