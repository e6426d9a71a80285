"""Compute kernels, each beside its plain PyTorch reference."""

import torch

from equipoise.kernels.grouped_linear import choose_grouped_linear


def describe_choice(device: torch.device, dtype: torch.dtype, name: str = "auto") -> dict[str, str]:
    """The expert kernel in use on a device and why, for `equipoise doctor` and the log; `name` as it was asked for."""
    choice = choose_grouped_linear(device, dtype, name)
    return {"grouped_linear": choice.name, "reason": choice.reason}


__all__ = ["choose_grouped_linear", "describe_choice"]
