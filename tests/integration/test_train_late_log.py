"""The log of a device, where a step's line is written when the next one has been made. The CPU plays the device."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise.accelerator import CPUAccelerator
from equipoise.data import build_dataset
from equipoise.distributed.world import join_world
from equipoise.errors import NonFiniteLossError
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config
from equipoise.train.step import TrainStep
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer
from integration.command import read_metrics

SETTINGS = ["--train.steps", "5", "--train.eval-every", "2", "--checkpoint.every", "3", "--checkpoint.keep-last", "0"]


def run(workplace: Path, out: Path, late: bool, monkeypatch: pytest.MonkeyPatch, fail_in: int = 0) -> list[Any]:
    """Lines in the log before each step but the first, and in words at each save."""
    monkeypatch.chdir(workplace)
    config = load_config(TrainConfig, "recipe.toml", SETTINGS)
    loop = config.train
    datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=loop.seed)
    seen: list[Any] = []
    with StopSignals() as stop, join_world(CPUAccelerator(), timeout_s=30) as world:
        trainer = Trainer(config, world, datasets, out, stop)
        trainer.logs_late = late
        step, save = trainer._train_step, trainer.saver.save

        def noted_step(*args: Any) -> Any:
            if trainer.step:
                seen.append(len(read_metrics(out)))
            return step(*args)

        def noted_save(state: Any, wait: bool) -> Path:
            seen.append(f"save {state.step}: {len(read_metrics(out))}")
            assert state.metrics_position == (out / "metrics.jsonl").stat().st_size
            return save(state, wait)

        monkeypatch.setattr(trainer, "_train_step", noted_step)
        monkeypatch.setattr(trainer.saver, "save", noted_save)
        if fail_in:
            make = TrainStep.forward_backward

            def bad(runner: TrainStep, *args: Any) -> Any:
                sums, counts = make(runner, *args)
                if trainer.step + 1 == fail_in:
                    sums["loss"] = sums["loss"] * torch.nan
                return sums, counts

            monkeypatch.setattr(TrainStep, "forward_backward", bad)
            with pytest.raises(NonFiniteLossError, match=f"step {fail_in}: the loss is nan"):
                trainer.run()
        else:
            trainer.run()
    return seen


def values(out: Path) -> list[dict[str, Any]]:
    """The lines without what differs from run to run."""
    kept = ("step", "loss", "grad_norm", "lr", "tokens", "eval_loss", "rank_imbalance", "expert_maxvio")
    return [{name: line[name] for name in kept if name in line} for line in read_metrics(out)]


def test_lines_are_those_of_a_prompt_log_and_checkpoints_hold_them(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = run(workplace, tmp_path / "prompt", False, monkeypatch)
    late = run(workplace, tmp_path / "late", True, monkeypatch)
    assert prompt == [1, 2, "save 3: 3", 3, 4, "save 5: 5"]
    assert late == [0, 1, "save 3: 3", 3, 3, "save 5: 5"]
    assert values(tmp_path / "late") == values(tmp_path / "prompt")
    lines = read_metrics(tmp_path / "late")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert math.isclose(line["tokens_per_second"], line["tokens"] / line["time_step_s"], rel_tol=1e-3)


def test_a_bad_loss_leaves_the_lines_before_it(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = run(workplace, tmp_path / "bad", True, monkeypatch, fail_in=3)
    assert seen == [0, 1, "save 2: 2"]
    assert [line["step"] for line in read_metrics(tmp_path / "bad")] == [1, 2]
