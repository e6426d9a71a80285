"""Dispatcher of an EP group of one rank: sorts tokens by expert; nothing moves between ranks."""

from typing import NamedTuple

import torch

from equipoise.dispatch.base import AnyExchange, Dispatched
from equipoise.kernels.permute import Permutation, combine, make_permutation, permute


class _Handle(NamedTuple):
    permutation: Permutation
    weights_TK: torch.Tensor


class LocalDispatcher:
    """All experts are here. Keeps T * K rows whatever the ids, so it never waits for the device."""

    def __init__(self, num_experts: int) -> None:
        self.num_local_experts = num_experts

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        permutation = make_permutation(ids_TK, self.num_local_experts)
        rows = permute(x_TD, permutation)
        return Dispatched(rows, permutation.counts_E, _Handle(permutation, weights_TK))

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        return combine(rows_RD, handle.weights_TK, handle.permutation)
