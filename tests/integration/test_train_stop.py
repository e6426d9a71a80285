"""Runs that stop: by a signal, a bad loss, a dead worker; and runs that continue in a used folder."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from integration.command import (
    Command,
    checkpoints,
    losses,
    read_metrics,
    stored,
    train,
    train_arguments,
    until,
)
from integration.conftest import Base

EP2 = ("--parallel.ep-size", "2")
ENDLESS = (*EP2, "--train.steps", "1000000")


@pytest.fixture
def start(base: Base) -> Iterator[Any]:
    commands: list[Command] = []

    def begin(out: str, *settings: str) -> Command:
        """A run on two ranks that has made three steps."""
        command = Command(base.folder, train_arguments(out, *settings, nproc=2))
        commands.append(command)
        until(lambda: len(read_metrics(base.folder / out)) >= 3, command)
        return command

    yield begin
    for command in commands:
        command.kill()


def copy_run(base: Base, name: str, keep: list[int]) -> Path:
    """A copy of the finished run as if it had been interrupted after the last of the steps `keep`."""
    run = base.folder / name
    shutil.copytree(base.run, run)
    for step in set(checkpoints(run)) - set(keep):
        shutil.rmtree(run / "checkpoints" / f"step-{step:08}")
    return run


def test_sigterm_saves_exits_143_and_the_resumed_losses_are_those_without_a_stop(base: Base, start: Any) -> None:
    """C43, C44: bit for bit, also the selection bias and both moments, which the later losses depend on."""
    command = start("stopped", *ENDLESS)
    os.kill(command.process.pid, signal.SIGTERM)
    assert command.wait() == 143, command.output()
    assert "stopped by a signal; the state is saved" in command.output()
    assert "Traceback" not in command.output()
    run = base.folder / "stopped"
    (stopped_at,) = checkpoints(run)
    assert [record["step"] for record in read_metrics(run)] == list(range(1, stopped_at + 1))
    assert stopped_at < 30, "it was stopped too late to compare"
    output = train(base.folder, "stopped", *EP2, nproc=2)
    assert f"resuming after step {stopped_at}" in output
    assert losses(run) == losses(base.run)
    got, want = stored(run, 30), stored(base.run, 30)
    assert got.keys() == want.keys()
    assert sum("exp_avg_sq" in name for name in want) > 10
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.slow
def test_a_bad_loss_stops_every_rank_and_the_last_good_checkpoint_resumes_at_another_ep_size(base: Base) -> None:
    run = copy_run(base, "bad", keep=[10])
    settings = ["--optimizer.lr", "1e30", "--checkpoint.keep-last", "0"]
    output = train(base.folder, "bad", *EP2, *settings, nproc=2, exit_code=1)
    assert "NonFiniteLossError: step 12: the loss is" in output
    assert "the gradient norm nan. The update was not made" in output
    assert output.count("\nError: ") == 1
    assert "Traceback" not in output
    assert checkpoints(run) == [10, 11]
    shutil.rmtree(run / "checkpoints" / "step-00000011")  # finite, but of no use after such an update
    train(base.folder, "bad", "--parallel.ep-size", "1", "--train.steps", "20", nproc=2)
    want = losses(base.run)
    assert losses(run) == pytest.approx({step: want[step] for step in range(1, 21)}, rel=1e-5)


@pytest.mark.slow
def test_a_killed_worker_ends_the_run_with_its_rank_named_and_nothing_left(base: Base, start: Any) -> None:
    command = start("killed", *ENDLESS, "--checkpoint.every", "2", "--parallel.timeout-s", "20")
    run = base.folder / "killed"
    until(lambda: checkpoints(run) != [], command)  # it is written while training goes on
    workers = command.workers()
    assert sorted(workers) == [0, 1]
    started = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    code = command.process.wait(60)
    assert time.monotonic() - started < 40
    assert code == 1, command.output()
    assert "rank 1 of 2 was killed by SIGKILL" in command.output()
    assert command.workers() == {}
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers.values())
    last = checkpoints(run)[-1]
    assert "resuming after step" in train(base.folder, "killed", *EP2, "--train.steps", str(last + 1), nproc=2)


@pytest.mark.slow
def test_a_used_folder_continues_unless_a_new_run_is_asked_for(base: Base) -> None:
    run = copy_run(base, "used", keep=[30])
    before = (run / "metrics.jsonl").read_bytes()
    output = train(base.folder, "used", nproc=1)
    assert "nothing to train: step 30 is done and train.steps is 30" in output
    settings = (run / "config.toml").read_bytes()
    assert (run / "metrics.jsonl").read_bytes() == before
    output = train(base.folder, "used", "--no-resume", nproc=1, exit_code=1)
    assert "step-00000030 of an earlier run" in output
    assert "choose another run folder" in output
    assert "Traceback" not in output
    assert checkpoints(run) == [30]
    assert (run / "metrics.jsonl").read_bytes() == before
    other = ["--model.norm-topk-prob", "--model.rope-theta", "500", "--train.steps", "31"]
    output = train(base.folder, "used", *other, nproc=1, exit_code=1)
    assert "model.norm_topk_prob: the checkpoint has False, this run has True; model.rope_theta: " in output
    output = train(base.folder, "used", "--train.seed", "5", "--train.steps", "31", nproc=1, exit_code=1)
    assert "seed 0 (now 5)" in output
    assert (run / "config.toml").read_bytes() == settings  # of the run that is there, not of those it refused


@pytest.mark.slow
def test_four_ranks_with_uneven_shards_resume_to_the_same_losses(base: Base) -> None:
    """C43: 10 steps, save, a new process, steps 11 to 13; EP 2 on 4 ranks, 3 experts over an inner axis of 2."""
    settings = [*EP2, "--checkpoint.every", "10", "--checkpoint.keep-last", "0", "--train.steps", "13"]
    train(base.folder, "four", *settings, nproc=4)
    run, resumed = base.folder / "four", base.folder / "four-resumed"
    shutil.copytree(run, resumed)
    shutil.rmtree(resumed / "checkpoints" / "step-00000013")
    assert "resuming after step 10" in train(base.folder, "four-resumed", *settings, nproc=4)
    assert losses(resumed) == losses(run)
    got, want = stored(resumed, 13), stored(run, 13)
    assert all(torch.equal(got[name], want[name]) for name in want)
