"""Balancing inside transformers' own expert parallelism: an entry in its registry of EP implementations.

Call `register`, then load a model with `DistributedConfig(ep_implementation="equipoise", ...)`; there is an example in
docs/integrations.md. No block of a model is replaced. Shapes: T tokens, D features, K experts per token.
"""

from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch.distributed.device_mesh import DeviceMesh

from equipoise.accelerator import initialize_accelerator
from equipoise.balance import BalanceConfig, Balancer
from equipoise.dispatch import Dispatcher, build_dispatcher
from equipoise.dispatch.base import Exchange
from equipoise.errors import ConfigError

_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()  # one for all layers of an EP group


class BalancedEP:
    """The experts of one layer and their dispatch, balanced. transformers makes and calls it."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, config: BalanceConfig) -> None:
        if tp_mesh.size() > 1 or experts.has_post_expert_norm:
            raise ConfigError("balancing in transformers needs tp_size 1 (raise fsdp_size) and experts without a norm")
        self.experts, self.mesh, self.config = experts, ep_mesh, config
        self.up, down = "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"
        self.names = [name + end for end in ("", "_bias")[: 1 + experts.has_bias] for name in (self.up, down)]
        self.activation = experts._apply_gate if experts.has_gate else experts.act_fn
        self.parts: tuple[Balancer, Dispatcher] | None = None

    def __call__(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """y_TD of this rank's tokens. Every rank of the EP group calls it, also with zero tokens."""
        masters = {name: getattr(self.experts, name) for name in self.names}
        if self.experts.is_transposed:
            masters = {name: w.transpose(1, 2) if w.dim() == 3 else w for name, w in masters.items()}
        balancer, dispatcher = self.parts = self.parts or self._make_parts(masters)
        step = balancer.route(ids_TK)
        attached = {name: step.attach(name, weight) for name, weight in masters.items()}
        x_TD = x_TD.to(balancer.dtype)
        arrived = dispatcher.dispatch(x_TD, step.physical_ids_TK, weights_TK, Exchange(*step.exchange))

        def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
            return step.grouped_linear(rows, arrived.counts_M, attached[name], bias=attached.get(f"{name}_bias"))

        rows = linear(self.activation(linear(arrived.rows_RD, self.up)), "down_proj")
        return step.leave(dispatcher.combine(rows, arrived.handle)).clone()  # FSDP wants no view

    def _make_parts(self, masters: dict[str, torch.Tensor]) -> tuple[Balancer, Dispatcher]:
        """At the first call, when the weights have the dtype that they are computed with."""
        shapes = {name: tuple(weight.shape[1:]) for name, weight in masters.items()}
        dtype, num_experts = masters["down_proj"].dtype, len(masters["down_proj"]) * self.mesh.size()
        key = (self.mesh.get_group(), num_experts, dtype, *shapes.items(), self.config)
        balancer = _balancers.setdefault(key, Balancer(self.mesh, num_experts, shapes, dtype, self.config))
        return balancer, build_dispatcher("auto", balancer.num_physical_experts, self.mesh)


def register(config: BalanceConfig | None = None, name: str = "equipoise") -> None:
    """Makes `ep_implementation=name` known to transformers, for models that are loaded afterwards.

    The accelerator is selected before transformers is imported; devices are those of the model's tensors.

    Raises:
        ConfigError: transformers is missing or has no such registry, or the planner needs numbered microbatches.
    """
    config = config or BalanceConfig()
    if config.planner == "eplb":
        raise ConfigError("planner 'eplb' learns once from each microbatch, and transformers does not number them")
    initialize_accelerator()
    try:
        from transformers.distributed.expert_parallel import EPImplementationInterface as Registry
    except ImportError as error:
        raise ConfigError(f"balancing in transformers needs its version 5.23 or later: {error}") from error
    Registry.register(name, partial(BalancedEP, config=config))
