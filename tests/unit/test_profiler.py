"""The profiler's schedule, its files, its bounded memory, and the summary against a trace worked out by hand."""

import gzip
import json
import logging
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.profiler import record_function

from equipoise.accelerator import CPUAccelerator
from equipoise.accelerator.host_memory import resident
from equipoise.errors import ConfigError
from equipoise.observe.profile_summary import PhaseTime, divide, flatten, render_summary, summarize_trace
from equipoise.observe.profiler import Profiler, ProfilerConfig, check_ranks


def read_trace(path: Path) -> dict[str, Any]:
    return json.loads(gzip.decompress(path.read_bytes()))


def steps_in(trace: dict[str, Any]) -> list[str]:
    return [e["name"] for e in trace["traceEvents"] if str(e.get("name")).startswith("train.step")]


def run(profiler: Profiler, last: int, first: int = 1) -> None:
    with profiler:
        for number in range(first, last + 1):
            with profiler.step(number), record_function("moe.router"):
                torch.ones(3) + 1


@pytest.mark.parametrize(
    ("settings", "begins"),
    [
        ({"first_step": 2, "steps": 1}, [1]),
        ({"first_step": 10}, [9]),
        ({"first_step": 5, "every": 7, "windows": 3}, [4, 11, 18]),
    ],
)
def test_windows_begin_a_step_ahead_to_warm_up(settings: dict[str, int], begins: list[int]) -> None:
    config = ProfilerConfig(**settings)
    assert [step for step in range(1, 60) if config.window_at(step)] == begins


@pytest.mark.parametrize(
    "settings", [{"first_step": 1}, {"steps": 0}, {"every": 3, "steps": 3}, {"windows": 0}, {"ranks": ()}]
)
def test_impossible_schedules_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        ProfilerConfig(**settings)


def test_a_rank_that_is_not_there_is_refused() -> None:
    check_ranks(ProfilerConfig(ranks=(0, 3)), 4)
    with pytest.raises(ConfigError, match="rank 4, but the run has ranks 0 to 3"):
        check_ranks(ProfilerConfig(ranks=(0, 4)), 4)


def test_each_window_is_in_files_of_its_own_and_nothing_else_is(tmp_path: Path) -> None:
    config = ProfilerConfig(first_step=3, steps=2, every=5, windows=2)
    run(Profiler(config, CPUAccelerator(), tmp_path / "profile", 0), 20)
    files = sorted(path.name for path in (tmp_path / "profile").iterdir())
    windows = ["steps-3-4.rank-0", "steps-8-9.rank-0"]
    assert files == [f"{w}.{kind}" for w in windows for kind in ("summary.json", "summary.txt", "trace.json.gz")]
    assert steps_in(read_trace(tmp_path / "profile" / f"{windows[1]}.trace.json.gz")) == [
        "train.step 8",
        "train.step 9",
    ]


def test_a_run_that_ends_inside_a_window_keeps_what_was_recorded(tmp_path: Path) -> None:
    run(Profiler(ProfilerConfig(first_step=3, steps=5), CPUAccelerator(), tmp_path, 0), 4)
    assert steps_in(read_trace(tmp_path / "steps-3-4.rank-0.trace.json.gz")) == ["train.step 3", "train.step 4"]


def test_a_step_that_fails_ends_the_window_without_files(tmp_path: Path) -> None:
    config = ProfilerConfig(first_step=2)
    profiler = Profiler(config, CPUAccelerator(), tmp_path, 0)
    with profiler:
        with profiler.step(1):
            pass
        with pytest.raises(ZeroDivisionError), profiler.step(2):
            raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
    run(Profiler(config, CPUAccelerator(), tmp_path, 0), 5)  # and torch's profiler is free again
    assert len(list(tmp_path.iterdir())) == 3


