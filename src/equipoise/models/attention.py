"""Grouped-query causal attention with query/key norm and rotary positions, optionally confined to documents.

Shapes: B sequences, S tokens, N query heads, G key/value heads, H features per head, D model features.
"""

from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.models.config import ModelConfig


class Documents(NamedTuple):
    """Spans of the documents packed into each sequence: (sequence, start, end), in order. The plain form."""

    spans: list[tuple[int, int, int]]


AttentionMask = Documents | Any | None
"""None: causal over the whole sequence. `Documents`, or FlexAttention's BlockMask: causal within each document."""


def document_mask(document_ids_BS: torch.Tensor | None) -> AttentionMask:
    """The mask for packed documents, in the form that suits the device; one per forward, shared by all layers.

    On a GPU it is FlexAttention's block mask. Elsewhere attention runs document by document. A dense S x S mask is
    never built.

    Args:
        document_ids_BS: integers that differ between neighbouring documents; None when sequences are not packed.
    """
    if document_ids_BS is None:
        return None
    if document_ids_BS.device.type != "cpu":
        from torch.nn.attention.flex_attention import create_block_mask

        def same_document(batch, head, query, key):
            return (query >= key) & (document_ids_BS[batch, query] == document_ids_BS[batch, key])

        num_sequences, length = document_ids_BS.shape
        return create_block_mask(same_document, num_sequences, None, length, length, device=str(document_ids_BS.device))
    spans = []
    for sequence, ids in enumerate(document_ids_BS):
        starts = [0, *(torch.nonzero(ids[1:] != ids[:-1]).flatten() + 1).tolist(), ids.numel()]
        spans += [(sequence, start, end) for start, end in pairwise(starts)]
    return Documents(spans)


def attend(q_BNSH: torch.Tensor, k_BGSH: torch.Tensor, v_BGSH: torch.Tensor, mask: AttentionMask) -> torch.Tensor:
    """Causal scaled dot-product attention under a mask from `document_mask`; returns [B, N, S, H]."""
    if mask is None:
        return F.scaled_dot_product_attention(q_BNSH, k_BGSH, v_BGSH, is_causal=True, enable_gqa=True)
    if isinstance(mask, Documents):
        out: list[list[torch.Tensor]] = [[] for _ in range(q_BNSH.shape[0])]
        for sequence, start, end in mask.spans:
            parts = (x[sequence : sequence + 1, :, start:end] for x in (q_BNSH, k_BGSH, v_BGSH))
            out[sequence].append(attend(*parts, mask=None))
        return torch.cat([torch.cat(parts, dim=2) for parts in out])
    return _compiled_flex_attention()(q_BNSH, k_BGSH, v_BGSH, block_mask=mask, enable_gqa=True)


_flex: Any = None


def _compiled_flex_attention() -> Any:
    """FlexAttention is only fast compiled; compiled once per process, on first use."""
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention, dynamic=False)
    return _flex


def rotary_tables(
    positions_BS: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, 1, S, H] of the rotary angles, computed in FP32 and returned as `dtype`."""
    index = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    angles = positions_BS[..., None].float() * (1.0 / theta ** (index / head_dim))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding in the half-split layout of Llama and Qwen."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Self-attention block; parameter names are those of transformers' Qwen3-MoE."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        hidden, bias = config.hidden_size, config.attention_bias
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * config.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, config.num_key_value_heads * config.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * config.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(config.head_dim, eps=config.rms_norm_eps)

    def forward(
        self, x_BSD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], mask: AttentionMask
    ) -> torch.Tensor:
        heads = (*x_BSD.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x_BSD).view(heads)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x_BSD).view(heads)).transpose(1, 2)
        v = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        out_BNSH = attend(rotate(q, *rotary), rotate(k, *rotary), v, mask)
        return self.o_proj(out_BNSH.transpose(1, 2).flatten(2))
