"""The allocator switch: untouched by default, expandable segments on request, anything else an error."""

import warnings
from collections.abc import Iterator

import pytest
import torch

from equipoise import accelerator as acc
from equipoise.accelerator import CPUAccelerator, CUDAAccelerator, allocator, selection
from equipoise.errors import ConfigError

VARIABLE = allocator.VARIABLE


class Recorder(CUDAAccelerator):
    """CUDA whose allocator writes down what it is told, and can refuse or warn."""

    def __init__(self, refuse: Exception | None = None, warn: str | None = None) -> None:
        super().__init__()
        self.told: list[str] = []
        self.refuse, self.warn = refuse, warn

    def _set_allocator(self, settings: str) -> None:
        if self.refuse is not None:
            raise self.refuse
        if self.warn is not None:
            warnings.warn(self.warn, stacklevel=2)
        self.told.append(settings)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("EQUIPOISE_ACCELERATOR", VARIABLE, *CUDAAccelerator.allocator_variables):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(selection, "entry_points", lambda group: [])
    acc.reset()
    yield
    acc.reset()


@pytest.mark.parametrize("environ", [{}, {VARIABLE: "0"}])
def test_by_default_the_allocator_is_untouched(environ: dict[str, str]) -> None:
    recorder = Recorder()
    assert not allocator.configure_allocator(recorder, environ)
    assert recorder.told == []


def test_one_switches_expandable_segments_on() -> None:
    recorder = Recorder()
    assert allocator.configure_allocator(recorder, {VARIABLE: "1"})
    assert recorder.told == ["expandable_segments:True"]


def test_the_users_other_settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")
    recorder = Recorder()
    allocator.configure_allocator(recorder, {VARIABLE: "1"})
    assert recorder.told == ["max_split_size_mb:64,expandable_segments:True"]


@pytest.mark.parametrize(
    ("recorder", "reason"),
    [
        (Recorder(refuse=RuntimeError("Unrecognized key")), "refused.*Unrecognized key"),
        (
            Recorder(warn="expandable_segments not supported on this platform"),
            "not supported on this platform",
        ),
        (CPUAccelerator(), "no caching allocator"),
    ],
)
def test_a_runtime_that_cannot_warns(recorder: acc.Accelerator, reason: str) -> None:
    with pytest.warns(RuntimeWarning, match=f"{VARIABLE}=1 has no effect on {recorder.name}: .*{reason}"):
        assert not allocator.configure_allocator(recorder, {VARIABLE: "1"})


@pytest.mark.parametrize("text", ["", "true", "2", "01", " 1"])
def test_anything_else_is_an_error_before_a_device_is_made(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, text)
    monkeypatch.setenv("EQUIPOISE_ACCELERATOR", "cpu")
    with pytest.raises(ConfigError, match=f"{VARIABLE}={text!r} is not understood; expected 1"):
        acc.get_accelerator()


def test_selection_applies_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    acc.register_accelerator("testa", lambda: recorder, lambda: True, priority=999)
    monkeypatch.setenv(VARIABLE, "1")
    assert acc.get_accelerator() is recorder
    assert recorder.told == ["expandable_segments:True"]


def test_an_observer_that_raises_does_not_replace_the_allocations_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hooks: list = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", hooks.append, raising=False)
    seen: list[acc.OutOfMemory] = []

    def observer(event: acc.OutOfMemory) -> None:
        seen.append(event)
        raise KeyError("nothing works")

    assert CUDAAccelerator().attach_oom_observer(observer)
    hooks[0](1, 10, 20, 30)
    assert seen == [acc.OutOfMemory(device_index=1, requested=10, total=20, free=30)]
