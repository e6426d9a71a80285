"""Runs that are killed with SIGKILL at any moment: they go on from a complete checkpoint as if nothing had happened."""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from distributed.harness import RankOutcome, observe_ranks, run_ranks
from distributed.parity import toy_model
from equipoise.checkpoint import layout
from equipoise.checkpoint.config import CheckpointConfig
from equipoise.checkpoint.manifest import damage
from equipoise.data.config import DataConfig
from equipoise.distributed.mesh import ParallelConfig
from equipoise.train.config import LoopConfig, TrainConfig
from equipoise.train.metrics import MetricsConfig
from equipoise.train.optimizer import OptimizerConfig
from equipoise.train.run import run_training
from equipoise.train.trainer import Trainer

ON_CPU = {"EQUIPOISE_ACCELERATOR": "cpu"}
STEPS, EVERY = 12, 2
TOUCHES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def run_config(steps: int, world_size: int) -> TrainConfig:
    return TrainConfig(
        model=toy_model(num_hidden_layers=1, mlp_only_layers=(), selection_bias=True, bias_update_speed=0.01),
        data=DataConfig(source="random", eval_fraction=0.0),
        parallel=ParallelConfig(ep_size=world_size, timeout_s=20),
        train=LoopConfig(steps=steps, global_batch_size=2, sequence_length=8),
        optimizer=OptimizerConfig(warmup_steps=0, min_lr_ratio=1.0),
        checkpoint=CheckpointConfig(every=EVERY, keep_last=2, keep_every=6),
        metrics=MetricsConfig(peak_flops=1e12),
    )


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_at_touch(number: int, checkpoints: Path) -> None:
    """This process dies just before it touches the folder of checkpoints for the `number`-th time."""
    left = [number]

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event in TOUCHES and str(arguments[0]).startswith(str(checkpoints)):
            left[0] -= 1
            if left[0] == 0:
                die()

    sys.addaudithook(hook)


def die_after(seconds: float) -> None:
    timer = threading.Timer(abs(seconds), die)
    timer.daemon = True
    begin = Trainer.restore if seconds < 0 else Trainer.run

    def begins(trainer: Trainer, *arguments: Any) -> None:
        timer.start()
        begin(trainer, *arguments)

    setattr(Trainer, begin.__name__, begins)


def train(folder: Path, steps: int, touch: int | None = None, seconds: float | None = None, victim: int = 0) -> None:
    """Trains, resuming. Dies at a touch of the checkpoints on rank `victim`, or `seconds` after it has begun to train,
    on every rank; if they are less than 0, that long after it has begun to resume."""
    if seconds is not None:
        die_after(seconds)
    if touch is not None and int(os.environ["RANK"]) == victim:
        die_at_touch(touch, folder / "checkpoints")
    run_training(run_config(steps, int(os.environ["WORLD_SIZE"])), folder, [], resume=True)


def killed(outcomes: list[RankOutcome]) -> bool:
    """Whether the run was killed rather than finished; nothing else is expected."""
    if all(outcome.ok for outcome in outcomes):
        return False
    assert any(outcome.exit_code == -signal.SIGKILL for outcome in outcomes), outcomes
    return True


def losses(folder: Path) -> list[tuple[int, float, float]]:
    """Step, loss and gradient norm of each line, as they are in the file."""
    path = folder / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(line["step"], line["loss"], line["grad_norm"]) for line in lines]


def tensors(folder: Path, step: int) -> dict[str, torch.Tensor]:
    target = folder / "whole.pt"
    dcp_to_torch_save(layout.step_path(folder / "checkpoints", step), target)
    found = torch.load(target, weights_only=True)
    return {name: value for name, value in found.items() if not name.endswith(".host")}  # Python's own is not seeded


def assert_same_run(got: Path, want: Path, steps: int) -> None:
    """The losses joined over all parts, and every tensor of the last state with the random states of the ranks."""
    assert losses(got) == losses(want)
    assert [step for step, *_ in losses(got)] == list(range(1, steps + 1))
    found, expected = tensors(got, steps), tensors(want, steps)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def assert_a_complete_one(folder: Path, before: Path | None) -> Path | None:
    """After a kill: the newest is whole, byte for byte, and no older than the newest before."""
    newest = layout.newest_complete(folder / "checkpoints")
    if before is not None:
        assert newest is not None
        assert layout.step_of(newest) >= layout.step_of(before)
    if newest is not None:
        assert damage(newest) is None
    return newest


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(train, 2, folder, STEPS, deadline_s=60, env=ON_CPU)
    kept = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert kept == ["step-00000006", "step-00000010", "step-00000012"]
    return folder


@pytest.mark.slow
def test_a_run_killed_while_it_saves_has_the_losses_of_one_that_was_not(whole: Path, tmp_path: Path) -> None:
    """Each time rank 0 or rank 1 dies at some touch of a file of a checkpoint; the other is killed soon after."""
    moments = random.Random(7)
    newest = None
    for attempt in range(4):
        touch, victim = moments.randrange(1, 45), attempt % 2
        outcomes = observe_ranks(
            train, 2, tmp_path, STEPS, touch, None, victim, deadline_s=60, env=ON_CPU, after_failure_s=0.05
        )
        killed(outcomes)
        newest = assert_a_complete_one(tmp_path, newest)
    assert newest is not None
    run_ranks(train, 2, tmp_path, STEPS, deadline_s=60, env=ON_CPU)
    assert_same_run(tmp_path, whole, STEPS)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_moments(tmp_path: Path) -> None:
    """By time from the start, which hits any part of a run, and by touches of checkpoints, which hits the saves."""
    steps, moments = 60, random.Random(3)
    want = tmp_path / "whole"
    run_ranks(train, 2, want, steps, deadline_s=120, env=ON_CPU)
    kills, killed_saving, run, newest = 0, 0, 0, None
    while kills < 50:
        folder = tmp_path / f"run{run}"
        touch = moments.randrange(1, 80) if moments.random() < 0.5 else None
        seconds = moments.uniform(-0.5, 3) if touch is None else None
        outcomes = observe_ranks(
            train,
            2,
            folder,
            steps,
            touch,
            seconds,
            moments.randrange(2),
            deadline_s=120,
            env=ON_CPU,
            after_failure_s=0.05,
        )
        if killed(outcomes):
            kills += 1
            newest = assert_a_complete_one(folder, newest)
            half = layout.partial_folders(folder / "checkpoints")
            killed_saving += any(newest is None or step > layout.step_of(newest) for step, _ in half)
        else:
            assert_same_run(folder, want, steps)
            run, newest = run + 1, None
    run_ranks(train, 2, folder, steps, deadline_s=120, env=ON_CPU)
    assert_same_run(folder, want, steps)
    print(f"{kills} kills over {run + 1} runs, {killed_saving} of them left half a save")
    assert killed_saving >= 10
