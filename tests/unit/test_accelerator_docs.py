"""The guide for vendors is true: its file works as printed, and it names every variable and capability."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from equipoise import accelerator as acc
from equipoise.accelerator import MUSAAccelerator, allocator, cuda, musa, selection
from equipoise.accelerator.testing import run_check
from equipoise.errors import ConfigError
from unit import fake_musa

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "accelerators.md").read_text()


@pytest.fixture
def vendor_file(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The names that the guide's file defines."""
    for variable in ("EQUIPOISE_ACCELERATOR", "MUSA_VISIBLE_DEVICES", "MUSA_PATCH_PATH"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(selection, "entry_points", lambda group: [])
    acc.reset()
    names: dict[str, Any] = {"__name__": "torch_acme_equipoise"}
    exec(re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)[0], names)
    yield names
    acc.reset()


def test_the_printed_file_is_a_backend(vendor_file: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "acme")
    acc.register(vendor_file["REGISTRATION"])
    with pytest.raises(ConfigError, match="torch_acme is not installed"):
        acc.get_accelerator()
    monkeypatch.setattr(torch, "acme", fake_musa.namespace(1), raising=False)
    chosen = acc.get_accelerator()
    assert chosen.world_backend() == "cpu:gloo,acme:accl"
    for check in (
        "events_and_streams_work",
        "memory_is_counted",
        "capabilities_have_reasons",
        "transports_are_named",
    ):
        assert run_check(check, chosen).status == "passed"


@pytest.mark.parametrize(
    "name",
    [
        selection.VARIABLE,
        allocator.VARIABLE,
        musa.PATCH_PATH_VARIABLE,
        *cuda.NVIDIA_VARIABLES,
        *cuda.ROCM_VARIABLES,
        cuda.ROCM_OUTER_VARIABLE,
        *MUSAAccelerator.visible_devices_variables,
        *acc.CAPABILITIES,
        acc.ENTRY_POINT_GROUP,
    ],
)
def test_the_guide_names_it(name: str) -> None:
    assert name in GUIDE
