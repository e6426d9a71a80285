"""Top-k expert selection with one tie rule on every device: of equal scores, the lower expert id wins.

Shapes: T tokens, E experts, K experts per token, G groups.
"""

import torch

from equipoise.kernels.operators import operator
from equipoise.kernels.triton_support import use_triton

NO_EXPERT = -1
"""Logical id of a slot that selects nothing (a padding token): it is dispatched nowhere and adds exactly 0."""


def stable_topk(scores: torch.Tensor, k: int) -> torch.Tensor:
    """Indices (int64, last dimension k) of the k largest float32 scores, descending; equal scores by lower index.

    `torch.topk` leaves the order of ties open, so devices disagree. Here each score becomes a unique integer:
    its bits, reordered so that integer order is float order, above the complement of its index.
    """
    bits = (scores.float() + 0.0).contiguous().view(torch.int32)  # adding 0.0 makes -0.0 equal to 0.0
    ordered = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)
    index = torch.arange(scores.shape[-1], device=scores.device)
    key = (ordered.long() << 32) | (0xFFFFFFFF - index)
    return key.topk(k, dim=-1).indices


def keep_best_groups(scores_TE: torch.Tensor, num_groups: int, num_kept: int) -> torch.Tensor:
    """Scores with -inf outside each token's best groups (DeepSeek-V3's group-limited routing).

    A group's score is the sum of its two best experts. Rejected experts get -inf and not 0, which would beat
    a negative real score.
    """
    scores_TGe = scores_TE.view(scores_TE.shape[0], num_groups, -1)
    best_TG = scores_TGe.topk(min(2, scores_TGe.shape[-1]), dim=-1).values.sum(-1)
    kept_TG = torch.zeros_like(best_TG, dtype=torch.bool)
    kept_TG.scatter_(1, stable_topk(best_TG, num_kept), True)
    return scores_TGe.masked_fill(~kept_TG[..., None], float("-inf")).flatten(1)


@operator("select_experts")
def select_experts(
    scores_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    valid_T: torch.Tensor | None,
    k: int,
    num_groups: int,
    num_kept_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Selects each token's experts; one opaque operator, so that a recomputed forward can reuse its result.

    Args:
        scores_TE: float32 scores (detached).
        bias_E: float32, added for the selection only; or None.
        valid_T: bool; rows that are False select no expert. None means that all are valid.
        k: experts per token.
        num_groups, num_kept_groups: group-limited routing; 1 and 1 for none.

    Returns:
        ids_TK int32 (`NO_EXPERT` for invalid rows) and counts_E int32, the number of tokens of each expert.
    """
    if num_groups == 1 and use_triton(scores_TE.device):
        from equipoise.kernels.select_experts_triton import triton_select

        return triton_select(scores_TE, bias_E, valid_T, k)
    return plain_select(scores_TE, bias_E, valid_T, k, num_groups, num_kept_groups)


@torch.library.register_fake("equipoise::select_experts")
def _(scores_TE, bias_E, valid_T, k, num_groups, num_kept_groups):
    T, E = scores_TE.shape
    return scores_TE.new_empty((T, k), dtype=torch.int32), scores_TE.new_empty((E,), dtype=torch.int32)


def plain_select(
    scores_TE: torch.Tensor,
    bias_E: torch.Tensor | None,
    valid_T: torch.Tensor | None,
    k: int,
    num_groups: int,
    num_kept_groups: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference of `select_experts`."""
    choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
    if num_groups > 1:
        choice_TE = keep_best_groups(choice_TE, num_groups, num_kept_groups)
    ids_TK = stable_topk(choice_TE, k)
    num_experts = scores_TE.shape[-1]
    if valid_T is not None:
        # One bin past the end collects the invalid rows, so that no shape depends on the data.
        ids_TK = torch.where(valid_T[:, None], ids_TK, num_experts)
    # Not `bincount`, which reads the largest id on the host. Integer additions: exact in any order.
    flat = ids_TK.flatten()
    counts_E = flat.new_zeros(num_experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:num_experts]
    ids_TK = torch.where(ids_TK == num_experts, NO_EXPERT, ids_TK)
    return ids_TK.to(torch.int32), counts_E.to(torch.int32)
