"""Runs `equipoise train` as its users do, in processes of its own, and reads what it leaves."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import equipoise

SOURCES = str(Path(equipoise.__file__).parents[1])
PROGRAM = [sys.executable, "-m", "equipoise"]
DEADLINE_S = 120
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(sources: str = SOURCES) -> dict[str, str]:
    """Without a launcher's variables; one thread per process, on the CPU; the package from the folder `sources`."""
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHER and not k.startswith("TORCHELASTIC")}
    return kept | {
        "PYTHONPATH": sources,
        "OMP_NUM_THREADS": "1",
        "EQUIPOISE_ACCELERATOR": "cpu",
        "PYTHONFAULTHANDLER": "1",
    }


class Command:
    """A command that runs in `folder`; its output goes to files, so that it never waits for a reader."""

    def __init__(self, folder: Path, arguments: list[str], sources: str = SOURCES) -> None:
        self.arguments = arguments
        self._output = (folder / f"output-{time.monotonic_ns()}").open("w+")
        self.process = subprocess.Popen(
            arguments,
            cwd=folder,
            env=clean_environment(sources),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """The exit code; at the deadline everything is killed and the test fails with the output."""
        try:
            return self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.arguments} did not end within {deadline_s} s:\n{self.output()}") from None
        finally:
            self.kill()

    def kill(self) -> None:
        """Ends the command and its workers, if they are still there."""
        for pid in [*self.workers().values(), self.process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def output(self) -> str:
        """Standard output and error so far."""
        return Path(self._output.name).read_text()

    def workers(self) -> dict[int, int]:
        """Process ids of the workers that it has started and that are alive, by rank."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                fields = (folder / "stat").read_text().rpartition(")")[2].split()
                variables = dict(v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v)
            except (OSError, ValueError):
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z" and "RANK" in variables:
                found[int(variables["RANK"])] = int(folder.name)
        return found


def train(folder: Path, out: str, *settings: str, nproc: int, exit_code: int = 0) -> str:
    """`equipoise train recipe.toml` in `folder` to its end; returns the output and checks the exit code."""
    command = Command(folder, train_arguments(out, *settings, nproc=nproc))
    code = command.wait()
    assert code == exit_code, f"{command.arguments} ended with {code}:\n{command.output()}"
    return command.output()


def train_arguments(out: str, *settings: str, nproc: int) -> list[str]:
    return [*PROGRAM, "train", "recipe.toml", "--nproc-per-node", str(nproc), "--out", out, *settings]


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The records of a run; none if there is no file yet, and no line that is still being written."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {record["step"]: record["loss"] for record in read_metrics(run)}


def checkpoints(run: Path) -> list[int]:
    """Steps that are saved; not those that are being written."""
    names = [path.name.removeprefix("step-") for path in (run / "checkpoints").glob("step-*")]
    return sorted(int(name) for name in names if name.isdigit())


def until(condition: Callable[[], bool], command: Command, deadline_s: float = DEADLINE_S) -> None:
    """Waits for the condition; fails if the command ends first, or at the deadline."""
    end = time.monotonic() + deadline_s
    while not condition():
        assert command.process.poll() is None, f"it ended:\n{command.output()}"
        assert time.monotonic() < end, f"not within {deadline_s} s:\n{command.output()}"
        time.sleep(0.01)


def stored(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint but the random states."""
    path = run / "checkpoints" / f"step-{step:08}"
    target = run / f"step-{step}.pt"
    dcp_to_torch_save(path, target)
    tensors = torch.load(target, weights_only=True)
    target.unlink()
    return {name: value for name, value in tensors.items() if not name.startswith("rng.")}
