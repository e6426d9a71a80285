"""Where the tensors of a Hugging Face checkpoint are in a model of ours: views, nothing is converted or copied."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from equipoise.checkpoint.hf import pieces_per_expert
from equipoise.checkpoint.tensors import model_tensors
from equipoise.distributed.weight_update import Region, Target, TensorSpec, WeightSource, spec_of

EXPERTS = ".mlp.experts."


def hf_regions(shapes: Mapping[str, Sequence[int]]) -> dict[str, Region]:
    """Regions by name, from whole shapes by our names. Neighbours in a tensor follow each other: they move together."""
    return {
        piece.key: Region(name, piece.start, piece.size, int(piece.is_slice))
        for name, shape in shapes.items()
        for piece in pieces_per_expert(name, tuple(shape))
    }


def weight_source(model: nn.Module, dtype: torch.dtype | None = None) -> WeightSource:
    """A trainer's model, sharded as it may be, as an update sends it. `dtype`: of the wire, for engines that do not say
    theirs."""
    shapes = {name: tensor.shape for name, tensor in model_tensors(model).items()}
    return WeightSource(lambda: model_tensors(model), hf_regions(shapes), dtype)


def engine_tensors(
    model: nn.Module, first_expert: int, num_experts: int
) -> tuple[dict[str, TensorSpec], dict[str, Target]]:
    """Every tensor of the model by its name in a checkpoint, and where those are that this rank holds.

    `first_expert`: of this rank; `num_experts`: of the whole model.
    """
    tensors = model_tensors(model)
    shapes = {}
    for name, tensor in tensors.items():
        shapes[name] = (num_experts, *tensor.shape[1:]) if EXPERTS in name else tuple(tensor.shape)
    specs, targets = {}, {}
    flats = {name: tensor.detach().view(-1) for name, tensor in tensors.items()}
    for name, region in hf_regions(shapes).items():
        tensor, start = tensors[region.tensor], list(region.start)
        specs[name] = TensorSpec(region.shape, spec_of(tensor).dtype)
        if region.dropped:
            start[0] -= first_expert
            if not 0 <= start[0] < tensor.shape[0]:
                continue
        strides = [math.prod(tensor.shape[dim + 1 :]) for dim in range(tensor.dim())]
        targets[name] = Target(flats[region.tensor], sum(a * b for a, b in zip(start, strides)))
    return specs, targets
