"""What of the transfers of replicas a profile shows beside nothing else, and where a step's time on the device goes.

A trace is the dict that torch's profiler exports (Chrome's format, microseconds). Kernels belong to the named range in
which they were launched; the stream with the most time in kernels is the one that computes.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

TRANSFERS = ("moe.push", "moe.restore", "moe.reduce")
"""Ranges of sending weights of replicas to a forward and to a backward, and of bringing their gradients home."""


class Kernel(NamedTuple):
    """One run of a kernel; `range`: the innermost range of ours that it was launched in, or empty."""

    name: str
    stream: int
    start: float
    end: float
    range: str


class Exposure(NamedTuple):
    """Microseconds of one range's kernels, all of them, and those during which the computing stream ran nothing."""

    total_us: float
    exposed_us: float


def read_kernels(trace: dict[str, Any], ranges: Sequence[str] = TRANSFERS) -> list[Kernel]:
    """The kernels of a trace, by start."""
    launches: dict[int, tuple[Any, float]] = {}
    annotations: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        kind, start = event.get("cat", ""), float(event["ts"])
        if kind in ("cuda_runtime", "cuda_driver", "privateuse1_runtime", "hip_runtime"):
            launches[event.get("args", {}).get("correlation", -1)] = event.get("tid"), start
        elif kind == "user_annotation" and event["name"] in ranges:
            annotations[event.get("tid")].append((start, start + float(event["dur"]), event["name"]))
        elif kind == "kernel":
            found.append(event)
    kernels = []
    for event in found:
        thread, launched = launches.get(event["args"].get("correlation", -1), (None, -1.0))
        inside = [(end - start, name) for start, end, name in annotations[thread] if start <= launched <= end]
        start = float(event["ts"])
        kernels.append(
            Kernel(
                event["name"],
                event["args"]["stream"],
                start,
                start + float(event["dur"]),
                min(inside)[1] if inside else "",
            )
        )
    return sorted(kernels, key=lambda kernel: kernel.start)


def computing_stream(kernels: Iterable[Kernel]) -> int:
    """The stream with the most time in kernels that are no transfers."""
    times: dict[int, float] = defaultdict(float)
    for kernel in kernels:
        times[kernel.stream] += 0.0 if kernel.range else kernel.end - kernel.start
    return max(times, key=lambda stream: times[stream])


def merged(kernels: Iterable[Kernel]) -> list[tuple[float, float]]:
    """The times in which any of them runs, disjoint and in order."""
    times: list[tuple[float, float]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        if times and kernel.start <= times[-1][1]:
            times[-1] = times[-1][0], max(times[-1][1], kernel.end)
        else:
            times.append((kernel.start, kernel.end))
    return times


def uncovered_us(start: float, end: float, busy: Sequence[tuple[float, float]]) -> float:
    """Microseconds between start and end that lie in none of the disjoint, ordered times."""
    covered = 0.0
    index = max(bisect_right(busy, (start, start)) - 1, 0)
    for begin, stop in busy[index:]:
        if begin >= end:
            break
        covered += max(min(stop, end) - max(begin, start), 0.0)
    return end - start - covered


def exposures(kernels: Sequence[Kernel], ranges: Sequence[str] = TRANSFERS) -> dict[str, Exposure]:
    """Of each range."""
    stream = computing_stream(kernels)
    busy = merged(kernel for kernel in kernels if kernel.stream == stream)
    found = {}
    for name in ranges:
        of_range = [kernel for kernel in kernels if kernel.range == name and kernel.stream != stream]
        spans = merged(of_range)
        exposed = sum(uncovered_us(start, end, busy) for start, end in spans)
        found[name] = Exposure(sum(end - start for start, end in spans), exposed)
    return found


def kernel_times(kernels: Iterable[Kernel]) -> dict[str, float]:
    """Microseconds of the computing stream by kernel name, and "idle" between its first and last."""
    kernels = list(kernels)
    stream = computing_stream(kernels)
    times: dict[str, float] = defaultdict(float)
    busy = [kernel for kernel in kernels if kernel.stream == stream]
    for kernel in busy:
        times[kernel.name] += kernel.end - kernel.start
    spans = merged(busy)
    times["idle"] = spans[-1][1] - spans[0][0] - sum(end - start for start, end in spans)
    return dict(times)
