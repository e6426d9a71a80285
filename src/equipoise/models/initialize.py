"""Initial weights that do not depend on how the model is spread: one random stream per tensor and expert.

The stream of a tensor is seeded by (seed, its name), that of an expert's slice by (seed, name, logical expert id),
and drawn on the CPU. So the same seed gives the same model on any device, at any EP size, and no two experts start
equal.
"""

import hashlib

import torch
from torch import nn

from equipoise.models.model import MoEForCausalLM
from equipoise.moe.experts import Experts


def _normal(shape: torch.Size, std: float, seed: int, *name: object) -> torch.Tensor:
    digest = hashlib.sha256(repr((seed, *name)).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape, dtype=torch.float32).normal_(0.0, std, generator=generator)


@torch.no_grad()
def initialize_module(module: nn.Module, prefix: str, std: float, seed: int, first_expert: int = 0) -> None:
    """Fills the parameters and buffers of a module that is whole on this rank, except for its experts.

    Args:
        module: materialised module; stacked expert weights may hold only this rank's experts.
        prefix: the module's name in the model, with a trailing dot.
        std: standard deviation of matrices. Norm weights become 1, biases 0.
        seed: the run's seed.
        first_expert: logical id of the first expert held here.
    """
    done: set[int] = set()  # tied parameters belong to the module that comes first
    for path, child in module.named_modules():
        for name, parameter in child.named_parameters(recurse=False):
            if id(parameter) in done:
                continue
            done.add(id(parameter))
            full_name = f"{prefix}{path}.{name}" if path else f"{prefix}{name}"
            if isinstance(child, Experts):
                for i, slice_ in enumerate(parameter):
                    slice_.copy_(_normal(slice_.shape, std, seed, full_name, first_expert + i))
            elif parameter.dim() == 1:
                parameter.fill_(1.0 if isinstance(child, nn.RMSNorm) else 0.0)
            else:
                parameter.copy_(_normal(parameter.shape, std, seed, full_name))
        for buffer in child.buffers(recurse=False):
            buffer.zero_()


def initialize_model(model: MoEForCausalLM, seed: int) -> None:
    """Initial weights of a whole, unsharded model."""
    initialize_module(model, "", model.config.initializer_range, seed)
