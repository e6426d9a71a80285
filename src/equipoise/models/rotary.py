"""Rotary position embeddings, plain and stretched by YaRN.

Shapes: B sequences, S tokens, H rotated features per head.
"""

import math

import torch
from pydantic import PositiveFloat, PositiveInt

from equipoise.config import Config


class YarnConfig(Config):
    """YaRN: stretches rotary positions beyond the length that a model was pretrained with (arXiv 2309.00071)."""

    factor: PositiveFloat = 1.0
    """How many times longer sequences become; low frequencies are divided by it."""
    original_max_position_embeddings: PositiveInt = 4096
    """Longest sequence of the pretraining before the stretch."""
    beta_fast: PositiveFloat = 32.0
    """Frequencies with at least so many turns over the original length stay as they are."""
    beta_slow: PositiveFloat = 1.0
    """Frequencies with at most so many turns are divided by the whole factor."""
    mscale: float | None = None
    """With mscale_all_dim: sharpens the rotated part of queries and keys (DeepSeek)."""
    mscale_all_dim: float | None = None
    """Sharpens all scores of latent attention (DeepSeek)."""
    attention_factor: PositiveFloat | None = None
    """Factor on the rotated parts; none derives it from factor, mscale and mscale_all_dim."""
    truncate: bool = True
    """Whether the band between beta_fast and beta_slow is rounded to whole frequencies."""

    def rotated_scale(self) -> float:
        """Factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return _sharpening(self.factor, self.mscale) / _sharpening(self.factor, self.mscale_all_dim)
        return _sharpening(self.factor, 1.0)

    def score_scale(self) -> float:
        """Factor on all scores of latent attention."""
        return _sharpening(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def stretched(self, frequencies_F: torch.Tensor, theta: float) -> torch.Tensor:
        """The frequencies (radians per position, descending), each divided by 1 to `factor`."""
        num = frequencies_F.numel()

        def index_of(turns: float) -> float:
            """Index of the frequency that makes so many turns over the original length."""
            longest = self.original_max_position_embeddings / (turns * 2 * math.pi)
            return num * math.log(longest) / math.log(theta)

        low, high = index_of(self.beta_fast), index_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num - 1)
        width = high - low if high != low else 0.001
        index_F = torch.arange(num, dtype=torch.float32, device=frequencies_F.device)
        share_F = ((index_F - low) / width).clamp(0, 1)
        return frequencies_F * (1 - share_F) + frequencies_F / self.factor * share_F


def _sharpening(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def rotary_tables(
    positions_BS: torch.Tensor, head_dim: int, theta: float, dtype: torch.dtype, yarn: YarnConfig | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines [B, 1, S, H] of the rotary angles, computed in FP32 and returned as `dtype`."""
    index = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions_BS.device)
    frequencies_F = 1.0 / theta ** (index / head_dim)
    if yarn is not None:
        frequencies_F = yarn.stretched(frequencies_F, theta)
    angles = positions_BS[..., None].float() * frequencies_F
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    scale = yarn.rotated_scale() if yarn is not None else 1.0
    return (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Applies the rotary embedding in the half-split layout of Llama and Qwen."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin
