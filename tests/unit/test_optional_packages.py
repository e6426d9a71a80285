"""Nothing but what an installation asked for is needed: every module imports while the rest is blocked."""

import os
import subprocess
import sys
from pathlib import Path

import equipoise

SOURCES = str(Path(equipoise.__file__).parents[1])
OPTIONAL = (
    *("deep_ep", "triton", "transformers", "peft", "huggingface_hub", "tensorboard", "wandb", "ray", "liger_kernel"),
    *("torch_musa", "torch_npu", "scipy", "plotly", "starlette", "uvicorn", "datasets"),
)
TRAINING = ("typer", "rich", "tokenizers", "pyarrow", "safetensors", "tomli_w")
PROGRAM = """
import importlib, importlib.abc, pkgutil, sys

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ImportError(f"{name} is blocked")

BLOCKED = set(sys.argv[1].split(","))
import torch  # with what torch itself looks for
for name in [m for m in sys.modules if m.partition(".")[0] in BLOCKED]:
    del sys.modules[name]
sys.meta_path.insert(0, Blocked())
import equipoise
for prefix in sys.argv[2].split(","):
    module = importlib.import_module(prefix)
    for found in pkgutil.walk_packages(getattr(module, "__path__", []), prefix + "."):
        if not found.name.endswith(("__main__", "_triton")):  # only files named so import Triton
            importlib.import_module(found.name)
exec(sys.argv[3])
"""
USE_EVERY_DISPATCHER = """
import torch
from equipoise.accelerator import CPUAccelerator
from equipoise.dispatch import build_dispatcher
from equipoise.distributed.world import join_world
from equipoise.moe.experts import Experts
experts = Experts(2, 4, 3)
for p in experts.parameters():
    torch.nn.init.ones_(p)
with join_world(CPUAccelerator(), 30) as world:
    for name in ("auto", "local", "all_to_all", "all_gather"):
        dispatcher = build_dispatcher(name, 2, world.group)
        arrived = dispatcher.dispatch(torch.ones(3, 4), torch.tensor([[0], [1], [1]]), torch.ones(3, 1))
        assert dispatcher.combine(experts(arrived.rows_RD, arrived.counts_M), arrived.handle).shape == (3, 4)
"""
LIBRARY = ("accelerator", "distributed", "kernels", "dispatch", "moe", "models")


def run_blocked(blocked: tuple[str, ...], packages: str, program: str = "") -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(blocked), packages, program],
        env=os.environ | {"PYTHONPATH": SOURCES, "EQUIPOISE_ACCELERATOR": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_everything_imports_and_dispatches_without_optional_packages() -> None:
    run_blocked(OPTIONAL, "equipoise", USE_EVERY_DISPATCHER)


def test_the_library_needs_torch_and_pydantic_alone() -> None:
    packages = ",".join(f"equipoise.{name}" for name in LIBRARY)
    run_blocked(OPTIONAL + TRAINING, packages, USE_EVERY_DISPATCHER)
