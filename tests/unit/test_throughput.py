"""FLOPs of a token against a count by hand and by torch; MFU and its peak."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from equipoise.accelerator import CPUAccelerator
from equipoise.models.config import ModelConfig
from equipoise.train.throughput import (
    Peak,
    active_parameters,
    assumed_peak,
    flops_per_token,
    throughput_metrics,
)

SMALL = ModelConfig(
    vocab_size=10,
    hidden_size=8,
    num_hidden_layers=3,
    mlp_only_layers=(0,),
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=4,
    intermediate_size=16,
    moe_intermediate_size=6,
    num_experts=5,
    num_experts_per_tok=2,
    n_shared_experts=1,
)


def test_active_parameters_by_hand() -> None:
    attention = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8  # q, k, v, o
    dense = 3 * 8 * 16  # gate, up, down
    moe = 8 * 5 + 2 * 3 * 8 * 6 + 1 * 3 * 8 * 6  # router, two experts, the shared expert
    assert active_parameters(SMALL) == 3 * attention + dense + 2 * moe + 10 * 8


def test_attention_by_hand() -> None:
    # 3 tokens meet 1 + 2 + 3 keys; a key costs each head 4 multiply-adds for the score and 4 for the values.
    layers, heads, passes = 3, 2, 3
    attention = layers * (1 + 2 + 3) * heads * (4 + 4) * 2 * passes
    assert 3 * (flops_per_token(SMALL, 3) - 6 * active_parameters(SMALL)) == attention


def test_matrices_agree_with_torchs_own_count() -> None:
    """A token's matrices as plain products, forward and backward, counted by torch."""
    x = torch.randn(1, 8, requires_grad=True)
    shapes = [(8, 8), (8, 4), (8, 4), (8, 8)] * 3 + [(8, 16)] * 3 + ([(8, 5)] + [(8, 6)] * 9) * 2 + [(8, 10)]
    with FlopCounterMode(display=False) as counter:
        for shape in shapes:
            (x @ torch.randn(shape, requires_grad=True)).sum().backward()
    assert counter.get_total_flops() == 6 * active_parameters(SMALL)


def test_a_layer_that_predicts_a_further_token_has_its_projection_and_the_head_once_more() -> None:
    one = SMALL.model_copy(update={"num_nextn_predict_layers": 1})
    attention, moe = 8 * 8 + 8 * 4 + 8 * 4 + 8 * 8, 8 * 5 + 2 * 3 * 8 * 6 + 1 * 3 * 8 * 6
    assert active_parameters(one) - active_parameters(SMALL) == attention + moe + 16 * 8 + 10 * 8
    attention_flops = 4 * (1 + 2 + 3) * 2 * (4 + 4) * 2 * 3
    assert 3 * (flops_per_token(one, 3) - 6 * active_parameters(one)) == attention_flops


def test_a_top_k_of_all_experts_counts_all() -> None:
    every = SMALL.model_copy(update={"num_experts_per_tok": 5})
    assert active_parameters(every) - active_parameters(SMALL) == 2 * 3 * 3 * 8 * 6


def test_mfu_refers_to_all_ranks() -> None:
    metrics = throughput_metrics(1000, 2.0, 4, model_flops_per_token=8e9, peak=Peak(2e12, "datasheet"))
    assert metrics == {
        "tokens_per_second": 500.0,
        "tokens_per_second_per_rank": 125.0,
        "mfu": 0.5,
        "assumed_peak_flops": 2e12,
        "assumed_peak_source": "datasheet",
    }


def test_no_time_is_no_rate() -> None:
    assert throughput_metrics(0, 0.0, 1, 1.0, Peak(1.0, "setting"))["tokens_per_second"] == 0.0


def test_the_peak_is_the_setting_then_the_datasheet_then_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator = CPUAccelerator()
    assert assumed_peak(accelerator, torch.float32, 1e12) == Peak(1e12, "setting")
    measured = assumed_peak(accelerator, torch.float32)
    assert measured.source == "measured"
    assert 1e8 < measured.flops < 1e15
    assert assumed_peak(accelerator, torch.float32) == measured  # once per process
    monkeypatch.setattr(CPUAccelerator, "peak_flops", lambda self, dtype: 3e12)
    assert assumed_peak(accelerator, torch.float32) == Peak(3e12, "datasheet")
