"""AdamW with warm-up and cosine decay."""

import logging
import math
from typing import Annotated, Any

import torch
from pydantic import Field, PositiveFloat
from torch import nn

from equipoise.accelerator import Accelerator
from equipoise.config import Config
from equipoise.distributed.compute_copies import ComputeCopies
from equipoise.kernels.triton_support import use_triton
from equipoise.train.master_adamw import MasterAdamW
from equipoise.train.offload import OffloadedAdamW

logger = logging.getLogger(__name__)

Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Config):
    """AdamW and its learning-rate schedule."""

    lr: PositiveFloat = 1e-3
    """Peak learning rate."""
    min_lr_ratio: float = Field(0.1, ge=0, le=1)
    """Learning rate at the last step, as a share of the peak."""
    warmup_steps: int = Field(20, ge=0)
    """Steps of linear warm-up."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = Field(0.1, ge=0)
    """Decoupled weight decay of matrices; norms and biases are not decayed."""
    max_grad_norm: float = Field(1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 switches clipping off (the norm is still reported)."""
    offload: bool = False
    """Keep both moments in pinned host memory: 8 bytes less on the device for each parameter that a rank holds, for two
    copies over the bus in each step. The numbers stay the same. Without effect on CPU."""


def learning_rate(config: OptimizerConfig, step: int, num_steps: int) -> float:
    """Learning rate of a step (counted from 1): linear warm-up, then cosine down to `min_lr_ratio` at the last."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def build_optimizer(
    model: nn.Module, config: OptimizerConfig, accelerator: Accelerator | None = None
) -> torch.optim.AdamW:
    """AdamW over all parameters, matrices with weight decay and vectors without; fused where the device has it, and
    where Triton runs with the refresh of the model's 16-bit copies, if there are any.

    `accelerator` is needed for `config.offload`, which is ignored with a warning where parameters are on the CPU.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    fused = parameters[0].device.type in ("cpu", "cuda")
    options: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps, "fused": fused or None}
    if config.offload and parameters[0].device.type == "cpu":
        logger.warning("optimizer.offload is on, but parameters and moments are in host memory already: ignored")
    elif config.offload:
        assert accelerator is not None, "offload needs the accelerator"
        return OffloadedAdamW(groups, accelerator, **options)
    copies = getattr(model, "copies", None)
    if isinstance(copies, ComputeCopies) and use_triton(parameters[0].device):
        return MasterAdamW(groups, copies, **options)
    return torch.optim.AdamW(groups, **options)
