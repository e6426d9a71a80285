"""Importing the accelerator layer has no side effects (case C36). Each test runs in a fresh interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import equipoise

SOURCE = str(Path(equipoise.__file__).resolve().parents[1])
MODULES = [
    "equipoise.accelerator",
    "equipoise.accelerator.selection",
    "equipoise.accelerator.visible_devices",
    "equipoise.accelerator.host_memory",
    "equipoise.accelerator.registry",
    "equipoise.accelerator.peak_flops",
    "equipoise.accelerator.cuda",
    "equipoise.accelerator.cpu",
    "equipoise.accelerator.torch_accelerator",
    "equipoise.accelerator.base",
]


def run_fresh(code: str, cwd: Path, *arguments: str, **environ: str) -> None:
    """Run `code` in a new interpreter whose working folder is `cwd`, on this package's source."""
    base = {k: v for k, v in os.environ.items() if k != "EQUIPOISE_ACCELERATOR"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**base, "PYTHONPATH": SOURCE, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


IMPORT_CHANGES_NOTHING = """
import os, random, sys, importlib
import torch
def state():
    rng = torch.get_rng_state().tolist(), random.getstate()
    return dict(os.environ), rng, os.getcwd(), os.listdir("."), list(sys.path)
before = state()
for module in sys.argv[1:]:
    importlib.import_module(module)
assert state() == before
assert not torch.cuda.is_initialized()
assert not [m for m in sys.modules if m.startswith(("torch_musa", "musa_patch", "triton", "ray"))]
"""

FORK_AND_LATE_ENVIRONMENT = """
import os, sys
import equipoise.accelerator as acc
os.environ["CUDA_VISIBLE_DEVICES"] = ""          # after the import, before the first use
child = os.fork()
if child == 0:
    accelerator = acc.get_accelerator()
    import torch
    ok = accelerator.name == "cpu" and torch.ones(2, device=accelerator.device()).sum().item() == 2
    os._exit(0 if ok else 1)
assert os.waitpid(child, 0)[1] == 0
assert acc.get_accelerator().visible_devices({}).ids is None
assert acc.get_accelerator().name == "cpu"
"""


def test_import_in_either_order_changes_nothing(tmp_path: Path) -> None:
    for order in (MODULES, MODULES[::-1]):
        run_fresh(IMPORT_CHANGES_NOTHING, tmp_path, *order)


def test_an_environment_set_after_import_counts_and_a_forked_child_works(tmp_path: Path) -> None:
    run_fresh(FORK_AND_LATE_ENVIRONMENT, tmp_path)
