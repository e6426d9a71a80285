"""Activation recompute: what a layer's backward keeps and what it runs again.

A recomputed forward never routes again: the selected experts and their counts are always kept, so the second run
cannot decide differently from the first.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils import checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from equipoise.kernels.select_experts import select_experts

Recompute = Literal["none", "full", "selective"]
T = TypeVar("T")

_DECISIONS = {torch.ops.equipoise.select_experts.default}
_COSTLY = {
    torch.ops.aten.mm.default,
    torch.ops.aten.mm.dtype,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
}

# Profiler ranges that FSDP opens inside a layer differ in number between forward and recompute (its first hook of a
# backward opens one more). torch 2.13 compares how often each operator ran and would refuse them; they compute nothing.
checkpoint.SAC_IGNORED_OPS |= {
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
}


def _policy(mode: Recompute, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in _DECISIONS or (mode == "selective" and op in _COSTLY):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def recompute_context(mode: Recompute) -> Callable[[], Any]:
    """`context_fn` for `torch.utils.checkpoint`: `full` recomputes all but routing decisions, `selective` also keeps
    the results of dense products and attention."""
    return partial(create_selective_checkpoint_contexts, partial(_policy, mode))


def recomputed(mode: Recompute, run: Callable[..., T], *inputs: Any) -> T:
    """`run(*inputs)`, whose backward runs it again unless the mode is `none`. It may draw no random numbers."""
    if mode == "none" or not torch.is_grad_enabled():
        return run(*inputs)
    return checkpoint.checkpoint(
        run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=recompute_context(mode)
    )


assert select_experts is not None  # importing it registers the operator named above
