"""Dispatcher over all-gather and reduce-scatter: every rank sees all tokens and computes its experts' share.

Moves more bytes than all-to-all (P * T rows each way, whatever the routing), but in two regular collectives that
every backend has, and no rank waits for split sizes that depend on routing. For small groups and for backends
with a weak all-to-all.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist

from equipoise.dispatch.base import AnyExchange, Dispatched, GroupDispatcher
from equipoise.distributed.collectives import Group
from equipoise.kernels.permute import Permutation, combine, make_permutation, permute


def _all_gather(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Sum over ranks in FP32 of this rank's block, in the dtype of x."""
    total = x.float().contiguous()
    out = total.new_empty(x.shape[0] // dist.get_world_size(group), *x.shape[1:])
    dist.reduce_scatter_tensor(out, total, group=group)
    return out.to(x.dtype)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _reduce_scatter(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, grad):
        return _all_gather(grad, ctx.group), None


class _Handle(NamedTuple):
    permutation: Permutation
    weights_GK: torch.Tensor
    num_tokens: int


class AllGatherDispatcher(GroupDispatcher):
    """See the module docstring. G = P * max T gathered tokens; ranks with fewer tokens are padded with id -1."""

    def __init__(self, num_experts: int, group: Group) -> None:
        super().__init__(num_experts, group)
        self.rank = dist.get_rank(self.group)

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        num_tokens = x_TD.shape[0]
        largest = torch.full((1,), num_tokens, device=x_TD.device)  # filled there: a copy would be a host sync
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=self.group)
        padding = int(largest) - num_tokens  # the one host sync: the common number of tokens
        if padding:
            x_TD = torch.nn.functional.pad(x_TD, (0, 0, 0, padding))
            ids_TK = torch.nn.functional.pad(ids_TK, (0, 0, 0, padding), value=-1)
            weights_TK = torch.nn.functional.pad(weights_TK, (0, 0, 0, padding))
        x_GD = _AllGather.apply(x_TD, self.group)
        weights_GK = _AllGather.apply(weights_TK, self.group)
        local_GK = _all_gather(ids_TK, self.group).long() - self.rank * self.num_local_experts
        local_GK = torch.where((local_GK >= 0) & (local_GK < self.num_local_experts), local_GK, -1)
        permutation = make_permutation(local_GK, self.num_local_experts)
        num_rows = int(permutation.counts_E.sum())  # a second sync: only this rank's rows are kept
        rows = permute(x_GD, permutation, num_rows=num_rows)
        return Dispatched(rows, permutation.counts_E, _Handle(permutation, weights_GK, num_tokens))

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        y_GD = combine(rows_RD, handle.weights_GK, handle.permutation, dtype=torch.float32)
        return _ReduceScatter.apply(y_GD, self.group)[: handle.num_tokens].to(rows_RD.dtype)
