"""Phases of a step add up, and nothing waits for the device before the step ends."""

from typing import Any, cast

import pytest

from equipoise.accelerator import Accelerator, CPUAccelerator
from equipoise.train.timing import PHASES, PhaseTimer


class FakeDevice:
    """Counts events and synchronizations; its clock advances by hand."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.made = 0
        self.waits = 0

    def event(self, timing: bool = False) -> Any:
        assert timing
        self.made += 1
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, device: FakeDevice) -> None:
        self.device, self.at = device, -1.0

    def record(self, stream: Any = None) -> None:
        self.at = self.device.now_ms

    def synchronize(self) -> None:
        self.device.waits += 1

    def elapsed_ms(self, end: "FakeEvent") -> float:
        assert self.device.waits, "read before the device was waited for"
        return end.at - self.at


def spend(timer: PhaseTimer, device: FakeDevice, phase: Any, milliseconds: float) -> None:
    with timer.phase(phase):
        device.now_ms += milliseconds


def fail_in_forward(timer: PhaseTimer, device: FakeDevice) -> None:
    with timer.phase("forward"):
        device.now_ms += 100
        raise RuntimeError("stop")


def test_microbatches_add_up_and_the_step_holds_what_no_phase_does() -> None:
    device = FakeDevice()
    timer = PhaseTimer(cast(Accelerator, device))
    timer.start_step()
    for _ in range(3):
        spend(timer, device, "data", 1)
        spend(timer, device, "forward", 20)
        spend(timer, device, "backward", 40)
    spend(timer, device, "optimizer", 5)
    device.now_ms += 7
    assert device.waits == 0
    assert timer.finish_step() == pytest.approx(
        {
            "time_step_s": 0.195,
            "time_data_s": 0.003,
            "time_forward_s": 0.06,
            "time_backward_s": 0.12,
            "time_optimizer_s": 0.005,
        }
    )
    assert device.waits == 1


def test_steps_are_independent_and_reuse_events() -> None:
    device = FakeDevice()
    timer = PhaseTimer(cast(Accelerator, device))
    for _ in range(5):
        timer.start_step()
        spend(timer, device, "forward", 2)
        assert timer.finish_step()["time_forward_s"] == pytest.approx(0.002)
    assert device.made == 4


def test_a_step_that_was_broken_off_leaves_nothing() -> None:
    device = FakeDevice()
    timer = PhaseTimer(cast(Accelerator, device))
    timer.start_step()
    with pytest.raises(RuntimeError, match="stop"):
        fail_in_forward(timer, device)
    timer.start_step()
    assert set(timer.finish_step().values()) == {0.0}


def test_phases_do_not_nest() -> None:
    timer = PhaseTimer(CPUAccelerator())
    timer.start_step()
    with timer.phase("forward"), pytest.raises(AssertionError, match="inside phase 'forward'"):
        timer.phase("backward").__enter__()


def test_on_cpu_phases_lie_within_the_step() -> None:
    timer = PhaseTimer(CPUAccelerator())
    timer.start_step()
    for name in PHASES:
        with timer.phase(name):
            sum(range(1000))
    seconds = timer.finish_step()
    parts = [seconds[f"time_{name}_s"] for name in PHASES]
    assert all(part > 0 for part in parts)
    assert sum(parts) <= seconds["time_step_s"]
