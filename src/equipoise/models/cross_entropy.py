"""Cross-entropy of a linear head that never holds more than a bounded number of logits.

The gradients are computed in the forward, chunk by chunk, while a chunk's logits are there: nothing is computed twice
and no logits are kept. They are those of the summed loss; the backward scales them by the gradient that it gets.

Shapes: T tokens, D features, V vocabulary.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from equipoise.kernels.triton_support import triton_problem, use_triton

IGNORED_LABEL = -100
"""Label of a position that takes no part in the loss (as in transformers)."""

_CHUNK_ELEMENTS = {"cpu": 1 << 26}
_DEVICE_CHUNK_ELEMENTS = 5 << 28
"""Logits held at once: 64 M on a CPU, 1280 M elsewhere (2.5 GiB in BF16), where each chunk's share of the weight's
gradient costs a pass over that gradient."""


def plain_cross_entropy(x_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """The reference: FP32 scalar, the sum over the valid labels, in one piece, by autograd."""
    logits_TV = F.linear(x_TD, weight_VD).float()
    return F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")


def plain_loss_and_gradient(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The summed loss in FP32, and its gradient in the logits' dtype."""
    values_TV = logits_TV.float()
    lse_T1 = values_TV.logsumexp(-1, keepdim=True)
    valid_T1 = (labels_T != IGNORED_LABEL)[:, None]
    label_T1 = labels_T.clamp(min=0)[:, None]
    loss_T1 = torch.where(valid_T1, lse_T1 - values_TV.gather(1, label_T1), 0.0)
    is_label_TV = torch.arange(values_TV.shape[1], device=labels_T.device) == label_T1
    gradient_TV = values_TV.softmax(-1) - is_label_TV.to(values_TV.dtype)  # not exp(values - lse): that rounds more
    return loss_T1.sum(), torch.where(valid_T1, gradient_TV, 0.0).to(logits_TV.dtype)