def test_a_resumed_run_keeps_the_earlier_files(tmp_path: Path) -> None:
    for _ in range(2):
        run(Profiler(ProfilerConfig(first_step=2, steps=1), CPUAccelerator(), tmp_path, 0), 3)
    traces = sorted(path.name for path in tmp_path.glob("*.gz"))
    assert traces == ["steps-2-2.rank-0.again-2.trace.json.gz", "steps-2-2.rank-0.trace.json.gz"]


@pytest.mark.parametrize("config", [None, ProfilerConfig(first_step=2, ranks=(1,))])
def test_other_ranks_and_runs_without_it_write_nothing(config: ProfilerConfig | None, tmp_path: Path) -> None:
    run(Profiler(config, CPUAccelerator(), tmp_path / "profile", 0), 6)
    assert not (tmp_path / "profile").exists()


def test_a_disk_that_refuses_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    logging.getLogger("equipoise").propagate = True
    run(Profiler(ProfilerConfig(first_step=2), CPUAccelerator(), tmp_path / "file" / "profile", 0), 6)
    assert "no profile of steps [2, 3, 4]" in caplog.text


def test_memory_does_not_grow_with_the_run_and_only_the_window_is_in_the_trace(tmp_path: Path) -> None:
    """C48: 200 steps, one tensor of 16 MB each, shapes on, a window of 3 steps."""
    config = ProfilerConfig(first_step=12, steps=3, every=60, windows=3, shapes=True, memory=True)
    profiler = Profiler(config, CPUAccelerator(), tmp_path, 0)
    memory, seen = {}, []
    with profiler:
        for number in range(1, 201):
            with profiler.step(number):
                tensor = torch.full((4 << 20,), float(number))
                seen.append(weakref.ref(tensor.mul_(2).add_(1)))
                del tensor
            memory[number] = resident()
            assert [ref() for ref in seen if ref() is not None] == []
    # One tensor a step would be 3 GB. What the library of the profiler keeps of its first use is some 60 MB.
    assert memory[200] - memory[10] < 160 << 20
    traces = sorted(tmp_path.glob("*.trace.json.gz"))
    assert [steps_in(read_trace(path)) for path in traces] == [
        [f"train.step {n}" for n in range(start, start + 3)] for start in (12, 132, 72)
    ]
    assert sum(e.get("name") == "aten::mul_" for e in read_trace(traces[0])["traceEvents"]) == 3


# The summary


def test_nested_intervals_are_flattened_to_the_innermost() -> None:
    nested = [(0, 10, "a"), (2, 6, "b"), (3, 4, "c"), (6, 7, "b"), (12, 13, "a")]
    assert flatten(nested) == [
        (0, 2, "a"),
        (2, 3, "b"),
        (3, 4, "c"),
        (4, 6, "b"),
        (6, 7, "b"),
        (7, 10, "a"),
        (12, 13, "a"),
    ]
    assert flatten([]) == []


def test_a_window_is_divided_without_remainder() -> None:
    exposed, overlapped, idle = divide([(0, 4, "a"), (3, 5, "b"), (3, 3.5, "b"), (7, 99, "a")], [(1, 8), (10, 11)])
    assert exposed == {"a": 2 + 1 + 1, "b": 1}
    assert (overlapped, idle) == (1, 2)


