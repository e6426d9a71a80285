"""Gradient norm and clipping over parameters that live on different meshes."""

import torch
import torch.distributed as dist

from equipoise.distributed.local import local_part
from equipoise.kernels.triton_support import use_triton


@torch.no_grad()
def global_grad_norm(parameters: list[torch.nn.Parameter], shard_group: dist.ProcessGroup) -> torch.Tensor:
    """L2 norm over all parameters, dense and expert, as a float32 scalar that is equal on every rank.

    Each parameter is sharded exactly once over the ranks of the shard axis (dense ones over `shard`, experts over
    efsdp x ep, which are the same ranks) and is equal on all replicas. So one sum over the shard group counts
    every element once, and a replicated parameter is not counted again.

    Raises:
        ValueError: a parameter that requires a gradient has none; every one takes part in each step, so
            something detached it.
    """
    missing = sum(p.grad is None for p in parameters if p.requires_grad)
    if missing:
        raise ValueError(f"{missing} parameters have no gradient: some part of the model was left out of the graph")
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    total = torch.zeros((), dtype=torch.float32, device=parameters[0].device)
    if gradients and use_triton(gradients[0].device) and all(g.is_contiguous() for g in gradients):
        from equipoise.kernels.elementwise_triton import sum_of_squares

        total += sum_of_squares(gradients)
        gradients = []
    for dtype in sorted({g.dtype for g in gradients}, key=str):  # one launch takes one dtype
        same = [g for g in gradients if g.numel() and g.dtype == dtype]
        if same:
            total += torch.stack(torch._foreach_norm(same, dtype=torch.float32)).square().sum()
    dist.all_reduce(total, group=shard_group)
    return total.sqrt()


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """What gradients of this norm are multiplied with to have at most `max_norm`; a scalar like `norm`."""
    return (max_norm / norm.clamp(min=1e-30)).clamp(max=1.0)


@torch.no_grad()
def clip_gradients(parameters: list[torch.nn.Parameter], norm: torch.Tensor, max_norm: float) -> None:
    """Scales all gradients by max_norm / norm where the norm is larger; no host sync. Non-finite norms must be
    refused before this."""
    gradients = [local_part(p.grad) for p in parameters if p.grad is not None]
    torch._foreach_mul_(gradients, clip_factor(norm, max_norm))
