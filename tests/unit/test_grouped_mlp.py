"""The fused expert network against separate products in FP64, on values and every gradient."""

import pytest
import torch

from equipoise.kernels.grouped_linear import grouped_mm_linear
from equipoise.kernels.grouped_mlp import grouped_mlp, loop_grouped_mlp, plain_grouped_mlp

COUNTS = [[3, 0, 5, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 8], [2, 3, 1, 4]]


def run(fn, counts: list[int], dtype: torch.dtype, tail: int = 0) -> list[torch.Tensor]:
    """Output and gradients of the counted rows and of both weights; `tail` rows of NaN belong to nobody."""
    generator = torch.Generator().manual_seed(0)
    total = sum(counts)
    gate_up = torch.randn(4, 24, 16, generator=generator)
    down = torch.randn(4, 16, 12, generator=generator)
    nobody = torch.full((tail, 16), float("nan"))
    rows = torch.cat([torch.randn(total, 16, generator=generator), nobody])
    grad = torch.cat([torch.randn(total, 16, generator=generator), nobody])
    rows, gate_up, down = (x.to(dtype).requires_grad_() for x in (rows, gate_up, down))
    out = fn(rows, gate_up, down, torch.tensor(counts))
    out.backward(grad.to(dtype))
    return [out.detach()[:total].double(), rows.grad[:total].double(), gate_up.grad.double(), down.grad.double()]


@pytest.mark.parametrize("tail", [0, 3])
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(
    "fn",
    [loop_grouped_mlp, grouped_mlp, lambda *a: plain_grouped_mlp(*a, grouped_mm_linear)],
    ids=["fused loop", "chosen", "grouped_mm"],
)
def test_matches_fp64(fn, counts: list[int], tail: int) -> None:
    expected = run(plain_grouped_mlp, counts, torch.float64)
    for value, reference in zip(run(fn, counts, torch.float32, tail), expected):
        assert float((value - reference).norm()) <= 1e-6 * float(reference.norm())


@pytest.mark.parametrize("counts", COUNTS)
def test_idle_experts_get_exact_zeros(counts: list[int]) -> None:
    """cases.md C11 on the fused form, in memory that held NaN."""
    for shape in ((4, 24, 16), (4, 16, 12)):
        torch.full(shape, float("nan"))
    _, _, grad_gate_up, grad_down = run(loop_grouped_mlp, counts, torch.float32)
    for expert, count in enumerate(counts):
        if count == 0:
            assert (grad_gate_up[expert] == 0).all()
            assert (grad_down[expert] == 0).all()


def test_frozen_weights_get_no_gradient() -> None:
    rows = torch.randn(4, 16, requires_grad=True)
    gate_up, down = torch.randn(2, 24, 16), torch.randn(2, 16, 12)
    loop_grouped_mlp(rows, gate_up, down, torch.tensor([3, 1])).sum().backward()
    expected = rows.detach().clone().requires_grad_()
    plain_grouped_mlp(expected, gate_up, down, torch.tensor([3, 1])).sum().backward()
    torch.testing.assert_close(rows.grad, expected.grad)
