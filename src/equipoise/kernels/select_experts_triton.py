"""Triton forms of `kernels/select_experts.py` (selection and counts) and `kernels/router_weights.py` (combine weights).

Selection takes the largest of unique integers K times: a score's bits in the order of floats, above the complement of
its index, as `stable_topk` does; so ties, infinities and NaN select the same experts on every device.

Shapes: T tokens, E experts, K experts per token.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch
from equipoise.kernels.peers import padded


@triton.jit(do_not_specialize=["T"])
def _select_kernel(
    scores_ptr,
    bias_ptr,
    valid_ptr,
    ids_ptr,
    counts_ptr,
    T,
    E: tl.constexpr,
    K: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_VALID: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    is_real = (t < T)[:, None] & (e < E)[None, :]
    score = tl.load(scores_ptr + t.to(tl.int64)[:, None] * E + e[None, :], mask=is_real, other=0.0)
    if HAS_BIAS:
        score += tl.load(bias_ptr + e, mask=e < E, other=0.0)[None, :]
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    key = (bits.to(tl.int64) << 32) | (0xFFFFFFFF - e.to(tl.int64))[None, :]
    lowest: tl.constexpr = -9223372036854775807
    key = tl.where((e < E)[None, :], key, lowest)
    ids = tl.zeros([BLOCK_T, BLOCK_K], tl.int32)
    for choice in tl.static_range(K):
        best = tl.max(key, 1)
        index = (0xFFFFFFFF - (best & 0xFFFFFFFF)).to(tl.int32)
        ids = tl.where((k == choice)[None, :], index[:, None], ids)
        key = tl.where(e[None, :] == index[:, None], lowest, key)
    is_valid = t < T
    if HAS_VALID:
        is_valid = is_valid & (tl.load(valid_ptr + t, mask=t < T, other=0) != 0)
    is_chosen = is_valid[:, None] & (k < K)[None, :]
    ids = tl.where(is_chosen, ids, -1)
    tl.store(ids_ptr + t.to(tl.int64)[:, None] * K + k[None, :], ids, mask=(t < T)[:, None] & (k < K)[None, :])
    # Integer additions: exact in any order.
    chosen = tl.reshape(tl.where(is_chosen, ids, 0), [BLOCK_T * BLOCK_K])
    counts = tl.histogram(chosen, BLOCK_E)
    num_rest = BLOCK_T * BLOCK_K - tl.sum(tl.sum(is_chosen.to(tl.int32), 1), 0)
    counts -= tl.where(e == 0, num_rest, 0)
    tl.atomic_add(counts_ptr + e, counts, mask=(e < E) & (counts > 0), sem="relaxed")


@triton.jit
def _scores(
    logits_ptr,
    ids_ptr,
    t,
    T,
    k,
    E: tl.constexpr,
    K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """Scores of all experts [BLOCK_T, BLOCK_E] (softmax only) and of the selected ones [BLOCK_T, BLOCK_K]."""
    e = tl.arange(0, BLOCK_E)
    offset = t.to(tl.int64)[:, None] * E
    mask_TK = (t < T)[:, None] & (k < K)[None, :]
    # A padding token's weights are those of expert 0, as in the plain form; nobody reads them.
    ids = tl.maximum(tl.load(ids_ptr + t.to(tl.int64)[:, None] * K + k[None, :], mask=mask_TK, other=0), 0)
    logits = tl.load(logits_ptr + offset + e[None, :], mask=(t < T)[:, None] & (e < E)[None, :], other=float("-inf"))
    chosen = tl.load(logits_ptr + offset + ids, mask=mask_TK, other=float("-inf"))
    if IS_SOFTMAX:
        largest = tl.where(t < T, tl.max(logits, 1), 0.0)
        scores = tl.exp(logits - largest[:, None])
        total = tl.where(t < T, tl.sum(scores, 1), 1.0)
        return ids, scores / total[:, None], tl.exp(chosen - largest[:, None]) / total[:, None]
    else:
        return ids, 1.0 / (1.0 + tl.exp(-logits)), 1.0 / (1.0 + tl.exp(-chosen))


@triton.jit(do_not_specialize=["T", "scale"])
def _weights_kernel(
    logits_ptr,
    ids_ptr,
    weights_ptr,
    T,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    k = tl.arange(0, BLOCK_K)
    _, _, chosen = _scores(logits_ptr, ids_ptr, t, T, k, E, K, IS_SOFTMAX, BLOCK_E)
    weights = chosen
    if IS_NORMALISED:
        weights = chosen / (tl.sum(chosen, 1) + 1e-20)[:, None]
    mask = (t < T)[:, None] & (k < K)[None, :]
    tl.store(weights_ptr + t.to(tl.int64)[:, None] * K + k[None, :], weights * scale, mask=mask)


@triton.jit(do_not_specialize=["T", "scale"])
def _weights_backward_kernel(
    grad_ptr,
    logits_ptr,
    ids_ptr,
    grad_logits_ptr,
    T,
    scale,
    E: tl.constexpr,
    K: tl.constexpr,
    IS_SOFTMAX: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, BLOCK_E)
    k = tl.arange(0, BLOCK_K)
    ids, scores, chosen = _scores(logits_ptr, ids_ptr, t, T, k, E, K, IS_SOFTMAX, BLOCK_E)
    mask = (t < T)[:, None] & (k < K)[None, :]
    grad = tl.load(grad_ptr + t.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0) * scale
    chosen = tl.where(mask, chosen, 0.0)
    if IS_NORMALISED:
        total = (tl.sum(chosen, 1) + 1e-20)[:, None]
        grad = tl.where(mask, (grad - tl.sum(grad * chosen, 1)[:, None] / total) / total, 0.0)
    grad_scores = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for choice in tl.static_range(K):
        is_choice = (k == choice)[None, :]
        index = tl.sum(tl.where(is_choice, ids, 0), 1)
        value = tl.sum(tl.where(is_choice, grad, 0.0), 1)
        grad_scores += tl.where(e[None, :] == index[:, None], value[:, None], 0.0)
    if IS_SOFTMAX:
        grad_logits = scores * (grad_scores - tl.sum(grad * chosen, 1)[:, None])
    else:
        grad_logits = grad_scores * scores * (1.0 - scores)
    offset = t.to(tl.int64)[:, None] * E + e[None, :]
    tl.store(grad_logits_ptr + offset, grad_logits, mask=(t < T)[:, None] & (e < E)[None, :])


def _launch(kernel: Any, T: int, E: int, K: int, arguments: Sequence[Any], **constants: Any) -> None:
    """`arguments`: those before E."""
    block_e = max(16, padded(E))
    block_t = max(1, 2048 // block_e)
    sizes: dict[str, Any] = {"E": E, "K": K, "BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_K": padded(K)}
    launch(kernel, -(-T // block_t), arguments, 4, **sizes, **constants)


def triton_select(
    scores_TE: torch.Tensor, bias_E: torch.Tensor | None, valid_T: torch.Tensor | None, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `select_experts`, without groups."""
    scores_TE = scores_TE.float().contiguous()
    T, E = scores_TE.shape
    ids_TK = torch.empty(T, k, dtype=torch.int32, device=scores_TE.device)
    counts_E = torch.zeros(E, dtype=torch.int32, device=scores_TE.device)
    if T:
        bias = scores_TE if bias_E is None else bias_E.float().contiguous()
        valid = scores_TE if valid_T is None else valid_T.contiguous().view(torch.uint8)
        arguments = scores_TE, bias, valid, ids_TK, counts_E, T
        _launch(_select_kernel, T, E, k, arguments, HAS_BIAS=bias_E is not None, HAS_VALID=valid_T is not None)
    return ids_TK, counts_E


