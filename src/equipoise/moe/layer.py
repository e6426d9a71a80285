"""The MoE layer: router, dispatcher, experts, and the shared experts beside them.

Shapes: B sequences, S tokens each, D features, T = B * S.
"""

import torch
from torch import nn
from torch.profiler import record_function

from equipoise.dispatch.base import Dispatcher
from equipoise.moe.experts import Experts
from equipoise.moe.router import Router, Routing


class MoELayer(nn.Module):
    """Drop-in for a feed-forward block; also returns the routing, which callers use for losses and load metrics.

    `dispatcher` is set by whoever builds the model (it depends on the process group, not on the weights).
    """

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module | None, dispatcher: Dispatcher):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.dispatcher = dispatcher

    def forward(self, x_BSD: torch.Tensor, valid_BS: torch.Tensor | None = None) -> tuple[torch.Tensor, Routing]:
        x_TD = x_BSD.flatten(0, 1)
        with record_function("moe.router"):
            routing = self.gate(x_TD, None if valid_BS is None else valid_BS.flatten())
        with record_function("moe.dispatch"):
            arrived = self.dispatcher.dispatch(x_TD, routing.ids_TK, routing.weights_TK)
        with record_function("moe.experts"):
            rows_RD = self.experts(arrived.rows_RD, arrived.counts_M)
        with record_function("moe.combine"):
            y_TD = self.dispatcher.combine(rows_RD, arrived.handle)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view(x_BSD.shape), routing
