"""peft's LoRA on the experts of a model whose expert parallelism is balanced.

peft folds an adapter into a parameter by replacing the parameter while its module runs. That cannot be done to experts
that are sharded: the replacement would be made of the whole model's adapter and one rank's shard. Here the experts of a
rank take the rank's part of the adapter, inside of the balanced layer. Names, shapes and files of the adapter stay
peft's, so it loads in one process too. Adapters on attention and other linear layers need nothing of this.
"""

from typing import Any

import torch

from equipoise.errors import ConfigError
from equipoise.integrations.transformers import BalancedEP


def adapt_experts(model: torch.nn.Module) -> torch.nn.Module:
    """Makes adapters on parameters of balanced experts work (`LoraConfig.target_parameters`); call it on what
    `get_peft_model` returned. Changes the model in place and returns it.

    The adapter's weights are whole on every rank, and a rank has gradients for its own experts only, of the tokens of
    its whole EP group. Like those of every plain parameter in a model that FSDP shards they have to be averaged over
    all ranks; transformers' Trainer does so.

    Raises:
        ConfigError: no adapter on a parameter of experts, or one on experts that are not balanced.
    """
    from peft.tuners.lora.layer import ParamWrapper

    class ExpertAdapter(ParamWrapper):
        """peft's adapter of one parameter, folded in by the balanced layer."""

        def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            self._check_forward_args(x, *args, **kwargs)
            return self.base_layer(x, *args, **kwargs)

        def merge(self, *args: Any, **kwargs: Any) -> None:
            raise ConfigError(
                "an adapter cannot be merged into experts that are spread over ranks: save it, and merge it into the "
                "model loaded in one process"
            )

        def fold(self, weight: torch.Tensor) -> torch.Tensor:
            """This rank's experts' weight [M, N, K] with its part of the active adapters added."""
            balanced: Any = self.get_base_layer().balanced_ep
            first = balanced.mesh.get_local_rank() * len(weight)
            for name in () if self.disable_adapters else self.active_adapters:
                if name in self.lora_A:
                    left, right, scaling = self.get_delta_factors(name)
                    part = slice(first, first + len(weight))
                    weight = torch.baddbmm(weight, left[part], right[part], alpha=scaling)
            return weight

    found: list[Any] = [module for module in model.modules() if isinstance(module, ParamWrapper)]
    if not found:
        raise ConfigError(
            "the model has no adapter on a parameter of experts: name some as LoraConfig(target_parameters=["
            "'mlp.experts.gate_up_proj', 'mlp.experts.down_proj']). Adapters on attention alone need no call"
        )
    for module in found:
        balanced = getattr(module.get_base_layer(), "balanced_ep", None)
        if not isinstance(balanced, BalancedEP):
            raise ConfigError(
                f"{module.parameter_name} of {type(module.get_base_layer()).__name__} is not of experts that are "
                "balanced: load the model with DistributedConfig(ep_implementation='equipoise', ...) first"
            )
        module.__class__ = ExpertAdapter
        balanced.adapters[module.parameter_name] = module.fold
    return model
