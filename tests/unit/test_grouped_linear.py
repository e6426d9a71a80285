"""Grouped linear against a per-expert product in FP64, on values and every gradient."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from equipoise.errors import ConfigError
from equipoise.kernels.grouped_linear import choose_grouped_linear, grouped_mm_linear, loop_grouped_linear
from equipoise.models.recompute import recompute_context

COUNTS = [[3, 0, 5, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 8], [2, 3, 1, 4]]
IMPLEMENTATIONS = [loop_grouped_linear, grouped_mm_linear]


def reference(rows, weight, counts, grad):
    rows = rows.double().requires_grad_()
    weight = weight.double().requires_grad_()
    parts = rows[: sum(counts)].split(counts)
    out = torch.cat([part @ w.T for part, w in zip(parts, weight)])
    out.backward(grad[: sum(counts)].double())
    return out.detach(), rows.grad, weight.grad


@pytest.fixture
def dirty_memory() -> None:
    """Freed blocks full of garbage, so that a slice that is never written shows."""
    for _ in range(4):
        torch.full((4, 16, 8), float("nan"))
        torch.full((4, 8, 16), float("nan"))


@pytest.mark.parametrize("fn", IMPLEMENTATIONS)
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("tail", [0, 3])
def test_matches_fp64_and_idle_experts_get_exact_zeros(fn, counts, tail, dirty_memory) -> None:
    """cases.md C11; rows past the counted ones (`tail`, NaN here) reach no result and no gradient."""
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    rows = torch.randn(total + tail, 16, generator=generator)
    rows[total:] = float("nan")
    weight = torch.randn(4, 8, 16, generator=generator)
    grad = torch.randn(total + tail, 8, generator=generator)
    grad[total:] = float("nan")
    x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
    out = fn(x, w, torch.tensor(counts))
    out.backward(grad)
    expected, grad_rows, grad_weight = reference(rows, weight, counts, grad)
    torch.testing.assert_close(out[:total].double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad[:total].double(), grad_rows[:total], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(w.grad.double(), grad_weight, rtol=1e-5, atol=1e-5)
    for expert, count in enumerate(counts):
        if count == 0:
            assert (w.grad[expert] == 0).all()


@pytest.mark.parametrize("fn", IMPLEMENTATIONS)
def test_broadcast_gradient(fn) -> None:
    """The gradient of `sum()` has strides of 0, which a grouped product may refuse."""
    x = torch.randn(4, 16, requires_grad=True)
    w = torch.randn(2, 8, 16, requires_grad=True)
    fn(x, w, torch.tensor([4, 0])).sum().backward()
    torch.testing.assert_close(x.grad, w.detach()[0].sum(0).expand(4, 16))


@pytest.mark.parametrize("name", ["auto", "loop", "grouped_mm"])
def test_choice_says_why(name: str) -> None:
    choice = choose_grouped_linear(torch.device("cpu"), torch.float32, name)
    assert choice.reason
    assert choice.name == ("loop" if name == "auto" else name)


def test_unknown_kernel_is_refused_with_the_choices() -> None:
    with pytest.raises(ValueError, match="choose auto, loop, grouped_mm or triton"):
        choose_grouped_linear(torch.device("cpu"), torch.float32, "cutlass")


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad, "recompute"])
def test_probe_does_not_see_the_callers_modes(mode) -> None:
    """The first forward may be an evaluation or run under recompute; the answer is kept for the whole run."""

    def choose(x: torch.Tensor) -> torch.Tensor:
        choose_grouped_linear.cache_clear()
        assert choose_grouped_linear(torch.device("cpu"), torch.float32, "grouped_mm").name == "grouped_mm"
        return x * 2

    x = torch.ones(2, requires_grad=True)
    if mode == "recompute":
        context = recompute_context("selective")
        checkpoint(choose, x, use_reentrant=False, context_fn=context).sum().backward()
    else:
        with mode():
            choose(x)


def test_a_kernel_that_does_not_run_here_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args, **kwargs):
        raise RuntimeError("not implemented for this device\nmore lines")

    monkeypatch.setattr(torch.nn.functional, "grouped_mm", broken)
    choose_grouped_linear.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"does not run here: not implemented for this device. Use auto or loop"):
            choose_grouped_linear(torch.device("cpu"), torch.float32, "grouped_mm")
        assert choose_grouped_linear(torch.device("cpu"), torch.float32, "auto").name == "loop"
    finally:
        choose_grouped_linear.cache_clear()
