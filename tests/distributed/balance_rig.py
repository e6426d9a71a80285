"""A foreign MoE layer that uses only the library, on the ranks of a world, and the same without balancing.

The layer belongs to nobody here: its router is a linear layer with torch's top-k, its dispatcher two all-to-alls, its
products the library's. With `bias` its experts are like gpt-oss's, and those without balancing use torch's grouped_mm.
Shapes: T tokens, D features, K experts per token, E experts, R rows.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from equipoise.balance import BalanceConfig, Balancer, device_planner, planner_host
from equipoise.dispatch import build_dispatcher
from equipoise.dispatch.base import DeviceExchange

E, D, K, INNER = 8, 16, 2, 24
WEIGHTS: dict[str, tuple[int, ...]] = {"up": (2 * INNER, D), "down": (D, INNER)}
BIASES: dict[str, tuple[int, ...]] = {"up_bias": (2 * INNER,), "down_bias": (D,)}


def few_candidates() -> None:
    """Plans of two candidates from now on, on the host and in kernels: Triton's interpreter runs one after another."""
    for module in (planner_host, device_planner):
        module.TARGET_STEPS, module.VARIANTS = (0,), module.VARIANTS[:1]  # type: ignore[attr-defined]


class ForeignLayer(nn.Module):
    """`balancer` None is plain expert parallelism. Holds this rank's experts; all ranks make the same weights.

    Options: stacked: one tensor per weight, or one per expert. hooks: the optional calls of the library. numbered: the
    host gives layers and microbatches a key. bias: see above. padded: each expert's rows are a multiple of 4, and rows
    of NaN that belong to nobody follow. mesh: weights are DTensors over it. dispatchers: ready-made ones.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        balancer: Balancer | None,
        *,
        layer: int = 0,
        dispatcher: str = "all_to_all",
        heat: float = 2.0,
        moving: bool = False,
        stacked: bool = True,
        hooks: bool = True,
        numbered: bool = True,
        kernel: str = "loop",
        dtype: torch.dtype = torch.float32,
        bias: bool = False,
        padded: bool = False,
        mesh: DeviceMesh | None = None,
        dispatchers: dict[bool, Any] | None = None,
    ) -> None:
        super().__init__()
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        self.balancer, self.layer, self.hooks, self.numbered, self.kernel = balancer, layer, hooks, numbered, kernel
        self.bias, self.padded, self.mesh = bias, padded, None if balancer is None else mesh
        self.moves = E // size if moving else 0  # experts by which the heat moves from microbatch to microbatch
        number = E if balancer is None else balancer.num_physical_experts
        if dispatchers is None:
            self.dispatcher = build_dispatcher(dispatcher, number, group)  # type: ignore[arg-type]
        else:  # ready-made, by whether there is a balancer
            self.dispatcher = dispatchers[balancer is not None]
        generator = torch.Generator().manual_seed(100 + layer)
        make = lambda *shape: torch.randn(*shape, generator=generator) / shape[-1] ** 0.5  # noqa: E731
        self.attention = nn.Parameter(make(D, D).to(dtype))
        self.gate = nn.Parameter(make(E, D).to(dtype))
        self.register_buffer("heat", torch.zeros(E).index_fill_(0, torch.arange(E // size), heat), persistent=False)
        self.weights = nn.ModuleDict()
        for name, shape in (WEIGHTS | BIASES if bias else WEIGHTS).items():
            mine = make(E, *shape).to(dtype)[rank * E // size : (rank + 1) * E // size].clone()
            self.weights[name] = nn.ParameterList([mine] if stacked else [w.clone() for w in mine])
        self.stacked = stacked
        self.num_routed = 0

    def masters(self, name: str) -> Any:
        tensors = list(self.weights[name])  # type: ignore[call-overload]
        if not self.stacked:
            return tensors
        return tensors[0] if self.mesh is None else DTensor.from_local(tensors[0], self.mesh, [Shard(0)])

    def forward(self, x_TD: torch.Tensor, microbatch: int = 0) -> torch.Tensor:
        masters = {name: self.masters(name) for name in self.weights}
        if self.balancer is not None and self.hooks:
            masters = {name: self.balancer.enter(name, weight) for name, weight in masters.items()}
        x_TD = x_TD + torch.tanh(x_TD @ self.attention)
        scores_TE = (x_TD.float() @ self.gate.float().T).softmax(-1)
        ids_TK = (scores_TE.detach() + self.heat.roll(microbatch * self.moves)).topk(K).indices
        weights_TK = scores_TE.gather(1, ids_TK)
        self.num_routed += 1
        if self.balancer is None:
            arrived = self.dispatcher.dispatch(x_TD, ids_TK, weights_TK)
            hidden = self.plain_product(arrived.rows_RD, arrived.counts_M, "up")
            out = self.plain_product(self.activation(hidden), arrived.counts_M, "down")
            return x_TD + self.dispatcher.combine(out, arrived.handle)
        step = self.balancer.route(ids_TK, key=(self.layer, microbatch) if self.numbered else None)
        attached = {name: step.attach(name, weight) for name, weight in masters.items()}
        known = None if step.device_exchange is None else DeviceExchange(*step.device_exchange)
        arrived = self.dispatcher.dispatch(x_TD, step.physical_ids_TK, weights_TK, known)
        assert arrived.counts_M.tolist() == step.counts, "what is delivered is what was planned"
        rows, counts, places_R = arrived.rows_RD, arrived.counts_M, None
        if self.padded:
            rows, counts, places_R = pad(rows, step.counts)  # type: ignore[assignment]
        hidden = step.grouped_linear(rows, counts, attached["up"], self.kernel, attached.get("up_bias"))
        hidden = self.activation(hidden)
        out = step.grouped_linear(hidden, counts, attached["down"], self.kernel, attached.get("down_bias"))
        y_TD = self.dispatcher.combine(out if places_R is None else out[places_R], arrived.handle)
        return x_TD + (step.leave(y_TD) if self.hooks else y_TD)

    def activation(self, hidden: torch.Tensor) -> torch.Tensor:
        if not self.bias:
            gate, up = hidden.chunk(2, -1)
            return F.gelu(gate) * up  # not ours
        gate, up = hidden[:, ::2].clamp(max=0.7), hidden[:, 1::2].clamp(-0.7, 0.7)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)

    def plain_product(self, rows: torch.Tensor, counts: torch.Tensor, name: str) -> torch.Tensor:
        weight = self.masters(name)
        if not self.bias:
            return torch.cat([part @ w.T for part, w in zip(rows.split(counts.tolist()), weight)])
        weight, bias = (w if self.stacked else torch.stack(w) for w in (weight, self.masters(f"{name}_bias")))
        one_more = F.pad(rows, (0, 0, 0, 1))  # grouped_mm refuses to work on no rows
        out = F.grouped_mm(one_more, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))[:-1]
        return out + bias.repeat_interleave(counts, 0)


def pad(rows: torch.Tensor, counts: list[int]) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """Rows with room for a multiple of 4 for each expert and 3 rows of NaN behind, their counts, the rows' places."""
    padded = [-(-count // 4) * 4 for count in counts]
    starts = [sum(padded[:i]) for i in range(len(padded))]
    places_R = torch.tensor([start + i for start, count in zip(starts, counts) for i in range(count)], dtype=torch.long)
    more = rows.new_zeros(sum(padded) + 3, rows.shape[1])
    more[sum(padded) :] = float("nan")
    return more.index_put((places_R,), rows), padded, places_R


def make_balancer(group: dist.ProcessGroup, slots: int = 1, dtype: torch.dtype = torch.float32, **config) -> Balancer:
    settings = BalanceConfig(**{"num_redundant_experts_per_rank": slots, "tolerance": 0.0, **config})
    return Balancer(group, E, WEIGHTS | BIASES, dtype, settings)


def tokens(rank: int, microbatch: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + microbatch)
    return torch.randn(number, D, generator=generator).to(dtype)
