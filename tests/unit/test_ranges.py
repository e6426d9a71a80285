"""Names of what the host does are in a profile, in a backward too, and nowhere else."""

import torch
from torch.profiler import ProfilerActivity, profile

from equipoise.kernels.ranges import named_range


class Named(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with named_range("there"):
            return x * 2

    @staticmethod
    def backward(ctx, grad):
        with named_range("and back"):
            return grad * 2


def run() -> None:
    Named.apply(torch.ones(3, requires_grad=True)).sum().backward()


def test_a_profile_has_the_names() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run()
    assert {"there", "and back"} <= {event.name for event in profiler.events()}


def test_without_one_no_operator_runs_for_them(monkeypatch) -> None:
    monkeypatch.setattr("equipoise.kernels.ranges.record_function", None)
    run()


def test_the_compiler_leaves_them_out() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        with named_range("compiled"):
            return x * 2

    compiled = torch.compile(double, fullgraph=True, backend="eager")
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
