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
from equipoise.integrations.transformers_support import Fold, own_precision, refuse_unsupported, weights_as_computed

_balancers: WeakValueDictionary[Any, Balancer] = WeakValueDictionary()  # one for all layers of an EP group


class BalancedEP:
    """The experts of one layer and their dispatch, balanced. transformers makes and calls it."""

    def __init__(self, experts: Any, ep_mesh: DeviceMesh, tp_mesh: DeviceMesh, config: BalanceConfig) -> None:
        refuse_unsupported(experts, tp_mesh)
        self.experts, self.mesh, self.config = experts, ep_mesh, config
        self.activation = experts._apply_gate if experts.has_gate else experts.act_fn
        self.parts: dict[torch.dtype, tuple[Balancer, Dispatcher]] = {}
        self.adapters: dict[str, Fold] = {}  # by weight name; integrations/peft.py
        experts.balanced_ep = self

    def __call__(self, x_TD: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor) -> torch.Tensor:
        """y_TD of this rank's tokens. Every rank of the EP group calls it, also with zero tokens."""
        with own_precision(x_TD.device.type) as dtype:
            masters = weights_as_computed(self.experts, self.adapters, dtype)
            dtype = masters["down_proj"].dtype
            balancer, dispatcher = self.parts[dtype] = self.parts.get(dtype) or self._make_parts(masters)
            step = balancer.route(ids_TK)
            attached = {name: step.attach(name, weight) for name, weight in masters.items()}
            x_TD = x_TD.to(dtype)
            exchange = None if step.exchange is None else Exchange(*step.exchange)
            arrived = dispatcher.dispatch(x_TD, step.physical_ids_TK, weights_TK, exchange)

            def linear(rows: torch.Tensor, name: str) -> torch.Tensor:
                return step.grouped_linear(rows, arrived.counts_M, attached[name], bias=attached.get(f"{name}_bias"))

            rows = linear(self.activation(linear(arrived.rows_RD, next(iter(masters)))), "down_proj")
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
