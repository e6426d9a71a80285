"""A foreign MoE layer that uses only the library, on the ranks of a world, and the same without balancing.

The layer belongs to nobody here: its router is a linear layer with torch's top-k, its dispatcher two all-to-alls, its
products the library's. Shapes: T tokens, D features, K experts per token, E experts.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from equipoise.balance import BalanceConfig, Balancer
from equipoise.dispatch import build_dispatcher

E, D, K, INNER = 8, 16, 2, 24


class ForeignLayer(nn.Module):
    """`balancer` None is plain expert parallelism. Holds this rank's experts; all ranks make the same weights."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        balancer: Balancer | None,
        *,
        layer: int = 0,
        dispatcher: str = "all_to_all",
        heat: float = 2.0,
        stacked: bool = True,
        hooks: bool = True,
        kernel: str = "loop",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.balancer, self.layer, self.hooks, self.kernel = balancer, layer, hooks, kernel
        number = E if balancer is None else balancer.num_physical_experts
        self.dispatcher = build_dispatcher(dispatcher, number, group)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(100 + layer)
        make = lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5  # noqa: E731
        self.attention = nn.Parameter(make(D, D).to(dtype))
        self.gate = nn.Parameter(make(E, D).to(dtype))
        self.register_buffer("heat", torch.zeros(E).index_fill_(0, torch.arange(E // size), heat), persistent=False)
        first, last = rank * E // size, (rank + 1) * E // size
        up, down = make(E, 2 * INNER, D).to(dtype)[first:last].clone(), make(E, D, INNER).to(dtype)[first:last].clone()
        if stacked:
            self.up, self.down = nn.Parameter(up), nn.Parameter(down)
        else:
            self.up, self.down = (nn.ParameterList(nn.Parameter(w.clone()) for w in t) for t in (up, down))
        self.num_routed = 0

    def masters(self, weight: Any) -> Any:
        return list(weight) if isinstance(weight, nn.ParameterList) else weight

    def forward(self, x_TD: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        up, down = self.masters(self.up), self.masters(self.down)
        if self.balancer is not None and self.hooks:
            up, down = self.balancer.enter("up", up), self.balancer.enter("down", down)
        x_TD = x_TD + torch.tanh(x_TD @ self.attention)
        scores_TE = (x_TD.float() @ self.gate.float().T).softmax(-1)
        ids_TK = (scores_TE.detach() + self.heat).topk(K).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        self.num_routed += 1
        if self.balancer is None:
            arrived = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
            hidden = self._products(arrived.rows_RD, self.up, arrived.counts_M)
            out = self._products(self.activation(hidden), self.down, arrived.counts_M)
            return x_TD + self.dispatcher.combine(out, arrived.handle)
        step = self.balancer.route(ids_TK, key=(self.layer, microbatch))
        attached_up, attached_down = step.attach("up", up), step.attach("down", down)
        arrived = self.dispatcher.dispatch(x_TD, step.physical_ids_TK, weights_TK)
        assert arrived.counts_M.tolist() == step.counts, "what is delivered is what was planned"
        hidden = step.grouped_linear(arrived.rows_RD, arrived.counts_M, attached_up, self.kernel)
        out = step.grouped_linear(self.activation(hidden), arrived.counts_M, attached_down, self.kernel)
        y_TD = self.dispatcher.combine(out, arrived.handle)
        return x_TD + (step.leave(y_TD) if self.hooks else y_TD)

    @staticmethod
    def activation(hidden: torch.Tensor) -> torch.Tensor:
        gate, up = hidden.chunk(2, -1)
        return F.gelu(gate) * up  # not ours

    @staticmethod
    def _products(rows: torch.Tensor, weight: Any, counts: torch.Tensor) -> torch.Tensor:
        parts = rows.split(counts.tolist())
        return torch.cat([part @ w.T for part, w in zip(parts, weight)])


def make_balancer(group: dist.ProcessGroup, slots: int = 1, dtype: torch.dtype = torch.float32, **config) -> Balancer:
    settings = BalanceConfig(**{"num_redundant_experts_per_rank": slots, "tolerance": 0.0, **config})
    return Balancer(group, E, {"up": (2 * INNER, D), "down": (D, INNER)}, dtype, settings)


def tokens(rank: int, microbatch: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + microbatch)
    return torch.randn(number, D, generator=generator).to(dtype)
