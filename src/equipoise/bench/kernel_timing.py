"""Timing of GPU work: peers take turns in one run, captured as CUDA graphs so that no launch is waited for."""

from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import Any, TypeVar

import torch

Work = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def gpu() -> Any:
    """torch's module of the GPUs that it calls `cuda` (NVIDIA's and AMD's)."""
    return torch.get_device_module("cuda")


def capture(work: Work) -> Any:
    """The work as a graph, after two runs that compile and allocate."""
    device = gpu()
    stream = device.Stream()
    stream.wait_stream(device.current_stream())
    with device.stream(stream):
        for _ in range(2):
            work()
    device.current_stream().wait_stream(stream)
    graph = device.CUDAGraph()
    with device.graph(graph):
        work()
    return graph


def interleaved_medians(works: Mapping[Name, Work], rounds: int = 10) -> dict[Name, float]:
    """Median milliseconds of each, measured in turns; the cache is overwritten before every run."""
    graphs = {name: capture(work) for name, work in works.items()}
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    marks: dict[Name, list[tuple[Any, Any]]] = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (gpu().Event(enable_timing=True) for _ in range(2))
            scratch.zero_()
            start.record()
            graph.replay()
            end.record()
            marks[name].append((start, end))
    gpu().synchronize()
    return {name: median(start.elapsed_time(end) for start, end in pairs[2:]) for name, pairs in marks.items()}


def graph_us(work: Work, launches: int = 20, replays: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph of many: for work that is shorter than a launch."""

    def many() -> None:
        for _ in range(launches):
            work()

    graph, times = capture(many), []
    for _ in range(replays):
        start, end = (gpu().Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return median(times)
