"""The MoE layer: router, dispatcher, experts, and the shared experts beside them.

Shapes: B sequences, S tokens each, D features, T = B * S.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from equipoise.dispatch.base import Dispatcher
from equipoise.kernels.ranges import named_range
from equipoise.moe.beside import Beside, SideStream
from equipoise.moe.experts import Experts
from equipoise.moe.replay import LayerReplay
from equipoise.moe.router import Router, Routing

if TYPE_CHECKING:
    from equipoise.balance import Placement
    from equipoise.moe.balancing import EnteredExperts, ExpertBalancing


class LayerObserver(Protocol):
    """Sees what a MoE layer does; changes nothing. Called again when a forward is run again in a backward."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Surrounds a part of the forward: router, balance, dispatch, experts, combine."""
        ...

    def finish(
        self, routing: Routing, num_sequences: int, counts_m: torch.Tensor, placement: "Placement | None"
    ) -> None:
        """At the end of a forward. counts_m: rows that arrived for each physical expert here; placement: None without
        balancing."""
        ...


def _no_phase(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class MoELayer(nn.Module):
    """Drop-in for a feed-forward block; also returns the routing, which callers use for losses and load metrics.

    `dispatcher` is set by whoever builds the model (it depends on the process group, not on the weights), and so is
    `balancing`: None routes every token to its expert's home.
    """

    def __init__(self, gate: Router, experts: Experts, shared_experts: nn.Module | None, dispatcher: Dispatcher):
        super().__init__()
        self.gate, self.experts, self.shared_experts = gate, experts, shared_experts
        self.beside = None if shared_experts is None else Beside()
        self.dispatcher = dispatcher
        self.balancing: ExpertBalancing | None = None
        self.observer: LayerObserver | None = None

    def overlap_shared_experts(self, side: SideStream) -> None:
        """From now on the shared experts, if there are any, run on this stream beside dispatch and combine."""
        if self.shared_experts is not None and self.beside is not None:
            forward = self.beside.overlap(side, self.shared_experts.forward)
            self.shared_experts.forward = forward  # type: ignore[method-assign]

    def forward(
        self,
        x_BSD: torch.Tensor,
        valid_BS: torch.Tensor | None = None,
        microbatch: int = 0,
        entered: "EnteredExperts | None" = None,
        replay: LayerReplay | None = None,
    ) -> tuple[torch.Tensor, Routing]:
        """Balancing needs `microbatch`, different for all whose backward is still to come, and `entered`, what
        `balancing.enter` gave at the start of the decoder layer. `replay`: recorded experts to be followed."""
        x_TD = x_BSD.flatten(0, 1)
        phase = _no_phase if self.observer is None else self.observer.phase
        with named_range("moe.router"), phase("router"):
            routing = self.gate(x_TD, None if valid_BS is None else valid_BS.flatten(), replay)
        ids_TK, exchange, step = routing.ids_TK, None, None
        experts: Callable[..., torch.Tensor] = self.experts
        if self.balancing is not None:
            with phase("balance"):
                step = self.balancing.route(routing, microbatch, entered)
                ids_TK, exchange, experts = step.physical_ids_TK, step.exchange, step.experts
        forked_TD, region = x_TD, None
        if self.beside is not None:
            forked_TD, region = self.beside.fork(x_TD)
        with named_range("moe.dispatch"), phase("dispatch"):
            arrived = self.dispatcher.dispatch(x_TD, ids_TK, routing.weights_TK, exchange)
        shared_TD = None
        if self.shared_experts is not None:  # launched behind the dispatch, which gets its share of the device first
            with named_range("moe.shared"):
                shared_TD = self.shared_experts(forked_TD)
        with named_range("moe.experts"), phase("experts"):
            rows_RD = experts(arrived.rows_RD, arrived.counts_M, arrived.make_rows, arrived.weights_R)
        with named_range("moe.combine"), phase("combine"):
            y_TD = self.dispatcher.combine(rows_RD, arrived.handle)
        if self.observer is not None:
            placement = None if step is None else step.step.plan.placement
            self.observer.finish(routing, x_BSD.shape[0], arrived.counts_M, placement)
        if step is not None:
            y_TD = step.leave(y_TD)
        if self.beside is not None:
            y_TD = self.beside(y_TD, shared_TD, region)
        return y_TD.view(x_BSD.shape), routing
