"""Causal attention with rotary positions, grouped-query or multi-head latent, optionally confined to documents.

Shapes: B sequences, S tokens, N query heads, G key/value heads, H features per head, D model features.
"""

from abc import ABC, abstractmethod
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from equipoise.kernels.rotary_norm import rotary_norm
from equipoise.models.config import ModelConfig
from equipoise.models.rotary import rotate

LATENT_NORM_EPS = 1e-6
"""Of the norms of latent attention, whatever `rms_norm_eps` is: DeepSeek-V3 has it so."""


class Documents(NamedTuple):
    """Spans of the documents packed into each sequence: (sequence, start, end), in order. The plain form."""

    spans: list[tuple[int, int, int]]


class CachedAttention(ABC):
    """Attention of new tokens to keys and values kept from earlier steps, in one layer: generation."""

    @abstractmethod
    def attend(
        self, q_BNSH: torch.Tensor, k_BGSH: torch.Tensor, v_BGSH: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """Keeps the new keys and values (rotated); returns [B, N, S, features of a value]. `scale` as in `attend`."""


AttentionMask = Documents | CachedAttention | Any | None
"""None: causal over the whole sequence. `Documents`, or FlexAttention's BlockMask: causal within each document.
`CachedAttention`: causal after what was kept."""


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


def attend(
    q_BNSH: torch.Tensor,
    k_BGSH: torch.Tensor,
    v_BGSH: torch.Tensor,
    mask: AttentionMask,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal dot-product attention under a mask from `document_mask`; returns [B, N, S, features of a value].

    `scale` multiplies the scores; None is one by the root of H.
    """
    grouped = q_BNSH.shape[1] != k_BGSH.shape[1]
    if mask is None:
        return F.scaled_dot_product_attention(q_BNSH, k_BGSH, v_BGSH, is_causal=True, scale=scale, enable_gqa=grouped)
    if isinstance(mask, CachedAttention):
        return mask.attend(q_BNSH, k_BGSH, v_BGSH, scale)
    if isinstance(mask, Documents):
        out: list[list[torch.Tensor]] = [[] for _ in range(q_BNSH.shape[0])]
        for sequence, start, end in mask.spans:
            q, k, v = (x[sequence : sequence + 1, :, start:end] for x in (q_BNSH, k_BGSH, v_BGSH))
            out[sequence].append(attend(q, k, v, None, scale))
        return torch.cat([torch.cat(parts, dim=2) for parts in out])
    options = _kernel_options(q_BNSH)
    return _compiled_flex_attention()(
        q_BNSH, k_BGSH, v_BGSH, block_mask=mask, scale=scale, enable_gqa=grouped, kernel_options=options
    )


def _kernel_options(q_BNSH: torch.Tensor) -> dict[str, Any] | None:
    """Blocks of FlexAttention's forward kernel, where Inductor's own do not fit into a GPU's shared memory: for FP32
    beyond 128 features, of which DeepSeek-V3's heads have 192, torch 2.11 takes 280 KB. These take 80 KB."""
    if q_BNSH.dtype != torch.float32 or q_BNSH.shape[-1] <= 128:
        return None
    return {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1, "FORCE_USE_FLEX_ATTENTION": True}


_flex: Any = None


def _compiled_flex_attention() -> Any:
    """FlexAttention is only fast compiled; compiled once per process, on first use."""
    global _flex
    if _flex is None:
        from torch.nn.attention.flex_attention import flex_attention

        _flex = torch.compile(flex_attention, dynamic=False)
    return _flex


def _normed_and_rotated(
    x_BSNH: torch.Tensor, norm: nn.RMSNorm, rotary: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Queries or keys as attention takes them: [B, N, S, H]."""
    assert norm.eps is not None
    return rotary_norm(x_BSNH, norm.weight, *rotary, norm.eps).transpose(1, 2)


class GroupedQueryAttention(nn.Module):
    """Heads that share keys and values, with query/key norm; parameter names are those of transformers' Qwen3-MoE."""

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
        q = _normed_and_rotated(self.q_proj(x_BSD).view(heads), self.q_norm, rotary)
        k = _normed_and_rotated(self.k_proj(x_BSD).view(heads), self.k_norm, rotary)
        v = self.v_proj(x_BSD).view(heads).transpose(1, 2)
        out_BNSH = attend(q, k, v, mask)
        return self.o_proj(out_BNSH.transpose(1, 2).flatten(2))


class LatentAttention(nn.Module):
    """Keys and values of all heads from one latent vector per token; parameter names are those of DeepSeek-V3.

    Part of a query's and key's features carry the rotary position; the key's part is shared by all heads. Source:
    DeepSeek-V2's technical report (arXiv 2405.04434), section 2.1. For training: the latent is expanded.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.kv_lora_rank is not None
        hidden, heads, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
        self.kv_lora_rank, self.v_head_dim = config.kv_lora_rank, config.v_head_dim
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.interleaved = config.rope_interleave
        self.scale = config.qk_head_dim**-0.5 * (config.rope_scaling.score_scale() if config.rope_scaling else 1.0)
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(hidden, heads * config.qk_head_dim, bias=False)
        else:
            self.q_a_proj = nn.Linear(hidden, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = nn.RMSNorm(config.q_lora_rank, eps=LATENT_NORM_EPS)
            self.q_b_proj = nn.Linear(config.q_lora_rank, heads * config.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.kv_lora_rank + self.rope_dim, bias=bias)
        self.kv_a_layernorm = nn.RMSNorm(self.kv_lora_rank, eps=LATENT_NORM_EPS)
        self.kv_b_proj = nn.Linear(self.kv_lora_rank, heads * (self.nope_dim + self.v_head_dim), bias=False)
        self.o_proj = nn.Linear(heads * self.v_head_dim, hidden, bias=bias)

    def forward(
        self, x_BSD: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor], mask: AttentionMask
    ) -> torch.Tensor:
        by_head, is_low_rank = (*x_BSD.shape[:2], -1), self.q_lora_rank is not None
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSD))) if is_low_rank else self.q_proj(x_BSD)
        q = q.view(*by_head, self.nope_dim + self.rope_dim).transpose(1, 2)
        q_nope, q_rope = q.split([self.nope_dim, self.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x_BSD).split([self.kv_lora_rank, self.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(*by_head, self.nope_dim + self.v_head_dim)
        k_nope, v = kv.transpose(1, 2).split([self.nope_dim, self.v_head_dim], dim=-1)
        q_rope, k_rope = self._rotate(q_rope, rotary), self._rotate(k_rope[:, None], rotary)
        q = torch.cat([q_nope, q_rope], dim=-1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:3], -1)], dim=-1)
        out_BNSH = attend(q, k, v, mask, self.scale)
        return self.o_proj(out_BNSH.transpose(1, 2).flatten(2))

    def _rotate(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.interleaved:  # pairs of neighbours, brought to the half-split layout; scores do not see the order
            x = torch.cat([x[..., 0::2], x[..., 1::2]], dim=-1)
        return rotate(x, *rotary)


def build_attention(config: ModelConfig) -> nn.Module:
    """Latent attention where the configuration has a latent (`kv_lora_rank`), grouped-query attention otherwise."""
    return GroupedQueryAttention(config) if config.kv_lora_rank is None else LatentAttention(config)
