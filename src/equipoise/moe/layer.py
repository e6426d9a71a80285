"""The MoE layer: router, dispatcher, experts, and the shared experts beside them.

Shapes: B sequences, S tokens each, D features, T = B * S.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.profiler import record_function

from equipoise.dispatch.base import Dispatcher
from equipoise.moe.experts import Experts
from equipoise.moe.router import Router, Routing

if TYPE_CHECKING:
    from equipoise.moe.balancing import EnteredExperts, ExpertBalancing


class MoELayer(nn.Module):
    """Drop-in for a feed-forward block; also returns the routing, which callers use for losses and load metrics.

    `dispatcher` is set by whoever builds the model (it depends on the process group, not on the weights), and so is
    `balancing`: None routes every token to its expert's home.
    """

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module | None, dispatcher: Dispatcher):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.dispatcher = dispatcher
        self.balancing: ExpertBalancing | None = None

    def forward(
        self,
        x_BSD: torch.Tensor,
        valid_BS: torch.Tensor | None = None,
        microbatch: int = 0,
        entered: "EnteredExperts | None" = None,
    ) -> tuple[torch.Tensor, Routing]:
        """Balancing needs `microbatch`, different for all whose backward is still to come, and `entered`, what
        `balancing.enter` gave at the start of the decoder layer."""
        x_TD = x_BSD.flatten(0, 1)
        with record_function("moe.router"):
            routing = self.gate(x_TD, None if valid_BS is None else valid_BS.flatten())
        ids_TK, exchange, step = routing.ids_TK, None, None
        experts: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = self.experts
        if self.balancing is not None:
            step = self.balancing.route(routing, microbatch, entered)
            ids_TK, exchange, experts = step.physical_ids_TK, step.exchange, step.experts
        with record_function("moe.dispatch"):
            arrived = self.dispatcher.dispatch(x_TD, ids_TK, routing.weights_TK, exchange)
        with record_function("moe.experts"):
            rows_RD = experts(arrived.rows_RD, arrived.counts_M)
        with record_function("moe.combine"):
            y_TD = self.dispatcher.combine(rows_RD, arrived.handle)
        if step is not None:
            y_TD = step.leave(y_TD)
        if self.shared_experts is not None:
            y_TD = y_TD + self.shared_experts(x_TD)
        return y_TD.view(x_BSD.shape), routing
