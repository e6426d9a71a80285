"""Timing of GPU work: peers take turns in one run, captured as CUDA graphs so that no launch is waited for."""

from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

import torch

Work = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)


def capture(work: Work) -> torch.cuda.CUDAGraph:
    """The work as a graph, after two runs that compile and allocate."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


def interleaved_medians(works: Mapping[Name, Work], rounds: int = 12) -> dict[Name, float]:
    """Median milliseconds of each, measured in turns; the cache is overwritten before every run."""
    graphs = {name: capture(work) for name, work in works.items()}
    scratch = torch.empty(256 << 20, dtype=torch.int8, device="cuda")
    marks: dict[Name, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in works}
    for _ in range(rounds + 2):
        for name, graph in graphs.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            scratch.zero_()
            start.record()
            graph.replay()
            end.record()
            marks[name].append((start, end))
    torch.cuda.synchronize()
    return {name: median(start.elapsed_time(end) for start, end in pairs[2:]) for name, pairs in marks.items()}