def triton_router_weights(
    logits_TE: torch.Tensor, ids_TK: torch.Tensor, is_softmax: bool, is_normalised: bool, scale: float
) -> torch.Tensor:
    """See `router_weights`."""
    logits_TE, ids_TK = logits_TE.contiguous(), ids_TK.contiguous()
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    weights_TK = torch.empty(T, K, dtype=torch.float32, device=logits_TE.device)
    if T:
        forms = {"IS_SOFTMAX": is_softmax, "IS_NORMALISED": is_normalised}
        _launch(_weights_kernel, T, E, K, (logits_TE, ids_TK, weights_TK, T, scale), **forms)
    return weights_TK


def triton_router_weights_backward(
    grad_TK: torch.Tensor,
    logits_TE: torch.Tensor,
    ids_TK: torch.Tensor,
    is_softmax: bool,
    is_normalised: bool,
    scale: float,
) -> torch.Tensor:
    """Gradient of `router_weights` with respect to the logits."""
    grad_TK, logits_TE, ids_TK = grad_TK.contiguous(), logits_TE.contiguous(), ids_TK.contiguous()
    (T, E), K = logits_TE.shape, ids_TK.shape[1]
    grad_TE = torch.empty_like(logits_TE)
    if T:
        forms = {"IS_SOFTMAX": is_softmax, "IS_NORMALISED": is_normalised}
        _launch(_weights_backward_kernel, T, E, K, (grad_TK, logits_TE, ids_TK, grad_TE, T, scale), **forms)
    return grad_TE
