"""Adapter of DeepEP (github.com/deepseek-ai/DeepEP), imported only when it is chosen. Not run on a GPU by this project.

DeepEP sends a token once to each rank that has experts of it, and sums over ranks in its own kernels; within a rank,
rows are sorted by expert and summed here. So a token's sum is rounded once per rank and once in the end, and results
differ from the other dispatchers' by rounding. Written for the interface of DeepEP 1.x: `Buffer.get_dispatch_layout`,
`dispatch`, `combine`, in the modes for training; `dispatch` waits on the host for the number of rows.

Shapes: T tokens, K slots per token, D features, R tokens received, P ranks, M = E / P experts per rank.
"""

from typing import Any, NamedTuple

import torch

from equipoise.dispatch.base import AnyExchange, Dispatched, GroupDispatcher
from equipoise.distributed.collectives import Group
from equipoise.errors import ConfigError
from equipoise.kernels.permute import Permutation, combine, make_permutation, permute


class _Handle(NamedTuple):
    permutation: Permutation
    weights_RK: torch.Tensor
    theirs: Any


class _Dispatch(torch.autograd.Function):
    """Tokens to ranks; the backward sums what comes back of them and of their weights."""

    @staticmethod
    def forward(ctx, x_TD, weights_TK, ids_TK, dispatcher, handles):
        buffer, ids_TK = dispatcher.buffer(x_TD), ids_TK.long()
        per_rank, per_node, per_expert, is_in_rank, _ = buffer.get_dispatch_layout(ids_TK, dispatcher.num_experts)
        rows_RD, ids_RK, weights_RK, _, handle, _ = buffer.dispatch(
            x_TD.contiguous(),
            topk_idx=ids_TK,
            topk_weights=weights_TK.float(),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
        )
        ctx.buffer, ctx.handle, ctx.dtype = buffer, handle, weights_TK.dtype
        handles.append(handle)
        ctx.mark_non_differentiable(ids_RK)
        return rows_RD, ids_RK, weights_RK

    @staticmethod
    def backward(ctx, grad_RD, _, grad_RK):
        grad_TD, grad_TK, _ = ctx.buffer.combine(grad_RD.contiguous(), ctx.handle, topk_weights=grad_RK.float())
        return grad_TD, grad_TK.to(ctx.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """Sums over ranks; the backward sends each token's gradient to the ranks that its sum came from."""

    @staticmethod
    def forward(ctx, y_RD, dispatcher, handle):
        ctx.buffer, ctx.handle = dispatcher.buffer(y_RD), handle
        return ctx.buffer.combine(y_RD.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, grad_TD):
        return ctx.buffer.dispatch(grad_TD.contiguous(), handle=ctx.handle)[0], None, None


class DeepEPDispatcher(GroupDispatcher):
    """See the module docstring.

    Raises:
        ConfigError: DeepEP is not installed.
    """

    def __init__(self, num_experts: int, group: Group) -> None:
        super().__init__(num_experts, group)
        try:
            import deep_ep
        except ImportError as error:
            raise ConfigError(
                f"dispatcher 'deepep' needs the package deep_ep, which cannot be imported ({error}): install it from "
                "its repository for your CUDA and torch, or choose symmetric or all_to_all"
            ) from error
        self._deep_ep = deep_ep
        self._buffer: Any = None

    def buffer(self, x_TD: torch.Tensor) -> Any:
        """DeepEP's communication buffer, made for the first rows: sizes by its own hints for this width."""
        if self._buffer is None:
            kind, row_bytes = self._deep_ep.Buffer, x_TD.shape[1] * max(x_TD.element_size(), 2)
            configs = kind.get_dispatch_config(self.num_ranks), kind.get_combine_config(self.num_ranks)
            near = max(config.get_nvl_buffer_size_hint(row_bytes, self.num_ranks) for config in configs)
            far = max(config.get_rdma_buffer_size_hint(row_bytes, self.num_ranks) for config in configs)
            self._buffer = kind(self.group, near, far)
        return self._buffer

    def dispatch(
        self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor, exchange: AnyExchange = None
    ) -> Dispatched:
        handles: list[Any] = []
        rows_RD, ids_RK, weights_RK = _Dispatch.apply(x_TD, weights_TK, ids_TK, self, handles)
        permutation = make_permutation(ids_RK, self.num_local_experts)
        rows = permute(rows_RD, permutation)
        return Dispatched(rows, permutation.counts_E, _Handle(permutation, weights_RK, handles[0]))

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        y_RD = combine(rows_RD, handle.weights_RK, handle.permutation)
        return _Combine.apply(y_RD, self, handle.theirs)
