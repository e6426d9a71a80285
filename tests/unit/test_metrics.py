"""metrics.jsonl stays valid JSON with one line per step, whatever the values, however often a run resumes."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.train.metrics import MetricsConfig, MetricsWriter, cut_after, refuse_missing_packages

REPOSITORY = Path(__file__).resolve().parents[2]


def lines(path: Path) -> list[dict[str, Any]]:
    """The records; fails on NaN and Infinity, which Python would read but JSON does not have."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_a_line_is_on_storage_as_soon_as_it_is_written(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path / "run", MetricsConfig())
    written = writer.write(1, {"loss": torch.tensor(2.5), "layers": {"dead_experts": torch.tensor([0, 2])}})
    assert lines(writer.path) == [written] == [{"step": 1, "loss": 2.5, "layers": {"dead_experts": [0, 2]}}]
    assert writer.position == writer.path.stat().st_size > 0
    writer.close()
    writer.close()


def test_values_that_are_not_finite_are_null_and_named(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, MetricsConfig()) as writer:
        layers = {"expert_maxvio": [1.0, math.nan, math.inf]}
        writer.write(1, {"loss": math.nan, "lr": 0.1, "grad_norm": torch.tensor(-math.inf), "layers": layers})
        writer.write(2, {"loss": 1.0})
    first, second = lines(tmp_path / "metrics.jsonl")
    assert first["loss"] is None
    assert first["grad_norm"] is None
    assert first["layers"]["expert_maxvio"] == [1.0, None, None]
    assert first["nonfinite"] == ["loss", "grad_norm", "layers.expert_maxvio"]
    assert "nonfinite" not in second


def test_a_resume_cuts_later_steps_and_what_was_left_of_a_line(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, MetricsConfig()) as writer:
        for step in range(1, 8):
            writer.write(step, {"loss": float(step)})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 8, "lo')  # killed while writing
    with MetricsWriter(tmp_path, MetricsConfig(), resumed_step=5) as writer:
        for step in range(6, 9):
            writer.write(step, {"loss": -float(step)})
    records = lines(tmp_path / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(1, 9))
    assert [record["loss"] for record in records] == [1, 2, 3, 4, 5, -6, -7, -8]


def test_a_resume_at_the_last_step_cuts_nothing_and_one_without_a_file_is_fine(tmp_path: Path) -> None:
    assert cut_after(tmp_path / "metrics.jsonl", 3) == -1
    with MetricsWriter(tmp_path, MetricsConfig()) as writer:
        writer.write(3, {})
    before = (tmp_path / "metrics.jsonl").read_bytes()
    assert cut_after(tmp_path / "metrics.jsonl", 3) == 3
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_lines_of_a_damaged_file_that_repeat_a_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 1}\nnonsense\n[]\n{"step": 3}\n')
    assert cut_after(path, 3) == 3
    assert [record["step"] for record in lines(path)] == [1, 2, 3]


def test_a_new_run_in_a_used_folder_keeps_the_old_lines_aside(tmp_path: Path) -> None:
    for loss in (1.0, 2.0, 3.0, 4.0):
        with MetricsWriter(tmp_path, MetricsConfig()) as writer:
            writer.write(1, {"loss": loss})
    for name, loss in (("metrics", 4.0), ("metrics.previous", 1.0), ("metrics.previous-2", 2.0)):
        assert [record["loss"] for record in lines(tmp_path / f"{name}.jsonl")] == [loss]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("step", [3, 2])
def test_a_step_is_never_written_twice(tmp_path: Path, step: int) -> None:
    with MetricsWriter(tmp_path, MetricsConfig()) as writer:
        writer.write(3, {})
        with pytest.raises(ValueError, match="one line per step"):
            writer.write(step, {})


def test_layers_can_be_left_out(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, MetricsConfig(per_layer=False)) as writer:
        assert writer.write(1, {"loss": 1.0, "layers": {"dead_experts": [0]}}) == {"step": 1, "loss": 1.0}


