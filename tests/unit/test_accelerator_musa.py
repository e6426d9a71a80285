"""MUSA without its hardware: when the vendor's modules are loaded, what asks for MUSA, and what it then
offers."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import equipoise
from equipoise import accelerator as acc
from equipoise.accelerator import MUSAAccelerator, musa, selection
from equipoise.errors import ConfigError
from unit import fake_musa

PYTHONPATH = os.pathsep.join(str(p) for p in (Path(equipoise.__file__).parents[1], Path(__file__).parents[1]))
VARIABLES = ("EQUIPOISE_ACCELERATOR", "CUDA_VISIBLE_DEVICES", "MUSA_VISIBLE_DEVICES", "MUSA_PATCH_PATH")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No variable, no GPU, no vendor module loaded, nothing chosen, and a `sys.path` that a test may
    change."""
    for variable in VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(selection, "entry_points", lambda group: [])
    monkeypatch.setattr(sys, "path", list(sys.path))
    acc.reset()
    yield
    for module in musa.PATCH_MODULES:
        sys.modules.pop(module, None)
    acc.reset()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two MUSA devices, as after torch has loaded torch_musa by itself."""
    monkeypatch.setattr(torch, "musa", fake_musa.namespace(2), raising=False)


@pytest.fixture
def patch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a vendor's patch, which MUSA_PATCH_PATH names."""
    (tmp_path / "musa_patch.py").write_text("")
    monkeypatch.setenv("MUSA_PATCH_PATH", str(tmp_path))
    return tmp_path


def test_the_path_of_a_patch_requests_musa_and_locates_the_patch(device: None, patch: Path) -> None:
    assert acc.get_accelerator().name == "musa"
    assert acc.selection_report()["requested_by"] == "MUSA_PATCH_PATH"
    assert sys.modules["musa_patch"].__file__ == str(patch / "musa_patch.py")
    assert sys.path[-1] == str(patch)


def test_a_visible_devices_variable_requests_musa(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "0")
    with pytest.warns(RuntimeWarning, match="no patch module is installed"):
        assert acc.get_accelerator().name == "musa"
    assert acc.selection_report()["requested_by"] == "MUSA_VISIBLE_DEVICES"


@pytest.mark.parametrize("text", ["", "  ", "auto", "Auto"])
@pytest.mark.parametrize("variable", ["MUSA_VISIBLE_DEVICES", "MUSA_PATCH_PATH"])
def test_blank_and_auto_request_nothing(text: str, variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, text)
    before = list(sys.path)
    assert acc.initialize_accelerator() is None
    assert sys.path == before


def test_a_request_without_a_device_says_which_variable_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSA_VISIBLE_DEVICES", "1")
    with (
        pytest.warns(RuntimeWarning, match="no patch module"),
        pytest.raises(ConfigError, match=r"MUSA_VISIBLE_DEVICES='1' .*torch has no torch\.musa.*EQUIPOISE_ACCELERATOR"),
    ):
        acc.get_accelerator()
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    assert acc.get_accelerator().name == "cpu"


def test_musa_goes_before_cuda_when_both_are_there(device: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.warns(RuntimeWarning, match="no patch module"):
        assert acc.get_accelerator().name == "musa"
    assert [c["available"] for c in acc.selection_report()["considered"][:2]] == [True, True]


def test_a_patch_whose_own_dependency_is_missing_is_an_error(device: None, patch: Path) -> None:
    (patch / "musa_patch.py").write_text("import a_module_that_nobody_has\n")
    with pytest.raises(ConfigError, match=r"bootstrap failed: ModuleNotFoundError.*a_module_that_nobody_has"):
        acc.get_accelerator()


def test_a_patch_under_its_newer_name_is_found(device: None, patch: Path) -> None:
    (patch / "musa_patch.py").rename(patch / "musa_titan.py")
    assert acc.get_accelerator().name == "musa"
    assert "musa_titan" in sys.modules


def test_a_runtime_without_device_is_hinted_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(musa, "find_spec", lambda name: object())
    with pytest.warns(RuntimeWarning, match="training on the CPU, though torch_musa is installed"):
        assert acc.get_accelerator().name == "cpu"


def test_transports() -> None:
    accelerator = MUSAAccelerator()
    assert accelerator.communication_backend() == "mccl"
    assert accelerator.world_backend() == accelerator.weight_update_backend() == "cpu:gloo,musa:mccl"


def run_fresh(code: str, folder: Path, **environ: str) -> None:
    """Run `code` in a new interpreter; `folder` holds a patch that writes down when it is loaded, and how
    often."""
    (folder / "musa_patch.py").write_text(
        "from unit import fake_musa\nfake_musa.install()\nfake_musa.CALLS.append('patch loaded')\n"
    )
    base = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**base, "PYTHONPATH": PYTHONPATH, "MUSA_PATCH_PATH": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


ORDER = """
import sys
import equipoise.accelerator as acc
from equipoise.accelerator import musa
assert "musa_patch" not in sys.modules                     # importing the layer loads nothing
from unit.fake_musa import CALLS
real_init, real_probe = musa.MUSAAccelerator.__init__, musa.is_available
import dataclasses
def probe():
    CALLS.append("validated")
    return real_probe()
def make():
    CALLS.append("constructed")
    return musa.MUSAAccelerator()
musa.REGISTRATION = dataclasses.replace(musa.REGISTRATION, is_available=probe, factory=make)
accelerator = acc.get_accelerator()
assert CALLS[:3] == ["patch loaded", "validated", "constructed"], CALLS
assert acc.initialize_accelerator() is accelerator is acc.get_accelerator()
assert CALLS.count("patch loaded") == 1
assert str(accelerator.device(1)) == "musa:1"              # the malformed "musa:musa" cannot be made
"""

NEVER = """
import os, sys, torch
import equipoise.accelerator as acc
torch.version.cuda, torch.cuda.device_count = "12.8", lambda: 1     # a GPU is there
for choice in ("cuda", "cpu"):
    acc.reset()
    os.environ["EQUIPOISE_ACCELERATOR"] = choice
    before = list(sys.path)
    assert acc.get_accelerator().name == choice
    assert "musa_patch" not in sys.modules and sys.path == before
assert not torch.cuda.is_initialized()
"""

CONFORMS = """
import equipoise.accelerator as acc
from equipoise.accelerator.testing import assert_conforms
from unit.fake_musa import CALLS
import torch
accelerator = acc.get_accelerator()
assert_conforms(accelerator, tensors=False)
assert {"synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"} <= set(CALLS)
with accelerator.autocast(torch.bfloat16), accelerator.autocast(torch.float32):
    pass
assert "autocast {'dtype': torch.bfloat16}" in CALLS and "autocast {'enabled': False}" in CALLS
assert "allocator expandable_segments:True" in CALLS
assert str(accelerator.visible_devices({"MUSA_VISIBLE_DEVICES": "3,1"}).to_physical(0)) == "3"
"""


def test_the_patch_is_loaded_once_after_the_choice_and_before_validation(tmp_path: Path) -> None:
    run_fresh(ORDER, tmp_path)


def test_an_explicit_choice_of_another_backend_never_loads_the_patch(tmp_path: Path) -> None:
    run_fresh(NEVER, tmp_path, MUSA_VISIBLE_DEVICES="0")


def test_the_backend_conforms_on_a_fake_namespace(tmp_path: Path) -> None:
    run_fresh(CONFORMS, tmp_path, EQUIPOISE_ENABLE_EXPANDABLE_SEGMENTS="1")
