"""Dispatcher of an EP group of one rank: sorts tokens by expert; nothing moves between ranks."""

from typing import NamedTuple

import torch

from equipoise.dispatch.base import AnyExchange, Dispatched
from equipoise.kernels.permute import Permutation, combine, make_permutation, permute, weights_of_rows


class _Handle(NamedTuple):
    permutation: Permutation
    weights_TK: torch.Tensor | None


class LocalDispatcher:
    """All experts are here. Keeps T * K rows whatever the ids, so it never waits for the device.

    weighs_rows: experts get the rows' weights and multiply by them. Then no output has to be kept for the weights'
    gradient, which kernel `triton` makes on its way.
    """

    def __init__(self, num_experts: int, weighs_rows: bool = False) -> None:
        self.num_local_experts, self.weighs_rows = num_experts, weighs_rows

    def dispatch(
        self,
        x_TD: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        exchange: AnyExchange = None,
    ) -> Dispatched:
        permutation = make_permutation(ids_TK, self.num_local_experts)
        rows = permute(x_TD, permutation)
        if self.weighs_rows:
            weights_R = weights_of_rows(weights_TK, permutation)
            return Dispatched(rows, permutation.counts_E, _Handle(permutation, None), weights_R=weights_R)
        return Dispatched(rows, permutation.counts_E, _Handle(permutation, weights_TK))

    def combine(self, rows_RD: torch.Tensor, handle: _Handle) -> torch.Tensor:
        return combine(rows_RD, handle.weights_TK, handle.permutation)
