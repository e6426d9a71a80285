"""`model.load_from` brings the model's settings along; what contradicts them is refused before a run starts."""

from pathlib import Path

import pytest

from equipoise.checkpoint.hf import export, open_source
from equipoise.errors import ConfigError
from equipoise.models.rotary import YarnConfig
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config, parse_config
from equipoise.train.resolved import to_toml
from unit.hf_toys import deepseek_model, hf_model

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    deepseek_model(rope_scaling=YARN).save_pretrained(path / "hf")
    hf_model(mlp_only_layers=[1]).save_pretrained(path / "qwen")
    source = open_source(path / "hf")
    export(source, path / "native", "native")
    source.close()
    return path


def load(folder: Path, *overrides: str) -> TrainConfig:
    return load_config(TrainConfig, None, ["--model.load_from", str(folder), *overrides])


@pytest.mark.parametrize("kind", ["hf", "native"])
def test_the_folder_gives_the_settings(folder: Path, kind: str) -> None:
    model = load(folder / kind, "--model.initializer_range", "0.5", "--model.rope_scaling.factor", "4.0").model
    assert (model.kv_lora_rank, model.mlp_only_layers, model.scoring_func) == (16, (0,), "sigmoid")
    assert model.rope_scaling == YarnConfig(factor=4.0, original_max_position_embeddings=32)
    assert model.initializer_range == 0.5


def test_what_a_run_saves_of_its_settings_loads_again(folder: Path) -> None:
    for name in ("hf", "qwen"):
        config = load(folder / name)
        assert parse_config(TrainConfig, to_toml(config)) == config


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["--model.kv_lora_rank", "17"], "model.kv_lora_rank is 17, but .*hf has 16"),
        (["--model.rope_scaling.factor", "5"], "model.rope_scaling is .*5.0.*, but .*hf has .*4.0"),
        (["--model.num_nextn_predict_layers", "1"], "model.num_nextn_predict_layers is 1, but .*hf has 0"),
        (["--model.num_experts", "six"], "model.num_experts"),
    ],
)
def test_settings_that_contradict_the_folder(folder: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder / "hf", *overrides)


def test_a_folder_that_is_no_model(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.load_from: .*config\.json is missing"):
        load(folder / "nowhere")


def test_a_model_without_a_family_cannot_be_saved_for_hugging_face() -> None:
    with pytest.raises(ConfigError, match="save_hf is set, but no Hugging Face family"):
        load_config(TrainConfig, None, ["--save_hf", "--model.n_shared_experts", "1"])
    assert load_config(TrainConfig, None, ["--save_hf"]).save_hf
    assert not load_config(TrainConfig, None, ["--save_hf", "false"]).save_hf
