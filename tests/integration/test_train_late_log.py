"""The log of a device, where a step's line is written when the next one has been made. The CPU plays the device."""

import math
import time
from collections.abc import Callable
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
from equipoise.train.timing import StepTimes
from equipoise.train.trainer import LAST_LINE_S, Trainer
from integration.command import read_metrics

SETTINGS = ["--train.steps", "5", "--train.eval-every", "2", "--checkpoint.every", "3", "--checkpoint.keep-last", "0"]


def run(
    workplace: Path,
    out: Path,
    late: bool,
    monkeypatch: pytest.MonkeyPatch,
    fail_in: int = 0,
    settings: list[str] = SETTINGS,
    spoil: Callable[[Trainer], None] | None = None,
    resume: bool = False,
) -> list[Any]:
    """Lines in the log before each step but the first, and in words at each save. `spoil` prepares a failure."""
    monkeypatch.chdir(workplace)
    config = load_config(TrainConfig, "recipe.toml", settings)
    loop = config.train
    datasets = build_dataset(config.data, loop.sequence_length, vocab_size=config.model.vocab_size, seed=loop.seed)
    seen: list[Any] = []
    with StopSignals() as stop, join_world(CPUAccelerator(), timeout_s=30) as world:
        trainer = Trainer(config, world, datasets, out, stop)
        trainer.logs_late = late
        trainer.restore(resume)
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
        elif spoil is not None:
            spoil(trainer)
            with pytest.raises(OSError, match="spoilt"):
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


@pytest.mark.parametrize(
    ("step", "seen"), [(1, ["save 0: 0"]), (3, [0, 1, "save 2: 2"]), (5, [0, 1, "save 3: 3", 3, 3, "save 4: 4"])]
)
def test_a_bad_loss_leaves_the_lines_before_it(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int, seen: list[Any]
) -> None:
    assert run(workplace, tmp_path, True, monkeypatch, fail_in=step) == seen
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, step))


def fail(*args: Any) -> Any:
    raise OSError("spoilt")


def no_data_after(steps: int) -> Callable[[Trainer], None]:
    def spoil(trainer: Trainer) -> None:
        take = trainer.loader.next_step
        trainer.loader.next_step = lambda: fail() if trainer.step == steps else take()  # type: ignore[method-assign]

    return spoil


def no_evaluation(trainer: Trainer) -> None:
    trainer.evaluate = fail  # type: ignore[method-assign]


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize(("spoil", "steps"), [(no_data_after(1), [1]), (no_evaluation, [1, 2])])
def test_a_failure_leaves_the_line_of_the_last_step_and_resuming_doubles_none(
    workplace: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: bool,
    spoil: Callable[[Trainer], None],
    steps: list[int],
) -> None:
    settings = [*SETTINGS, "--checkpoint.every", "1"] if spoil is no_evaluation else SETTINGS
    run(workplace, tmp_path, late, monkeypatch, settings=settings, spoil=spoil)
    assert [line["step"] for line in read_metrics(tmp_path)] == steps
    if late and spoil is no_evaluation:
        assert "eval_loss" not in read_metrics(tmp_path)[-1]
        run(workplace, tmp_path, late, monkeypatch, settings=settings, resume=True)
        lines = read_metrics(tmp_path)
        assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
        assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 5]


def test_a_device_that_does_not_answer_holds_no_failed_run(
    workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed_at = 0.0

    def spoil(trainer: Trainer) -> None:
        def silent(times: StepTimes) -> None:
            nonlocal failed_at
            failed_at = time.monotonic()
            time.sleep(60)

        no_data_after(1)(trainer)
        monkeypatch.setattr(StepTimes, "wait", silent)

    run(workplace, tmp_path, True, monkeypatch, spoil=spoil)
    assert LAST_LINE_S <= time.monotonic() - failed_at < LAST_LINE_S + 20
    assert read_metrics(tmp_path) == []


def test_lines_of_every_other_step(workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = [*SETTINGS, "--metrics.log-every", "2", "--train.eval-every", "3", "--checkpoint.every", "1"]
    run(workplace, tmp_path, True, monkeypatch, settings=settings)
    assert [line["step"] for line in read_metrics(tmp_path)] == [2, 3, 4, 5]
