"""Runs and their checkpoints: going back to a step, a write that fails behind training, folders that are refused."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distributed.harness import observe_ranks, run_ranks
from distributed.parity import toy_model
from equipoise import files
from equipoise.checkpoint.config import CheckpointConfig
from equipoise.checkpoint.manifest import damage
from equipoise.checkpoint.shards import LaterWriter
from equipoise.data.config import DataConfig
from equipoise.distributed.mesh import ParallelConfig
from equipoise.train.config import LoopConfig, TrainConfig
from equipoise.train.metrics import MetricsConfig
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.run import run_training

ON_CPU = {"EQUIPOISE_ACCELERATOR": "cpu"}
STEPS, EVERY = 6, 2


def train(folder: Path, resume_step: int | None = None, lr: float = 1e-3) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    config = TrainConfig(
        model=toy_model(num_hidden_layers=1, mlp_only_layers=()),
        data=DataConfig(source="random", eval_fraction=0.0),
        parallel=ParallelConfig(ep_size=world_size, timeout_s=30),
        train=LoopConfig(steps=STEPS, global_batch_size=2, sequence_length=8),
        optimizer=OptimizerConfig(lr=lr, warmup_steps=0, min_lr_ratio=1.0),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=0),
        metrics=MetricsConfig(peak_flops=1e12),
    )
    run_training(config, folder, [], resume=True, resume_step=resume_step)


def steps_and_losses(metrics: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))
    return {line["step"]: line["loss"] for line in lines}


def saved(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def names(*steps: int) -> list[str]:
    return [f"step-{step:08}" for step in steps]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of one rank."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    run_ranks(train, 1, folder, deadline_s=60, env=ON_CPU)
    assert saved(folder) == names(2, 4, 6)
    return folder


def test_a_run_goes_back_and_keeps_what_it_leaves(whole: Path, tmp_path: Path) -> None:
    """Back to step 2 with another learning rate; then the command is started once more, as a scheduler would."""
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    want = steps_and_losses(whole / "metrics.jsonl")
    (back,) = observe_ranks(train, 1, folder, 2, 3e-3, deadline_s=60, env=ON_CPU)
    assert back.ok, back.traceback
    assert "resuming after step 2" in back.output
    assert f"trained again, are now in {folder}/checkpoints/superseded-1" in back.output
    got = steps_and_losses(folder / "metrics.jsonl")
    assert {step: loss for step, loss in got.items() if step <= 3} == {step: want[step] for step in (1, 2, 3)}
    assert got[4] != want[4]
    assert len(got) == STEPS
    assert saved(folder) == [*names(2, 4, 6), "superseded-1"]
    aside = folder / "checkpoints" / "superseded-1"
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", *names(4, 6)]
    assert steps_and_losses(aside / "metrics.jsonl") == want
    assert [damage(aside / name) for name in names(4, 6)] == [None, None]

    (again,) = observe_ranks(train, 1, folder, 2, 3e-3, deadline_s=60, env=ON_CPU)
    assert again.ok, again.traceback
    assert "was trained after the run went back to step 2" in again.output
    assert "nothing to train" in again.output
    assert steps_and_losses(folder / "metrics.jsonl") == got
    assert saved(folder) == [*names(2, 4, 6), "superseded-1"]


def test_a_step_that_is_not_there_changes_nothing(whole: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    (refused,) = observe_ranks(train, 1, whole, 5, deadline_s=60, env=ON_CPU)
    assert "cannot resume from step 5" in refused.traceback
    assert "Complete checkpoints of the run: 2, 4, 6. Choose one of them" in refused.traceback
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def fails_on_rank_1(folder: Path) -> None:
    """The thread of rank 1 finds the disk full when it writes step 4; rank 0's has written its part."""
    write = LaterWriter.write

    def full(writer: LaterWriter, *arguments: Any) -> None:
        write(writer, *arguments)
        if os.environ["RANK"] == "1" and "step-00000004" in str(writer.path):
            raise OSError(errno.ENOSPC, "No space left on device")

    LaterWriter.write = full  # type: ignore[method-assign]
    train(folder)


def test_a_write_that_fails_behind_the_training_ends_it_on_all_ranks_with_one_message(tmp_path: Path) -> None:
    outcomes = observe_ranks(fails_on_rank_1, 2, tmp_path, deadline_s=60, env=ON_CPU)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        message = outcome.traceback.splitlines()[-1]
        assert message.startswith("equipoise.errors.CheckpointError: cannot write checkpoint")
        assert f"{tmp_path}/checkpoints/step-00000004: rank 1: OSError: [Errno 28] No space left on device" in message
        assert "Earlier checkpoints are untouched" in message
    assert saved(tmp_path) == names(2)
    assert damage(tmp_path / "checkpoints" / "step-00000002") is None


def refuses(target: str, code: int) -> Callable[..., Any]:
    """A system that refuses to write there: tests may run as root, whom permissions do not stop."""
    make = tempfile.TemporaryFile

    def make_file(dir: Path) -> Any:
        if target in str(dir):
            raise OSError(code, os.strerror(code))
        return make(dir=dir)

    return make_file


def into_a_read_only_folder(folder: Path) -> None:
    files.tempfile.TemporaryFile = refuses("checkpoints", errno.EROFS)
    train(folder)


def test_a_folder_that_cannot_be_written_is_refused_before_the_first_step(whole: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    shutil.rmtree(folder / "checkpoints" / "step-00000006")
    before = (folder / "metrics.jsonl").read_bytes()
    (refused,) = observe_ranks(into_a_read_only_folder, 1, folder, deadline_s=60, env=ON_CPU)
    assert f"cannot write checkpoints into {folder}/checkpoints: Read-only file system" in refused.traceback
    assert "step 5/6" not in refused.output
    assert saved(folder) == names(2, 4)
    assert (folder / "metrics.jsonl").read_bytes() == before
