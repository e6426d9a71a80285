"""Drawing tokens: the same for a request whatever else is in its batch.

Shapes: B requests, V vocabulary.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch

from equipoise.serve.request import Prompt


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on the seed and the output position alone, so a request that is computed again
    goes on as it would have."""
    digest = hashlib.blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def log_probabilities(logits_BV: torch.Tensor, temperatures: Sequence[float]) -> torch.Tensor:
    """float32 log-probabilities at each row's temperature, of the whole vocabulary; a temperature of 0 counts as 1."""
    scale_B = logits_BV.new_tensor([t or 1.0 for t in temperatures], dtype=torch.float32)
    return (logits_BV.float() / scale_B[:, None]).log_softmax(-1)


def draw(log_probs_BV: torch.Tensor, prompts: Sequence[Prompt], positions: Sequence[int]) -> torch.Tensor:
    """int64 token ids [B] on the device; `positions` are the numbers of the output tokens that are drawn."""
    vocab_size = log_probs_BV.shape[1]
    barred = [
        (row, id_) for row, (p, n) in enumerate(zip(prompts, positions)) if n < p.min_new_tokens for id_ in p.stop_ids
    ]
    if barred:
        log_probs_BV = log_probs_BV.clone()
        rows, ids = zip(*barred)
        log_probs_BV[list(rows), list(ids)] = float("-inf")
    best_B = log_probs_BV.argmax(-1)
    if all(p.temperature == 0 for p in prompts):
        return best_B
    probs_BV, order_BV = log_probs_BV.double().exp().sort(dim=-1, descending=True, stable=True)
    column: Any = {"device": probs_BV.device, "dtype": torch.float64}
    top_p_B1 = torch.tensor([p.top_p for p in prompts], **column)[:, None]
    top_k_B1 = torch.tensor([p.top_k if p.top_k > 0 else vocab_size for p in prompts], **column)[:, None]
    before_BV = probs_BV.cumsum(-1) - probs_BV
    rank_V = torch.arange(vocab_size, device=probs_BV.device)
    kept_BV = ((before_BV < top_p_B1 * probs_BV.sum(-1, keepdim=True)) & (rank_V < top_k_B1)) | (rank_V == 0)
    kept_BV &= (probs_BV > 0) | (rank_V == 0)
    sums_BV = (probs_BV * kept_BV).cumsum(-1)
    target_B1 = torch.tensor([uniform(p.seed, n) for p, n in zip(prompts, positions)], **column)[:, None]
    place_B1 = torch.searchsorted(sums_BV, target_B1 * sums_BV[:, -1:], right=True)
    place_B1 = torch.minimum(place_B1, kept_BV.sum(-1, keepdim=True) - 1)
    drawn_B = order_BV.gather(1, place_B1)[:, 0]
    greedy_B = torch.tensor([p.temperature == 0 for p in prompts], device=drawn_B.device)
    return torch.where(greedy_B, best_B, drawn_B)
