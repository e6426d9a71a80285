"""What of transfers a profile shows exposed."""

from typing import Any

import pytest

from equipoise.bench.exposed import exposures, kernel_times, read_kernels, uncovered_us


def trace(*kernels: tuple[str, int, float, float, float], ranges: tuple[tuple[str, float, float], ...] = ()) -> dict:
    """Kernels: name, stream, start, duration, time of the launch. Ranges: name, start, duration."""
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for number, (name, stream, start, duration, launched) in enumerate(kernels):
        ids = {"correlation": number}
        events.append(
            {"ph": "X", "cat": "cuda_driver", "name": "launch", "ts": launched, "dur": 1, "tid": 7, "args": ids}
        )
        args = ids | {"stream": stream}
        events.append({"ph": "X", "cat": "kernel", "name": name, "ts": start, "dur": duration, "args": args})
    for name, start, duration in ranges:
        events.append({"ph": "X", "cat": "user_annotation", "name": name, "ts": start, "dur": duration, "tid": 7})
    return {"traceEvents": events}


RANGES = (("moe.push", 10.0, 5.0), ("moe.reduce", 20.0, 5.0), ("layer", 0.0, 100.0))
STEP = trace(
    ("gemm", 1, 100.0, 50.0, 1.0),
    ("gemm", 1, 160.0, 40.0, 2.0),
    ("attention", 1, 300.0, 100.0, 30.0),
    ("transfer", 2, 140.0, 30.0, 12.0),
    ("transfer", 2, 250.0, 70.0, 22.0),
    ranges=RANGES,
)


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    kernels = read_kernels(STEP)
    assert [kernel.range for kernel in kernels] == ["", "moe.push", "", "moe.reduce", ""]
    assert [kernel.start for kernel in kernels] == [100.0, 140.0, 160.0, 250.0, 300.0]


def test_exposed_is_what_nothing_else_covers() -> None:
    found = exposures(read_kernels(STEP))
    assert found["moe.push"] == (30.0, 10.0)
    assert found["moe.reduce"] == (70.0, 50.0)
    assert found["moe.restore"] == (0.0, 0.0)


def test_times_of_the_computing_stream_and_its_gaps() -> None:
    assert kernel_times(read_kernels(STEP)) == {"gemm": 90.0, "attention": 100.0, "idle": 110.0}


@pytest.mark.parametrize(
    ("start", "end", "left"), [(0, 5, 5), (0, 12, 10), (12, 18, 0), (15, 45, 10), (25, 29, 4), (50, 60, 10)]
)
def test_uncovered(start: float, end: float, left: float) -> None:
    assert uncovered_us(start, end, [(10, 20), (30, 50)]) == left
