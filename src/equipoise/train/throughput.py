"""Tokens per second, model FLOPs per token, and the share of a peak that is reached (MFU).

Only the model's own arithmetic counts as useful: recomputed work, padding and communication do not.
"""

import functools
import time
from dataclasses import dataclass

import torch

from equipoise.accelerator import Accelerator
from equipoise.models.config import ModelConfig


def active_parameters(model: ModelConfig) -> int:
    """Weights of the matrices that one token is multiplied with.

    These are attention's projections, the dense MLP or the router with the top-k and shared experts, and the
    output head (also where it is tied). A multi-token-prediction layer has its input projection and counts the head
    once more. The input embedding is a look-up; norms and biases are left out.
    """
    layers, moe_layers, ahead = model.num_layers, len(model.moe_layers), model.num_nextn_predict_layers
    attention = model.attention_parameters
    dense = 3 * model.hidden_size * model.intermediate_size
    experts = model.num_experts_per_tok + model.n_shared_experts
    moe = 3 * model.hidden_size * model.moe_intermediate_size * experts + model.hidden_size * model.num_experts
    head = model.vocab_size * model.hidden_size
    matrices = layers * attention + (layers - moe_layers) * dense + moe_layers * moe + head
    return matrices + ahead * (2 * model.hidden_size**2 + head)


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """FLOPs of one trained token: 6 * active parameters + 3 * layers * heads * (features of a key and value) * (S + 1).

    A multiply-add is 2 FLOPs and the backward costs twice the forward, hence 6 per weight. Causal attention:
    the token at position p meets p + 1 keys, (S + 1) / 2 on average, each 2 * heads FLOPs per feature of a key and of a
    value forward, and three times that with the backward. Where documents are masked from each
    other this is an upper bound.
    """
    features = model.qk_head_dim + model.value_head_dim
    attention = model.num_layers * model.num_attention_heads * features * (sequence_length + 1)
    return 6 * active_parameters(model) + 3 * attention


@dataclass(frozen=True)
class Peak:
    """FLOP/s that one rank's device is assumed to reach at best, and where the figure is from."""

    flops: float
    source: str  # "setting", "datasheet" or "measured"


def assumed_peak(accelerator: Accelerator, dtype: torch.dtype, override: float | None = None) -> Peak:
    """The override if there is one, else the device's datasheet figure for `dtype`, else a short measurement.

    The measurement multiplies matrices for about 0.2 s and is made once per process, device and dtype.
    """
    if override is not None:
        return Peak(override, "setting")
    datasheet = accelerator.peak_flops(dtype)
    if datasheet is not None:
        return Peak(datasheet, "datasheet")
    return Peak(_measured_peak(accelerator, dtype, torch.get_num_threads()), "measured")


@functools.cache
def _measured_peak(accelerator: Accelerator, dtype: torch.dtype, threads: int) -> float:
    """Best rate of a square matrix product; `threads` only distinguishes measurements."""
    size = 512 if accelerator.device_type == "cpu" else 8192
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(size, size, generator=generator).to(accelerator.device(), dtype)
    best, deadline = 0.0, time.perf_counter() + 0.2
    with torch.no_grad():
        a @ a
        while best == 0.0 or time.perf_counter() < deadline:
            accelerator.synchronize()
            start = time.perf_counter()
            a @ a
            accelerator.synchronize()
            best = max(best, 2 * size**3 / (time.perf_counter() - start))
    return best


def throughput_metrics(
    tokens: int, seconds: float, world_size: int, model_flops_per_token: float, peak: Peak
) -> dict[str, float | str]:
    """Metrics fields from the `tokens` that all ranks trained on in `seconds`."""
    rate = tokens / seconds if seconds > 0 else 0.0
    return {
        "tokens_per_second": rate,
        "tokens_per_second_per_rank": rate / world_size,
        "mfu": rate * model_flops_per_token / (world_size * peak.flops),
        "assumed_peak_flops": peak.flops,
        "assumed_peak_source": peak.source,
    }
