"""Dispatcher of an EP group of several domains: rows within the own domain go through its symmetric memory, all others
by an all-to-all of the whole group.

It is the two dispatchers side by side: each gets the slots that are its own, the others' ids are -1 to it. What arrives
is merged, so that experts see one list of rows, in the order in which `all_to_all` has them: by expert, source, token.
A token's outputs are summed by each part in FP32 and then added in the dtype of the rows, so results are those of
`all_to_all` but for one rounding. The all-to-all's split sizes are a host sync, unless the exchange is known.

Shapes: T tokens, K slots per token, D features, P ranks of the group, S of a domain, L local physical experts, C rows
that the symmetric part holds, F rows that came from other domains.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from equipoise.dispatch.all_to_all import AllToAllDispatcher
from equipoise.dispatch.base import AnyExchange, Dispatched, Exchange, GroupDispatcher
from equipoise.dispatch.symmetric import SymmetricDispatcher
from equipoise.distributed.collectives import Group, live_group
from equipoise.kernels.rows import RowMaker


class Places(NamedTuple):
    """Where rows of each part are among the merged ones; together a permutation."""

    near_C: torch.Tensor
    far_F: torch.Tensor


class _Handle(NamedTuple):
    places: Places
    near: Any
    far: Any


class DomainDispatcher(GroupDispatcher):
    """See the module docstring.

    Args:
        num_experts: (physical) experts of the whole group, split evenly over its ranks.
        group: the EP group.
        near: of this rank's domain, which is S consecutive ranks of the group, with the experts of these.

    Raises:
        ValueError: the domain's ranks are others, or its experts; or `near` weighs rows, whose weights messages do not
            carry.
    """

    def __init__(self, num_experts: int, group: Group, near: SymmetricDispatcher) -> None:
        super().__init__(num_experts, group)
        if near.weighs_rows:
            raise ValueError("the dispatcher within a domain cannot weigh rows: others come without weights")
        live = live_group(group)
        self.near, self.far = near, AllToAllDispatcher(num_experts, group)
        first = dist.get_rank(live) - near.space.rank
        ranks = dist.get_process_group_ranks(live)[first : first + near.num_ranks] if first >= 0 else []
        if ranks != near.space.global_ranks or near.num_local_experts != self.num_local_experts:
            raise ValueError(
                f"a domain of ranks {near.space.global_ranks} with {near.num_local_experts} experts each; expected "
                f"consecutive ranks of the group {dist.get_process_group_ranks(live)} with {self.num_local_experts}"
            )
        self._domain = slice(first, first + near.num_ranks)
        self._first_expert = first * self.num_local_experts

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, exchange: AnyExchange = None
    ) -> Dispatched:
        near_TK = ids_TK - self._first_expert
        is_near_TK = (near_TK >= 0) & (near_TK < self.near.num_experts)
        near = self.near.dispatch(x_TD, torch.where(is_near_TK, near_TK, -1), weights_TK)
        if isinstance(exchange, Exchange):
            exchange = Exchange(*(rows_PM.clone() for rows_PM in exchange))
            exchange.send_PM[self._domain] = 0
            exchange.receive_PM[self._domain] = 0
        far = self.far.dispatch(x_TD, torch.where(is_near_TK, -1, ids_TK), weights_TK, exchange)
        sizes = near.rows_RD.shape[0], far.rows_RD.shape[0]
        places = merged_places(near.counts_M, far.handle.receive_PM.long(), self._domain.start, *sizes)
        rows = _Merge.apply(near.rows_RD, far.rows_RD, places, near.make_rows)
        return Dispatched(
            rows, near.counts_M + far.counts_M, _Handle(places, (near.handle, near.make_rows), far.handle)
        )

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        near_handle, make_rows = handle.near
        near_CD, far_FD = _Split.apply(rows_RD, handle.places, make_rows)
        return self.near.combine(near_CD, near_handle) + self.far.combine(far_FD, handle.far)


def merged_places(near_L: torch.Tensor, receive_PL: torch.Tensor, first: int, num_near: int, num_far: int) -> Places:
    """Places of `num_near` (C) and `num_far` (F) rows, each sorted by expert and source.

    Args:
        near_L: rows of the domain for each local expert, int64; rows of C past their sum go to the end.
        receive_PL: rows of each rank of the group for them, int64; none of the domain's own.
        first: the domain's first rank.
    """
    before_L, far_L = receive_PL[:first].sum(0), receive_PL.sum(0)
    near_end_L, far_end_L = near_L.cumsum(0), far_L.cumsum(0)
    near_C = torch.arange(num_near, device=near_L.device)
    far_F = torch.arange(num_far, device=near_L.device)
    near_expert = torch.searchsorted(near_end_L, near_C, right=True)  # L: rows that belong to nobody
    far_expert = torch.searchsorted(far_end_L, far_F, right=True)
    # A row of the domain comes after the far rows of all experts before its own, and of ranks before the domain.
    ahead = torch.cat([far_end_L - far_L + before_L, far_end_L[-1:]])
    is_behind_F = far_F - (far_end_L - far_L)[far_expert] >= before_L[far_expert]
    ahead_F = torch.where(is_behind_F, near_end_L[far_expert], (near_end_L - near_L)[far_expert])
    return Places(near_C + ahead[near_expert], far_F + ahead_F)


def _merged(near_CD: torch.Tensor, far_FD: torch.Tensor, places: Places) -> torch.Tensor:
    rows = near_CD.new_empty(near_CD.shape[0] + far_FD.shape[0], near_CD.shape[1])
    return rows.index_copy_(0, places.near_C, near_CD).index_copy_(0, places.far_F, far_FD)


def _parts(rows_RD: torch.Tensor, places: Places, make_rows: RowMaker) -> tuple[torch.Tensor, torch.Tensor]:
    """The near ones in the memory from which the domain's ranks read them."""
    near_CD = torch.index_select(rows_RD, 0, places.near_C, out=make_rows(rows_RD.dtype))
    return near_CD, rows_RD.index_select(0, places.far_F)


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, near_CD, far_FD, places, make_rows):
        ctx.places, ctx.make_rows = places, make_rows
        return _merged(near_CD, far_FD, places)

    @staticmethod
    def backward(ctx, grad_RD):
        return *_parts(grad_RD, ctx.places, ctx.make_rows), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, places, make_rows):
        ctx.places = places
        return _parts(rows_RD, places, make_rows)

    @staticmethod
    def backward(ctx, grad_CD, grad_FD):
        return _merged(grad_CD, grad_FD, ctx.places), None, None