def _loss_and_gradient(logits_TV: torch.Tensor, labels_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same. The logits may be used up."""
    if use_triton(logits_TV.device):
        from equipoise.kernels.cross_entropy_triton import loss_and_gradient

        return loss_and_gradient(logits_TV, labels_T, IGNORED_LABEL).sum(), logits_TV
    return plain_loss_and_gradient(logits_TV, labels_T)


def _log_probabilities(logits_TV: torch.Tensor, labels_T: torch.Tensor, temperature: float) -> torch.Tensor:
    """FP32 [T], of the labels; 0 where there is none."""
    values_TV = logits_TV.float() / temperature
    found_T = values_TV.gather(1, labels_T.clamp(min=0)[:, None])[:, 0] - values_TV.logsumexp(-1)
    return torch.where(labels_T != IGNORED_LABEL, found_T, 0.0)


@lru_cache
def _fused(function: Callable[..., Any], device_type: str) -> Callable[..., Any]:
    """Compiled where Inductor has Triton to write kernels in; it is no help on a CPU, and absent on some devices."""
    is_compiled = device_type != "cpu" and triton_problem(device_type) is None
    return torch.compile(function, dynamic=False) if is_compiled else function


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_VD, labels_T, chunk, temperature):
        want_x, want_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=x_TD.device)
        grad_x = torch.empty_like(x_TD) if want_x else None
        grad_weight = None
        logprobs = torch.empty(0 if temperature is None else x_TD.shape[0], dtype=torch.float32, device=x_TD.device)
        ctx.mark_non_differentiable(logprobs)
        start = 0
        for x, labels in zip(x_TD.split(chunk), labels_T.split(chunk)):
            part = slice(start, start := start + x.shape[0])
            logits = F.linear(x, weight_VD)
            if temperature is not None:
                logprobs[part] = _fused(_log_probabilities, x.device.type)(logits, labels, temperature)
            if not (want_x or want_weight):
                loss += F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")
                continue
            loss_of_part, gradient = _loss_and_gradient(logits, labels)
            loss += loss_of_part
            if grad_x is not None:
                torch.mm(gradient, weight_VD, out=grad_x[part])
            if want_weight:
                grad_weight = _add_product(grad_weight, gradient.T, x)
        ctx.save_for_backward(grad_x, grad_weight)
        ctx.weight_dtype = weight_VD.dtype
        return loss, logprobs

    @staticmethod
    def backward(ctx, grad, _):
        grad_x, grad_weight = ctx.saved_tensors
        return (
            # In FP32: a factor such as 1 / tokens, rounded to BF16, would scale every gradient by up to 0.4 % too much.
            None if grad_x is None else (grad_x.float() * grad).to(grad_x.dtype),
            None if grad_weight is None else _scaled(grad_weight, grad, ctx.weight_dtype),
            None,
            None,
            None,
        )


class _LabelLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TD, weight_VD, labels_T, chunk, temperature):
        logprobs_T, lse_T, entropy_T = x_TD.new_empty(3, x_TD.shape[0], dtype=torch.float32)
        start = 0
        for x, labels in zip(x_TD.split(chunk), labels_T.split(chunk)):
            part = slice(start, start := start + x.shape[0])
            values_TV = F.linear(x, weight_VD).float() / temperature
            lse_T[part] = values_TV.logsumexp(-1)
            logprobs_T[part] = values_TV.gather(1, labels.clamp(min=0)[:, None])[:, 0] - lse_T[part]
            entropy_T[part] = lse_T[part] - (values_TV.softmax(-1) * values_TV).sum(-1)
        valid_T = labels_T != IGNORED_LABEL
        logprobs_T, entropy_T = torch.where(valid_T, logprobs_T, 0.0), torch.where(valid_T, entropy_T, 0.0)
        ctx.mark_non_differentiable(entropy_T)
        ctx.save_for_backward(x_TD, weight_VD, labels_T, lse_T)
        ctx.chunk, ctx.temperature = chunk, temperature
        return logprobs_T, entropy_T

    @staticmethod
    def backward(ctx, grad_T, _):
        x_TD, weight_VD, labels_T, lse_T = ctx.saved_tensors
        want_x, want_weight = ctx.needs_input_grad[:2]
        grad_x = torch.empty_like(x_TD) if want_x else None
        grad_weight = None
        scale_T = torch.where(labels_T != IGNORED_LABEL, grad_T / ctx.temperature, 0.0)
        start = 0
        for x in x_TD.split(ctx.chunk):
            part = slice(start, start := start + x.shape[0])
            logits_TV = F.linear(x, weight_VD)
            gradient_TV = -torch.exp(logits_TV.float() / ctx.temperature - lse_T[part, None])
            gradient_TV.scatter_add_(1, labels_T[part, None].clamp(min=0), torch.ones_like(lse_T[part, None]))
            gradient_TV = (gradient_TV * scale_T[part, None]).to(logits_TV.dtype)
            if grad_x is not None:
                torch.mm(gradient_TV, weight_VD, out=grad_x[part])
            if want_weight:
                grad_weight = _add_product(grad_weight, gradient_TV.T, x)
        return grad_x, None if grad_weight is None else grad_weight.to(weight_VD.dtype), None, None, None


def _add_product(out: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """out += a @ b in FP32, also of 16-bit matrices; without `out`, the product alone. Returns the sum."""
    if a.dtype == torch.float32:
        return a @ b if out is None else out.addmm_(a, b)
    if a.device.type == "cuda":
        if out is None:
            return torch.mm(a, b, out_dtype=torch.float32)
        return torch.addmm(out, a, b, out_dtype=torch.float32, out=out)
    product = (a @ b).float()
    return product if out is None else out.add_(product)


def _scaled(value: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The FP32 product, rounded to `dtype`, in one pass over memory."""
    if use_triton(value.device):
        from equipoise.kernels.elementwise_triton import scaled

        return scaled(value, factor, dtype)
    return torch.mul(value, factor, out=torch.empty_like(value, dtype=dtype))


def linear_cross_entropy(x_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor) -> torch.Tensor:
    """FP32 scalar: cross-entropy of `x W^T` summed over the labels that are not `IGNORED_LABEL` (nats).

    Differentiable in x and weight. Sums over tokens are in FP32; the gradient of the logits is in the dtype of x.
    """
    return cross_entropy_and_logprobs(x_TD, weight_VD, labels_T, None)[0]


def cross_entropy_and_logprobs(
    x_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, temperature: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`linear_cross_entropy`, and FP32 [T] without gradient: the labels' log-probabilities at a temperature, from the
    same products. They are 0 at ignored labels; without a temperature there are none."""
    chunk = tokens_at_once(x_TD.shape[0], weight_VD.shape[0], x_TD.device.type)
    return _CrossEntropy.apply(x_TD, weight_VD, labels_T, chunk, temperature)


def label_logprobs(
    x_TD: torch.Tensor, weight_VD: torch.Tensor, labels_T: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """FP32 [T] each: the labels' log-probabilities at a temperature, differentiable in x and weight, and the entropies
    of the distributions (nats), without gradient. Both are 0 at ignored labels.

    For losses that are any function of them. The backward computes the logits again, chunk by chunk.
    """
    chunk = tokens_at_once(x_TD.shape[0], weight_VD.shape[0], x_TD.device.type)
    return _LabelLogprobs.apply(x_TD, weight_VD, labels_T, chunk, temperature)


def tokens_at_once(num_tokens: int, vocab_size: int, device_type: str) -> int:
    """Tokens of a chunk, whose logits are held together."""
    chunk = _CHUNK_ELEMENTS.get(device_type, _DEVICE_CHUNK_ELEMENTS) // vocab_size
    num_chunks = -(-num_tokens // max(1, chunk))
    return -(-num_tokens // max(1, num_chunks)) or 1
