"""A run that writes a load trace, is killed, and goes on; then its loads are simulated."""

import os
import signal

import pytest

from equipoise.observe.reader import open_trace
from integration.command import PROGRAM, Command, checkpoints, train, train_arguments, until
from integration.conftest import Base

TRACED = (
    *("--parallel.ep-size", "2", "--balance.num-redundant-experts-per-rank", "1"),
    *("--trace.every", "2", "--trace.matrices-every", "4", "--trace.sequences-every", "4", "--checkpoint.every", "10"),
)


@pytest.mark.slow
def test_a_killed_runs_trace_is_read_continued_and_simulated(base: Base) -> None:
    folder = base.run.parent
    run = folder / "traced"
    command = Command(folder, train_arguments("traced", *TRACED, "--train.steps", "40", nproc=2))
    until(lambda: bool(list(run.glob("trace/*.parquet"))), command)  # written with a checkpoint
    for pid in [command.process.pid, *command.workers().values()]:
        os.kill(pid, signal.SIGKILL)
    command.process.wait()
    saved = max(checkpoints(run), default=0)
    steps = open_trace(run).steps()
    assert steps
    assert steps == list(range(2, steps[-1] + 1, 2))
    train(folder, "traced", *TRACED, "--train.steps", "40", nproc=2)
    trace = open_trace(run)
    # What lay between the last file and the last checkpoint is lost; nothing is there twice.
    assert set(trace.steps()) >= set(steps) & set(range(saved + 1)) | set(range(saved + 2, 41, 2))
    rows = trace.layers(["step", "microbatch", "layer"])
    assert rows.num_rows == len(trace.steps()) * trace.info.num_layers
    assert set(trace.steps(with_matrices=True)) == {step for step in trace.steps() if step % 4 == 0}
    assert trace.info.planner == "exact_load"

    out = folder / "simulated.json"
    simulate = Command(folder, [*PROGRAM, "simulate", "traced", "--ranks", "2,3", "--slots", "1", "--out", str(out)])
    assert simulate.wait() == 0, simulate.output()
    assert "tokens per rank in a microbatch, a copy as" in simulate.output()
    assert out.exists()
