"""Triton form of `models/cross_entropy.py: plain_loss_and_gradient`: a program for a row, which it reads twice.

The first reading keeps, lane by lane, the largest logit so far and the sum of exponentials relative to it; the second
one replaces the logits by their gradient. Additions have a fixed order.

Shapes: T tokens, V vocabulary.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch
from equipoise.kernels.operators import operator

BLOCK = 2048
"""Logits that a program has in registers at a time."""


@triton.jit
def _logits_at(logits, column, V):
    return tl.load(logits + column, mask=column < V, other=float("-inf"), eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _loss_kernel(logits_ptr, labels_ptr, loss_ptr, V, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    lane = tl.arange(0, BLOCK)
    row = tl.program_id(0).to(tl.int64)
    label = tl.load(labels_ptr + row)
    is_valid = label != IGNORED
    logits = logits_ptr + row * V
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, 4 * BLOCK):  # four at a time: then one exponential of five is for a larger maximum
        column = start + lane
        value_1 = _logits_at(logits, column, V)
        value_2 = _logits_at(logits, column + BLOCK, V)
        value_3 = _logits_at(logits, column + 2 * BLOCK, V)
        value_4 = _logits_at(logits, column + 3 * BLOCK, V)
        larger = tl.maximum(tl.maximum(value_1, value_2), tl.maximum(value_3, value_4))
        larger = tl.maximum(largest, larger)
        shift = tl.where(larger == float("-inf"), 0.0, larger)  # a lane that has seen nothing yet
        total *= tl.exp(largest - shift)
        total += (tl.exp(value_1 - shift) + tl.exp(value_2 - shift)) + (
            tl.exp(value_3 - shift) + tl.exp(value_4 - shift)
        )
        largest = larger
    top = tl.max(largest, 0)
    total_of_row = tl.sum(total * tl.exp(largest - top), 0)
    at_label = tl.load(logits + tl.where(is_valid, label, 0)).to(tl.float32)
    tl.store(loss_ptr + row, tl.where(is_valid, tl.log(total_of_row) + (top - at_label), 0.0))
    scale = tl.where(is_valid, 1.0 / total_of_row, 0.0)
    tl.debug_barrier()  # the label's logit has been read by all before anybody replaces it
    last = (tl.cdiv(V, BLOCK) - 1) * BLOCK
    for start in range(0, V, BLOCK):
        column = last - start + lane  # from the end, which is in the cache still
        value = tl.load(logits + column, mask=column < V, other=0.0, eviction_policy="evict_first").to(tl.float32)
        gradient = tl.exp(value - top) * scale
        gradient = tl.where((column == label) & is_valid, gradient - 1.0, gradient)
        tl.store(logits + column, gradient.to(logits_ptr.dtype.element_ty), mask=column < V)


@operator("loss_and_gradient", mutates_args=("logits_TV",))
def loss_and_gradient(logits_TV: torch.Tensor, labels_T: torch.Tensor, ignored: int) -> torch.Tensor:
    """loss_T float32 of each row, 0 where its label is `ignored`; `logits_TV` (contiguous) becomes its gradient."""
    if not logits_TV.is_contiguous():
        raise ValueError(
            f"logits of shape {tuple(logits_TV.shape)} and strides {logits_TV.stride()}: make them contiguous"
        )
    T, V = logits_TV.shape
    loss_T = torch.empty(T, dtype=torch.float32, device=logits_TV.device)
    if T:
        block = min(BLOCK, max(16, triton.next_power_of_2(V)))
        arguments = logits_TV, labels_T.contiguous(), loss_T, V
        launch(_loss_kernel, T, arguments, max(1, block // 256), IGNORED=ignored, BLOCK=block)
    return loss_T


@torch.library.register_fake("equipoise::loss_and_gradient")
def _(logits_TV, labels_T, ignored):
    return logits_TV.new_empty(logits_TV.shape[0], dtype=torch.float32)
