"""The command `equipoise` over the toy configuration and a toy training loop, as a program and as workers."""

import os
import signal
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import toy_config

from equipoise import cli, launch
from equipoise.errors import EquipoiseError
from equipoise.train.stop import StopSignals


def run_training(
    config: toy_config.ToyConfig, out_dir: Path, argv: list[str], resume: bool, typed: str, resume_step: int | None
) -> None:
    """Leave a trace of this rank in the run folder, then behave as `train.behaviour` says."""
    rank, behaviour = int(os.environ["RANK"]), config.train.behaviour
    seen = {name: os.environ.get(name, "") for name in sorted(NAMES)} | {
        "argv": " ".join(argv),
        "resume": str(resume),
        "resume_step": str(resume_step),
        "typed": typed,
        "steps": str(config.train.steps),
    }
    out_dir.mkdir(parents=True, exist_ok=True)
    text = "".join(f"{k}={v}\n" for k, v in seen.items())
    (out_dir / f"rank-{rank}.tmp").write_text(f"pid={os.getpid()}\n{text}")
    (out_dir / f"rank-{rank}.tmp").rename(out_dir / f"rank-{rank}")
    if behaviour == "finish":
        return
    while len(list(out_dir.glob("rank-[0-9]"))) < int(os.environ["WORLD_SIZE"]):
        time.sleep(0.02)
    if behaviour == "wait" or (behaviour != "stubborn" and rank != config.train.acting_rank):
        with StopSignals() as stop:
            while not stop.requested:
                time.sleep(0.02)
        (out_dir / f"saved-{rank}").write_text(signal.Signals(stop.requested).name)
    elif behaviour == "fail":
        raise EquipoiseError(f"the loss of rank {rank} is odd")
    elif behaviour == "crash":
        raise KeyError("a mistake in the program")
    elif behaviour == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    else:  # a rank that hangs in a collective and heeds no signal
        with StopSignals():
            while True:
                time.sleep(0.02)


NAMES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "OMP_NUM_THREADS",
)


def install() -> None:
    """Put the toy tree, loop and a CPU accelerator where the command line looks for the real ones."""
    cpu = SimpleNamespace(name="cpu", device_type="cpu", device_count=lambda: 1)
    modules: dict[str, dict[str, Any]] = {
        "equipoise.train.config": {"TrainConfig": toy_config.ToyConfig},
        "equipoise.train.run": {"run_training": run_training},
        "equipoise.accelerator": {"get_accelerator": lambda: cpu},
    }
    for name, contents in modules.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    launch.GRACE_S = int(os.environ.get("TOY_GRACE_S", launch.GRACE_S))
    cli.launch.WORKER_PROGRAM = (sys.executable, __file__)


if __name__ == "__main__":
    install()
    cli.main(prog_name="equipoise")
