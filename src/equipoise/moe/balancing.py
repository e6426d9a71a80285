"""Exact-load balancing of one MoE layer: the balancer's calls, in the order of a layer. Imported only when it is on.

Shapes: T tokens, D features, K experts per token, R rows, M + R physical experts here.
"""

from dataclasses import dataclass

import torch

from equipoise.balance import Attached, Balancer, Entered, Step
from equipoise.dispatch.base import DeviceExchange, Exchange
from equipoise.moe.experts import Experts
from equipoise.moe.router import Routing

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def expert_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Weights of one expert, by name, as the balancer takes them."""
    return {GATE_UP: (2 * intermediate_size, hidden_size), DOWN: (hidden_size, intermediate_size)}


@dataclass(frozen=True)
class EnteredExperts:
    """Both weights at the start of the layer."""

    gate_up: Entered
    down: Entered


@dataclass(frozen=True)
class BalancedExperts:
    """One microbatch's experts: masters and replicas."""

    step: Step
    gate_up: Attached
    down: Attached
    kernel: str

    @property
    def physical_ids_TK(self) -> torch.Tensor:
        return self.step.physical_ids_TK

    @property
    def exchange(self) -> Exchange | DeviceExchange | None:
        """Rows that the plan moves: the dispatcher need not ask for them."""
        if self.step.device_exchange is not None:
            return DeviceExchange(*self.step.device_exchange)
        return None if self.step.exchange is None else Exchange(*self.step.exchange)

    def experts(self, rows_RD: torch.Tensor, counts_M: torch.Tensor) -> torch.Tensor:
        """In place of `Experts`; rows and counts are those of the physical experts here."""
        return self.step.grouped_mlp(rows_RD, counts_M, self.gate_up, self.down, self.kernel)

    def leave(self, y_TD: torch.Tensor) -> torch.Tensor:
        """On the combined output."""
        return self.step.leave(y_TD)


class ExpertBalancing:
    """Joins a layer's experts, which stay as they are, to the balancer of the EP group."""

    def __init__(self, balancer: Balancer, layer: int, experts: Experts) -> None:
        self.balancer, self.layer, self.weights = balancer, layer, experts

    def enter(self) -> EnteredExperts:
        """At the start of the decoder layer."""
        return EnteredExperts(
            self.balancer.enter(GATE_UP, self.weights.gate_up_proj), self.balancer.enter(DOWN, self.weights.down_proj)
        )

    def route(self, routing: Routing, microbatch: int, entered: EnteredExperts | None) -> BalancedExperts:
        """Places replicas for one microbatch and starts to send them their weights."""
        entered = entered or self.enter()
        step = self.balancer.route(routing.ids_TK, (self.layer, microbatch), routing.counts_E)
        return BalancedExperts(
            step, step.attach(GATE_UP, entered.gate_up), step.attach(DOWN, entered.down), self.weights.kernel
        )
