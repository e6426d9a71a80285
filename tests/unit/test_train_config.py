"""Values of the training settings that would fail late, or never, are refused before a run starts."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from equipoise.errors import CheckpointError, ConfigError
from equipoise.models.config import TRAINING_ONLY, ModelConfig, describe_changes, model_changes
from equipoise.train import trainer
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.schema import read_schema

NUMBERS = [key for key, setting in read_schema(TrainConfig).settings.items() if "float" in setting.expected]


@pytest.mark.parametrize("value", ["inf", "nan"])
@pytest.mark.parametrize("key", NUMBERS)
def test_no_number_may_be_infinite(key: str, value: str) -> None:
    """A checkpoint could not hold it: the run would be lost at its first save."""
    given = f"0.5,{value}" if key == "optimizer.betas" else value
    with pytest.raises(ConfigError, match=key):
        load_config(TrainConfig, None, [f"--{key}={given}"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.seed", "99999999999999999999"),
        ("train.seed", "-1"),
        ("optimizer.betas", "0.9,1"),
        ("optimizer.betas", "-0.1,0.9"),
        ("parallel.timeout_s", "1e12"),
    ],
)
def test_what_torch_would_refuse_is_refused_with_its_key(key: str, value: str) -> None:
    with pytest.raises(ConfigError, match=key):
        load_config(TrainConfig, None, [f"--{key}={value}"])


@pytest.mark.parametrize(
    "changed",
    [
        {"num_experts_per_tok": 3},
        {"norm_topk_prob": True},
        {"rope_theta": 500.0},
        {"scoring_func": "sigmoid"},
        {"routed_scaling_factor": 2.5},
    ],
    ids=str,
)
def test_a_resume_notices_settings_that_change_what_the_model_computes(changed: dict[str, object]) -> None:
    (name,) = changed
    saved = ModelConfig().model_dump(mode="json")
    found = model_changes(saved, ModelConfig.model_validate(changed).model_dump(mode="json"))
    assert found == {name: (saved[name], changed[name])}
    told = f"model.{name}: the checkpoint has {saved[name]}, this run has {changed[name]}"
    assert describe_changes(found) == told


def test_ranks_that_resume_refuse_another_model_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under a launcher nobody has looked before."""
    resumed = object.__new__(trainer.Trainer)
    resumed.world, resumed.run_dir = None, tmp_path
    saved = SimpleNamespace(config=TrainConfig().model_dump(mode="json"), loader={"position": 3})
    monkeypatch.setattr(resumed, "_state", lambda: None)
    monkeypatch.setattr(trainer, "choose_checkpoint", lambda *arguments: tmp_path / "step-00000002")
    monkeypatch.setattr(trainer, "load_checkpoint", lambda *arguments: saved)
    monkeypatch.setattr(trainer, "together", lambda action, world: action())
    resumed.config = TrainConfig.model_validate({"model": {"rope_theta": 2.0}})
    with pytest.raises(CheckpointError, match=r"something else: model\.rope_theta: the checkpoint has 10000\.0"):
        resumed.restore(resume=True)
    taken: list[dict[str, int]] = []
    resumed.loader = SimpleNamespace(load_state_dict=taken.append)
    resumed.config = TrainConfig()
    with pytest.raises(AttributeError, match="step"):  # further than this the stand-in does not go
        resumed.restore(resume=True)
    assert taken == [{"position": 3}]


def test_a_resume_may_change_how_a_model_is_trained_and_knows_fewer_settings() -> None:
    saved = ModelConfig(mlp_only_layers=(1,)).model_dump(mode="json")
    saved.pop("routed_scaling_factor")  # of an older version
    assert {name for name in ModelConfig.model_fields if name.endswith("_coef")} <= TRAINING_ONLY
    for name in TRAINING_ONLY:
        saved[name] = "another"
    assert model_changes(saved, ModelConfig(mlp_only_layers=(1,)).model_dump(mode="json")) == {}
