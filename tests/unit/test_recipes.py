"""Every preset loads, fits the number of ranks that it names, and is what its name says."""

import json
import re
from types import SimpleNamespace

import pytest
import torch

from equipoise.distributed.mesh import ParallelConfig, derive_axes
from equipoise.models.config import ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.train.config import LoopConfig, TrainConfig, plan_run
from equipoise.train.load import load_config
from equipoise.train.recipes import list_recipes, preset_folder
from equipoise.train.resolved import to_toml

WORLDS = {
    "demo": [2, 4, 8],
    "deepseek-router": [2, 4, 8],
    "h200-ep2": [2, 4],
    "h200-ep8": [8, 16],
    "moe-100m": [1, 2, 4, 8],
    "qwen3-30b-a3b": [8, 16, 64],
    "continue": [1, 2, 8, 64],
    "sft": [1, 2, 8, 32],
    "posttrain-demo": [2, 4, 8],
}
NAMES = [recipe.name for recipe in list_recipes()]


def test_every_preset_is_covered_here() -> None:
    assert sorted(WORLDS) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_it_fits_its_numbers_of_ranks(name: str) -> None:
    config = load_config(TrainConfig, name)
    for world in WORLDS[name]:
        assert plan_run(config, world).micro_batch_size >= 1
    assert to_toml(config)


@pytest.mark.parametrize("recipe", list_recipes(), ids=lambda r: r.name)
def test_its_first_line_describes_it(recipe) -> None:
    assert 20 < len(recipe.summary) <= 120


@pytest.mark.parametrize("name", NAMES)
def test_it_states_only_what_differs_or_matters(name: str) -> None:
    text = preset_folder().joinpath(f"{name}.toml").read_text()
    assert len(re.findall(r"^\w+ = ", text, re.MULTILINE)) < 45


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in MoEForCausalLM(config).parameters())


@pytest.mark.parametrize(("name", "millions"), [("moe-100m", 107), ("qwen3-30b-a3b", 30532)])
def test_its_size_is_the_one_it_names(name: str, millions: int) -> None:
    assert round(parameters(load_config(TrainConfig, name).model) / 1e6) == millions


def test_qwen3_30b_a3b_is_the_released_architecture() -> None:
    released = {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "initializer_range": 0.02,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "router_aux_loss_coef": 0.001,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    }
    ours = load_config(TrainConfig, "qwen3-30b-a3b").model
    expected = ModelConfig.from_hf(json.loads(json.dumps(released)))
    # How tokens are counted for the balance loss is a choice of training, not of the architecture.
    assert ours.model_copy(update={"router_aux_loss_scope": expected.router_aux_loss_scope}) == expected


def test_deepseek_router_uses_each_part_of_that_router() -> None:
    model = load_config(TrainConfig, "deepseek-router").model
    assert model.scoring_func == "sigmoid"
    assert model.selection_bias
    assert model.router_aux_loss_coef == 0
    assert 1 < model.topk_group < model.n_group
    assert model.n_shared_experts == 1
    assert model.moe_layers == (1, 2, 3)


@pytest.mark.parametrize(
    ("device", "share", "length", "expected"),
    [
        ("cpu", 32, 512, 4),
        ("cuda", 32, 512, 32),
        ("cuda", 96, 512, 48),  # 64 would fit, but does not divide
        ("cuda", 7, 8192, 1),
        ("cpu", 6, 512, 3),
        ("cpu", 5, 4096, 1),  # longer than the limit: one sequence is the least
    ],
)
def test_an_automatic_microbatch_divides_the_share_and_suits_the_device(
    device: str, share: int, length: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("equipoise.train.config.get_accelerator", lambda: SimpleNamespace(device_type=device))
    loop = LoopConfig(global_batch_size=2 * share, micro_batch_size="auto", sequence_length=length)
    plan = plan_run(TrainConfig(train=loop), 2)
    assert (plan.micro_batch_size, plan.accumulation_steps) == (expected, share // expected)


def test_gathered_weights_are_freed_where_others_have_them_too() -> None:
    for sizes, chosen, expected in (
        ((1, 1), None, False),
        ((2, 1), None, True),
        ((2, 2), None, False),  # replicas, each with all of the weights
        ((1, 1), True, True),
        ((2, 1), False, False),
    ):
        parallel = ParallelConfig(replicate_size=sizes[1], reshard_after_forward=chosen)
        assert derive_axes(parallel, sizes[0], 8).reshards(parallel) is expected
