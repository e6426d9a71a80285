"""`equipoise doctor`: every finding by itself, in words and as JSON."""

import dataclasses
import json
from importlib.metadata import PackageNotFoundError, metadata, version
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from equipoise import accelerator, doctor, kernels


@dataclasses.dataclass(frozen=True)
class Memory:
    free: int = 3 * 2**30
    total: int = 8 * 2**30


REPORT = {
    "winner": "toy",
    "reason": "requested by EQUIPOISE_ACCELERATOR='toy'",
    "considered": [
        {"name": "toy", "priority": 5, "available": True, "reason": "two devices"},
        {"name": "cuda", "priority": 100, "available": None, "reason": "not asked"},
    ],
    "error": None,
}


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A machine with two toy devices; returns the devices that were made current."""
    current: list[int] = []
    toy = SimpleNamespace(
        name="toy",
        device=lambda index=None: torch.device("cpu"),
        device_count=lambda: 2,
        current_device_index=lambda: 0,
        set_device=current.append,
        device_name=lambda index: f"Toy {index}",
        memory=Memory,
        communication_backend=lambda: "tccl",
        world_backend=lambda: "cpu:gloo,toy:tccl",
    )
    monkeypatch.setattr(accelerator, "get_accelerator", lambda: toy, raising=False)
    monkeypatch.setattr(accelerator, "selection_report", lambda: REPORT, raising=False)

    def describe_choice(device: torch.device, dtype: torch.dtype) -> Any:
        return {"name": "loop", "reason": f"no grouped product for {dtype}"}

    monkeypatch.setattr(kernels, "describe_choice", describe_choice, raising=False)
    return current


def test_the_report_is_json_with_every_part(fake: list[int]) -> None:
    report = json.loads(doctor.to_json(doctor.collect()))
    assert report["problems"] == []
    assert report["accelerator"] == REPORT
    assert [d["name"] for d in report["devices"]] == ["Toy 0", "Toy 1"]
    assert report["devices"][1]["memory"] == {"free": 3 * 2**30, "total": 8 * 2**30}
    assert fake == [0, 1, 0]  # the first device is current again
    assert report["communication"]["available"]["gloo"] is True
    assert (report["communication"]["device"], report["communication"]["world"]) == ("tccl", "cpu:gloo,toy:tccl")
    assert [k["dtype"] for k in report["kernels"]] == ["float32", "bfloat16"]
    assert report["kernels"][0]["choice"]["name"] == "loop"
    assert report["system"]["cores"] >= 1
    assert report["system"]["disk_free"] > 0
    torch_version = report["packages"][""]["packages"]["torch"]["version"]
    assert torch_version.partition("+")[0] == torch.__version__.partition("+")[0]


def test_every_extra_is_listed(fake: list[int]) -> None:
    extras = metadata("equipoise").get_all("Provides-Extra")
    assert extras
    found = doctor.collect()["packages"]
    assert found.keys() == {"", *extras}
    assert all(found[extra]["packages"] for extra in extras)


def test_packages_are_told_by_extra_with_what_is_missing() -> None:
    requirements = [
        "torch>=2.11",
        'no-such-package>=3,<4; sys_platform == "linux"',
        "pydantic[email] >=2.10 ; extra == 'train'",
        'equipoise[train,view]; extra == "all"',
        'no.such_plotter; (python_version >= "3.11") and extra == "all"',
    ]
    found = doctor._packages(requirements)
    assert found["train"] == {"packages": {"pydantic": {"version": version("pydantic"), "needs": ">=2.10"}}} | {
        "takes_in": []
    }
    words = [doctor._package_words(extra, part) for extra, part in found.items()]
    assert words == [
        f"torch {version('torch')}, not installed: no-such-package>=3,<4 (pip install equipoise)",
        f"pydantic {version('pydantic')}",
        "all of train, all of view, not installed: no.such_plotter (pip install 'equipoise[all]')",
    ]


def test_without_an_installed_package_only_the_list_is_missing(
    fake: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "requires", missing)
    report = doctor.collect()
    assert (report["packages"], report["problems"]) == (None, [])
    assert "not installed, only importable" in doctor.to_words(report)


def test_the_words_say_what_was_found_and_why(fake: list[int]) -> None:
    words = doctor.to_words(doctor.collect())
    for text in (
        "requested by EQUIPOISE_ACCELERATOR='toy'",
        "available: two devices",
        "not asked: not asked",
        "1  Toy 1",
        "3.0 GiB free of 8.0 GiB",
        "cpu:gloo,toy:tccl",
        "name loop, reason no grouped product for torch.float32",
    ):
        assert text in words
    assert "Problems" not in words


def test_one_broken_finding_leaves_the_others(fake: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(accelerator, "get_accelerator", broken)
    report = doctor.collect()
    assert report["accelerator"] == REPORT
    assert report["devices"] is None
    assert report["problems"] == ["devices, communication, kernels: RuntimeError: driver too old"]
    assert "communication, kernels: RuntimeError: driver too old" in doctor.to_words(report)


def test_launcher_variables_are_those_seen(fake: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SECRET", "x")
    launcher = doctor.collect()["launcher"]
    assert launcher["SLURM_PROCID"] == "3"
    assert "SECRET" not in launcher


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Memory(1, 2), {"free": 1, "total": 2}),
        ({1: (Memory(1, 2), None)}, {"1": [{"free": 1, "total": 2}, None]}),
        ([True, 1.5, "a"], [True, 1.5, "a"]),
        (torch.float32, "torch.float32"),
    ],
)
def test_anything_becomes_plain_data(value: Any, expected: Any) -> None:
    assert doctor.plain(value) == expected
