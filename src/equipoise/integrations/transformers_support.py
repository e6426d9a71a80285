"""What transformers' experts modules have: their weights as the balancer takes them, and what it cannot do, refused by
name before a weight is loaded."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from equipoise.errors import ConfigError

_DESCRIBED = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm")


def refuse_unsupported(experts: Any, tp_mesh: DeviceMesh) -> None:
    """Raises ConfigError for an experts module that would not be computed as its family computes it.

    Served are modules that describe their experts by transformers' `use_experts_implementation`: an up and a down
    projection, with or without gate and biases, in either layout, with any activation that acts row by row.
    """
    family = f"{type(experts).__name__} (model type {getattr(experts.config, 'model_type', 'unknown')!r})"
    if tp_mesh.size() > 1:
        raise ConfigError(
            f"balancing the experts of {family} needs tp_size 1, got {tp_mesh.size()}: the ranks of a TP group hold "
            "the same tokens. Raise fsdp_size instead"
        )
    missing = [name for name in _DESCRIBED if not hasattr(experts, name)]
    if missing:
        raise ConfigError(
            f"{family} cannot be balanced: it computes its experts in a way of its own (quantized, or without "
            f"transformers' description of experts: {', '.join(missing)}). Load it dequantized, or use "
            "ep_implementation='all_to_all'"
        )
    if experts.has_post_expert_norm:
        raise ConfigError(
            f"{family} cannot be balanced: it norms each expert's output by weights of that expert, which replicas do "
            "not carry. Use ep_implementation='all_to_all'"
        )
    known = weight_names(experts)
    present = [name for name, _ in experts.named_parameters()]
    if sorted(present) != sorted(known):
        raise ConfigError(
            f"{family} cannot be balanced: its experts have the parameters {', '.join(present)}; replicas carry "
            f"{', '.join(known)}. Use ep_implementation='all_to_all'"
        )
    for name in known:
        dtype = getattr(experts, name).dtype
        if not dtype.is_floating_point or dtype.itemsize < 2:
            raise ConfigError(
                f"{family} cannot be balanced: {name} is {dtype}, which needs scales that replicas do not carry. Load "
                "it dequantized, in torch.bfloat16 or torch.float32"
            )


def weight_names(experts: Any) -> list[str]:
    """Names of an experts module's weights and then of its biases, up before down."""
    up = "gate_up_proj" if experts.has_gate else "up_proj"
    return [name + end for end in ("", "_bias")[: 1 + experts.has_bias] for name in (up, "down_proj")]


Fold = Callable[[torch.Tensor], torch.Tensor]


def weights_as_computed(
    experts: Any, adapters: Mapping[str, Fold], dtype: torch.dtype | None
) -> dict[str, torch.Tensor]:
    """This rank's weights [M, N, K] and biases [M, N] by name, adapters folded in, in `dtype` (None: their own)."""
    found = {}
    for name in weight_names(experts):
        weight = getattr(experts, name)
        if name in adapters:
            weight = adapters[name](weight)
        if experts.is_transposed and weight.dim() == 3:
            weight = weight.transpose(1, 2)
        found[name] = weight.to(dtype or weight.dtype)
    return found


@contextmanager
def own_precision(device_type: str) -> Iterator[torch.dtype | None]:
    """Autocast off, since the products take no part in it; gives the dtype that it would have computed in."""
    dtype = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    with torch.autocast(device_type, enabled=False):
        yield dtype
