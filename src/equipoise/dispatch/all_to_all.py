"""Dispatcher over two all-to-alls: each rank sends exactly the rows that the other ranks' experts need.

Works on every backend with `all_to_all_single` (Gloo, NCCL, MCCL, ...). One host sync per dispatch: the collective
takes its split sizes on the host. A known exchange saves the sync and the exchange of counts.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from equipoise.dispatch.base import AnyExchange, Dispatched, Exchange, GroupDispatcher
from equipoise.kernels.permute import Permutation, combine, make_permutation, permute, reorder


class _AllToAllRows(torch.autograd.Function):
    """Variable-size all-to-all of rows; its gradient is the all-to-all with the sizes swapped."""

    @staticmethod
    def forward(ctx, rows_RD, send_splits, receive_splits, group):
        ctx.splits, ctx.group = (send_splits, receive_splits), group
        out = rows_RD.new_empty(sum(receive_splits), rows_RD.shape[1])
        dist.all_to_all_single(out, rows_RD.contiguous(), receive_splits, send_splits, group=group)
        return out

    @staticmethod
    def backward(ctx, grad_RD):
        send_splits, receive_splits = ctx.splits
        out = grad_RD.new_empty(sum(send_splits), grad_RD.shape[1])
        dist.all_to_all_single(out, grad_RD.contiguous(), send_splits, receive_splits, group=ctx.group)
        return out, None, None, None


class _Handle(NamedTuple):
    permutation: Permutation
    weights_TK: torch.Tensor
    send_splits: list[int]
    receive_splits: list[int]
    receive_PM: torch.Tensor
    order_R: torch.Tensor
    inverse_R: torch.Tensor


def expert_major_order(counts_PM: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Order that turns rows sorted by (source rank, expert) into (expert, source rank), and its inverse (int64).

    `num_rows` is the sum of the counts, which the host knows; without it their sum would be a host sync.
    """
    num_ranks, num_experts = counts_PM.shape
    expert = torch.arange(num_experts, device=counts_PM.device).repeat(num_ranks)
    order_R = torch.argsort(expert.repeat_interleave(counts_PM.flatten(), output_size=num_rows), stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(order_R.numel(), device=order_R.device)
    return order_R, inverse_R


class AllToAllDispatcher(GroupDispatcher):
    """See the module docstring."""

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        permutation = make_permutation(ids_TK, self.num_experts)
        if not isinstance(exchange, Exchange):
            send_PM = permutation.counts_E.view(self.num_ranks, self.num_local_experts)
            receive_PM = torch.empty_like(send_PM)
            dist.all_to_all_single(receive_PM, send_PM.contiguous(), group=self.group)
        else:
            send_PM, receive_PM = exchange
        # The one host sync, unless the exchange is known: split sizes of both directions in one copy.
        send_splits, receive_splits = torch.stack([send_PM.sum(1), receive_PM.sum(1)]).tolist()
        receive_PM = receive_PM.to(x_TD.device, torch.int64)

        rows = permute(x_TD, permutation, num_rows=sum(send_splits))
        rows = _AllToAllRows.apply(rows, send_splits, receive_splits, self.group)
        order_R, inverse_R = expert_major_order(receive_PM, sum(receive_splits))
        if self.num_local_experts > 1:  # with one expert here the rows are in its order already
            rows = reorder(rows, order_R, inverse_R)
        handle = _Handle(permutation, weights_TK, send_splits, receive_splits, receive_PM, order_R, inverse_R)
        return Dispatched(rows, receive_PM.sum(0), handle)

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        if self.num_local_experts > 1:
            rows_RD = reorder(rows_RD, handle.inverse_R, handle.order_R)
        rows = _AllToAllRows.apply(rows_RD, handle.receive_splits, handle.send_splits, self.group)
        return combine(rows, handle.weights_TK, handle.permutation)
