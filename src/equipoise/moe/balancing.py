"""Exact-load balancing of one MoE layer: the balancer's calls, in the order of a layer. Imported only when it is on.

Shapes: T tokens, D features, K experts per token, R rows, M + R physical experts here.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from equipoise.balance import Attached, Balancer, Entered, Step
from equipoise.dispatch.base import DeviceExchange, Exchange
from equipoise.kernels.rows import RowMaker
from equipoise.moe.experts import Experts
from equipoise.moe.replay import LayerReplay
from equipoise.moe.router import Routing

GATE_UP, DOWN = "gate_up_proj", "down_proj"


def expert_shapes(hidden_size: int, intermediate_size: int) -> dict[str, tuple[int, int]]:
    """Weights of one expert, by name, as the balancer takes them."""
    return {GATE_UP: (2 * intermediate_size, hidden_size), DOWN: (hidden_size, intermediate_size)}


@dataclass(frozen=True)
class EnteredExperts:
    """Both weights at the start of the layer. ahead: the microbatch's experts, placed already where its load is known
    before the layer's forward."""

    gate_up: Entered
    down: Entered
    ahead: "BalancedExperts | None" = None


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

    def experts(
        self,
        rows_RD: torch.Tensor,
        counts_M: torch.Tensor,
        make_rows: RowMaker | None = None,
        weights_R: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """In place of `Experts`; rows and counts are those of the physical experts here."""
        return self.step.grouped_mlp(rows_RD, counts_M, self.gate_up, self.down, self.kernel, make_rows, weights_R)

    def leave(self, y_TD: torch.Tensor) -> torch.Tensor:
        """On the combined output."""
        return self.step.leave(y_TD)


class ExpertBalancing:
    """Joins a layer's experts, which stay as they are, to the balancer of the EP group."""

    def __init__(self, balancer: Balancer, layer: int, experts: Experts) -> None:
        self.balancer, self.layer, self.weights = balancer, layer, experts

    def enter(
        self, microbatch: int = 0, replay: LayerReplay | None = None, valid: torch.Tensor | None = None
    ) -> EnteredExperts:
        """At the start of the decoder layer. With a complete replay the replicas are placed now, and their weights are
        on the way while attention runs; `valid` (bool) marks the real tokens."""
        entered = EnteredExperts(
            self.balancer.enter(GATE_UP, self.weights.gate_up_proj), self.balancer.enter(DOWN, self.weights.down_proj)
        )
        if replay is None or not replay.is_complete:
            return entered
        return replace(entered, ahead=self._place(_known_ids(replay, valid), None, microbatch, entered))

    def plan_ahead(
        self,
        layers: "Sequence[ExpertBalancing]",
        replays: Sequence[LayerReplay],
        valid: torch.Tensor | None,
        microbatch: int,
    ) -> None:
        """Plans for layers of complete replays with one exchange of counts. Collective over the EP group."""
        keys = [(layer.layer, microbatch) for layer in layers]
        self.balancer.plan_ahead(keys, [_known_ids(replay, valid) for replay in replays])

    def route(self, routing: Routing, microbatch: int, entered: EnteredExperts | None) -> BalancedExperts:
        """Places replicas for one microbatch and starts to send them their weights, unless that was done ahead."""
        entered = entered or self.enter()
        ahead = entered.ahead
        on_host = routing.ids_TK.device.type == "cpu"  # elsewhere the comparison would be a host sync
        if ahead is not None and on_host and not torch.equal(routing.ids_TK, ahead.step.ids_TK):
            raise RuntimeError(f"{ahead.step.where}: the router followed other experts than those planned ahead")
        return ahead or self._place(routing.ids_TK, routing.counts_E, microbatch, entered)

    def _place(
        self, ids_TK: torch.Tensor, counts_E: torch.Tensor | None, microbatch: int, entered: EnteredExperts
    ) -> BalancedExperts:
        step = self.balancer.route(ids_TK, (self.layer, microbatch), counts_E)
        return BalancedExperts(
            step, step.attach(GATE_UP, entered.gate_up), step.attach(DOWN, entered.down), self.weights.kernel
        )


def _known_ids(replay: LayerReplay, valid: torch.Tensor | None) -> torch.Tensor:
    """What the router will say: the recorded experts, and none for padding."""
    return replay.ids_TK if valid is None else torch.where(valid.view(-1, 1), replay.ids_TK, -1)