def test_tensorboard_gets_every_number(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, MetricsConfig(tensorboard=True)) as writer:
        writer.write(1, {"loss": 2.5, "assumed_peak_source": "measured", "layers": {"dead_experts": [0, 3]}})
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert sorted(events.Tags()["scalars"]) == ["layers/dead_experts/000", "layers/dead_experts/001", "loss"]
    assert events.Scalars("layers/dead_experts/001")[0].value == 3


@pytest.mark.parametrize(("option", "module"), [("tensorboard", "tensorboard"), ("wandb", "wandb")])
def test_a_missing_package_is_named_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ConfigError, match=rf"metrics\.{option} .*pip install 'equipoise\[{option}\]'"):
        MetricsWriter(tmp_path, MetricsConfig(**{option: True}))


def test_wandb_continues_the_same_run_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[dict[str, Any]] = []
    logged: list[tuple[int, dict[str, float]]] = []

    def init(**options: Any) -> Any:
        started.append(options)
        return SimpleNamespace(id="abc", log=lambda scalars, step: logged.append((step, scalars)), finish=lambda: None)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))
    config = MetricsConfig(wandb=True, wandb_project="moe")
    with MetricsWriter(tmp_path, config, run_config={"seed": 1}) as writer:
        writer.write(1, {"loss": 2.0})
    MetricsWriter(tmp_path, config, resumed_step=1).close()
    assert logged == [(1, {"loss": 2.0})]
    assert (started[0]["project"], started[0]["config"], started[0]["id"]) == ("moe", {"seed": 1}, None)
    assert started[1]["id"] == "abc"


def test_the_page_lists_every_field() -> None:
    from equipoise.accelerator import CPUAccelerator
    from equipoise.train.balance_statistics import BalanceResult, balance_metrics
    from equipoise.train.load_statistics import load_metrics
    from equipoise.train.rollout import RolloutResult
    from equipoise.train.throughput import Peak, throughput_metrics
    from equipoise.train.timing import PhaseTimer

    timer = PhaseTimer(CPUAccelerator())
    timer.start_step()
    load = load_metrics(torch.ones(1, 2), torch.ones(1), 1.0)
    layers = load.pop("layers")
    written = {*load, *(f"layers.{name}" for name in layers), *timer.finish_step()}
    written |= throughput_metrics(1, 1.0, 1, 1.0, Peak(1.0, "setting")).keys()
    written |= {"step", "loss", "aux_loss", "z_loss", "mtp_loss", "grad_norm", "lr", "tokens", "memory_peak_bytes"}
    written |= {"eval_loss", "eval_nats_per_byte", "nonfinite", "time_captured_s"}
    page = (REPOSITORY / "docs" / "metrics.md").read_text()
    listed = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `")}
    balance = BalanceResult(torch.ones(1), 1.0, 0.0, 0.0, 0.0, 0.0)
    rollout = RolloutResult(1.0, 0.0, 0.0, 0.0).metrics()
    assert listed == written | balance_metrics(balance).keys() | rollout.keys()
    assert RolloutResult(None, None, None, None).metrics() == {}


@pytest.mark.parametrize("option", ["tensorboard", "wandb"])
def test_a_missing_package_is_refused_before_the_run(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("equipoise.train.metrics.find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, option, raising=False)
    with pytest.raises(ConfigError, match=rf"metrics\.{option} .*pip install 'equipoise\[{option}\]'"):
        refuse_missing_packages(MetricsConfig(**{option: True}))
    refuse_missing_packages(MetricsConfig())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    writer = MetricsWriter(tmp_path, MetricsConfig())
    with pytest.raises(EquipoiseError, match=r"metrics\.jsonl: No space left.*--out"):
        writer.write(1, {"loss": 2.0})
    writer.close()


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(EquipoiseError, match=r"cannot write .*metrics\.jsonl"):
        MetricsWriter(tmp_path, MetricsConfig(), resumed_step=3)