def annotation(name: str, start: float, end: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": end - start, "tid": tid, "args": {}}


def operation(
    name: str, start: float, end: float, number: int, forward_thread: int = 0, tid: int = 1
) -> dict[str, Any]:
    args = {"Sequence number": number, "Fwd thread id": forward_thread}
    return annotation(name, start, end, tid) | {"cat": "cpu_op", "args": args}


def launch(start: float, number: int, tid: int = 1) -> dict[str, Any]:
    return annotation("launch", start, start + 1, tid) | {"cat": "cuda_runtime", "args": {"correlation": number}}


def kernel(start: float, end: float, number: int) -> dict[str, Any]:
    return annotation("k", start, end, 7) | {"cat": "kernel", "args": {"correlation": number}}


HOST_TRACE = [
    annotation("train.step 4", 0, 1000),
    annotation("moe.plan", 100, 300),
    annotation("moe.push", 150, 200),  # inside planning: counts as push only
    annotation("moe.experts", 300, 500),
    operation("_FusedMLP", 310, 490, 8),
    operation("_FusedMLP", 20, 30, 9),  # outside of the ranges: a node of nobody
    operation("autograd::engine::evaluate_function: X", 600, 700, 9, forward_thread=1),
    operation("autograd::engine::evaluate_function: _FusedMLPBackward", 700, 900, 8, forward_thread=1),
    annotation("moe.reduce", 860, 880),
    annotation("moe.router", 990, 1010),  # half of it lies in the step
]


def test_host_time_goes_to_the_innermost_range_and_backward_to_the_phase_of_its_forward() -> None:
    summary = summarize_trace({"traceEvents": HOST_TRACE})
    assert (summary.steps, summary.step_ms, summary.has_device) == (1, 1.0, False)
    expected = {
        "plan": PhaseTime(0.15),
        "push": PhaseTime(0.05),
        "experts": PhaseTime(0.2, 0.18),
        "reduce": PhaseTime(0.0, 0.02),
        "router": PhaseTime(0.01),
    }
    for name, time in summary.phases.items():
        wanted = expected.get(name, PhaseTime())
        assert (time.forward_ms, time.backward_ms) == pytest.approx((wanted.forward_ms, wanted.backward_ms)), name
    assert summary.other_host_ms == pytest.approx(1.0 - 0.61)
    text = render_summary(summary)
    assert "experts              0.200     0.180   38.0%" in text
    assert text.endswith("not seen in these steps: dispatch, combine, restore\n")


def test_device_time_is_exposed_where_one_phase_runs_alone() -> None:
    device = [
        *(launch(120, 1), kernel(110, 400, 1)),  # plan
        *(launch(160, 2), kernel(350, 500, 2)),  # push, hidden behind planning for a third
        *(launch(710, 3), kernel(700, 800, 3)),  # experts, by its backward
        *(launch(40, 4), kernel(790, 810, 4)),  # other
        kernel(950, 1100, 5),  # nobody's launch, and only a part of it in the step
    ]
    summary = summarize_trace({"traceEvents": HOST_TRACE + device})
    busy = {name: time.device_ms for name, time in summary.phases.items() if time.device_ms}
    exposed = {name: time.exposed_ms for name, time in summary.phases.items() if time.exposed_ms}
    assert busy == pytest.approx({"plan": 0.29, "push": 0.15, "experts": 0.1})
    assert exposed == pytest.approx({"plan": 0.24, "push": 0.1, "experts": 0.09})
    assert (summary.other_device_ms, summary.overlapped_ms) == pytest.approx((0.06, 0.06))
    assert sum(exposed.values()) + summary.other_device_ms + summary.overlapped_ms + summary.idle_ms == pytest.approx(1)


def test_times_are_means_over_the_steps() -> None:
    later = [event | {"ts": event["ts"] + 5000} for event in HOST_TRACE if event["cat"] == "user_annotation"]
    summary = summarize_trace({"traceEvents": HOST_TRACE + later})
    assert (summary.steps, summary.step_ms) == (2, 1.0)
    assert summary.phases["experts"] == PhaseTime(pytest.approx(0.2), pytest.approx(0.09))


def test_recomputed_forwards_of_another_thread_do_not_take_sequence_numbers_away() -> None:
    recomputed = [annotation("moe.router", 610, 620, tid=2), operation("mm", 611, 619, 8, tid=2)]
    summary = summarize_trace({"traceEvents": HOST_TRACE[:5] + HOST_TRACE[7:8] + recomputed})
    assert summary.phases["experts"].backward_ms == pytest.approx(0.2)


@pytest.mark.parametrize("trace", [[], {}, {"traceEvents": 3}, {"traceEvents": []}, {"traceEvents": HOST_TRACE[1:]}])
def test_other_traces_are_refused_in_words(trace: Any) -> None:
    with pytest.raises(ValueError, match=r"not a Chrome trace|holds? no|has no range"):
        summarize_trace(trace)
