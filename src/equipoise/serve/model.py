"""The model as the engine holds it: whole tensors without FSDP, experts split over an EP group."""

import torch
import torch.distributed as dist
from torch import nn

from equipoise.dispatch import build_dispatcher
from equipoise.errors import ConfigError
from equipoise.models.config import ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.moe.layer import MoELayer


def build_engine_model(
    config: ModelConfig, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup | None = None
) -> MoEForCausalLM:
    """A model with weights in `dtype` (selection biases in FP32), not initialised; expert e on rank e // M of `group`.

    Raises:
        ConfigError: the experts do not divide over the group.
    """
    num_ranks = 1 if group is None else group.size()
    if config.num_experts % num_ranks:
        raise ConfigError(
            f"{config.num_experts} experts (model.num_experts) cannot be split over {num_ranks} processes: start a "
            "number that divides them"
        )
    with torch.device("meta"):
        # Losses are for training only.
        model = MoEForCausalLM(config.model_copy(update={"router_aux_loss_coef": 0.0, "router_z_loss_coef": 0.0}))
    for layer in moe_layers(model):
        for name, parameter in list(layer.experts.named_parameters(recurse=False)):
            shape = (config.num_experts // num_ranks, *parameter.shape[1:])
            setattr(layer.experts, name, nn.Parameter(torch.empty(shape, device="meta")))
    model.to(dtype).to_empty(device=device)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight
    bind_group(model, group)
    return model.requires_grad_(False).eval()


def bind_group(model: MoEForCausalLM, group: dist.ProcessGroup | None) -> None:
    """Lets the model's dispatchers use a group of the same ranks; groups are others after parking."""
    for layer in moe_layers(model):
        layer.dispatcher = build_dispatcher("auto", model.config.num_experts, group)


def moe_layers(model: MoEForCausalLM) -> list[MoELayer]:
    """The MoE layers in order, also those that predict further tokens, which the engine holds but does not run."""
    return [module for module in model.modules() if isinstance(module, MoELayer)]
