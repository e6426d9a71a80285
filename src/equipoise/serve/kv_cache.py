"""Keys and values of the tokens that were computed, in fixed slots of one sequence each.

Shapes: L layers, C slots, M tokens per slot, G key/value heads, N query heads, H features per head, T new tokens of a
step, R decoding rows (spans of one token).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from equipoise.models.attention import CachedAttention
from equipoise.models.config import ModelConfig


class Span(NamedTuple):
    """New tokens of one sequence in a step: `length` of them, at positions `start`, ... of slot `slot`."""

    slot: int
    start: int
    length: int


class KVCache:
    """Two tensors for each layer, [C, G, M, H of a key or of a value]. `release` gives their memory back, `allocate`
    takes it again."""

    def __init__(
        self, config: ModelConfig, num_slots: int, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.num_layers, self.num_slots, self.max_tokens = config.num_hidden_layers, num_slots, max_tokens
        heads, features = config.num_key_value_heads, (config.head_dim, config.head_dim)
        if config.kv_lora_rank is not None:  # the latent is kept expanded
            heads, features = config.num_attention_heads, (config.qk_head_dim, config.v_head_dim)
        self.key_shape, self.value_shape = ((num_slots, heads, max_tokens, size) for size in features)
        self.dtype, self.device = dtype, device
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.allocate()

    @property
    def num_bytes(self) -> int:
        """Memory that is allocated now."""
        return sum(x.numel() * x.element_size() for x in (*self.keys, *self.values))

    def allocate(self) -> None:
        """Memory for all slots; twice is harmless. Zeros: what was never written must not hold NaN."""
        if not self.keys:
            self.keys, self.values = (
                [torch.zeros(shape, dtype=self.dtype, device=self.device) for _ in range(self.num_layers)]
                for shape in (self.key_shape, self.value_shape)
            )

    def release(self) -> None:
        """Gives the memory back; what was kept is lost. Twice is harmless."""
        self.keys, self.values = [], []

    def copy_prefix(self, source: int, target: int, count: int) -> None:
        """The first `count` tokens of one slot also in another."""
        for kept in (*self.keys, *self.values):
            kept[target, :, :count] = kept[source, :, :count]

    def step(self, spans: Sequence[Span]) -> "list[StepAttention]":
        """One attention for each layer, for new tokens in the order of the spans."""
        shared = _Rows(spans, self.device)
        return [StepAttention(k, v, shared) for k, v in zip(self.keys, self.values)]


class _Rows:
    """Where a step's tokens go, worked out once for all layers."""

    def __init__(self, spans: Sequence[Span], device: torch.device) -> None:
        self.chunks: list[tuple[int, Span]] = []  # first new token, span
        decoding: list[tuple[int, Span]] = []
        first = 0
        for span in spans:
            (decoding if span.length == 1 else self.chunks).append((first, span))
            first += span.length
        self.num_tokens = first
        self.rows_R = torch.tensor([row for row, _ in decoding], dtype=torch.int64, device=device)
        self.slots_R = torch.tensor([span.slot for _, span in decoding], dtype=torch.int64, device=device)
        self.positions_R = torch.tensor([span.start for _, span in decoding], dtype=torch.int64, device=device)
        self.longest = max((span.start + 1 for _, span in decoding), default=0)
        reach = torch.arange(self.longest, device=device)
        self.mask_R11M = (reach <= self.positions_R[:, None])[:, None, None]


class StepAttention(CachedAttention):
    """Attention of one layer in one step: rows that decode together, longer spans one by one."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, rows: _Rows) -> None:
        self.keys, self.values, self.rows = keys, values, rows

    def attend(
        self, q_BNSH: torch.Tensor, k_BGSH: torch.Tensor, v_BGSH: torch.Tensor, scale: float | None
    ) -> torch.Tensor:
        """B is 1: the step's tokens, S of them, belong to several sequences."""
        rows, out = self.rows, q_BNSH.new_zeros(*q_BNSH.shape[:3], v_BGSH.shape[-1])
        options: Any = {"scale": scale, "enable_gqa": q_BNSH.shape[1] != k_BGSH.shape[1]}
        if rows.longest:
            q_RN1H, k_RGH, v_RGH = (x[0].transpose(0, 1)[rows.rows_R] for x in (q_BNSH, k_BGSH, v_BGSH))
            self.keys[rows.slots_R, :, rows.positions_R] = k_RGH
            self.values[rows.slots_R, :, rows.positions_R] = v_RGH
            k = self.keys[:, :, : rows.longest][rows.slots_R]
            v = self.values[:, :, : rows.longest][rows.slots_R]
            y = F.scaled_dot_product_attention(q_RN1H[:, :, None], k, v, attn_mask=rows.mask_R11M, **options)
            out[0, :, rows.rows_R] = y[:, :, 0].transpose(0, 1)
        for first, (slot, start, count) in rows.chunks:
            new, end = slice(first, first + count), start + count
            self.keys[slot, :, start:end] = k_BGSH[0, :, new]
            self.values[slot, :, start:end] = v_BGSH[0, :, new]
            k, v = self.keys[slot : slot + 1, :, :end], self.values[slot : slot + 1, :, :end]
            mask = None
            if start:
                new_positions = torch.arange(start, end, device=k.device)
                mask = torch.arange(end, device=k.device) <= new_positions[:, None]
            out[:, :, new] = F.scaled_dot_product_attention(
                q_BNSH[:, :, new], k, v, attn_mask=mask, is_causal=start == 0, **options
            )
        return out
