"""Passes over large tensors, against torch."""

import pytest
import torch

pytest.importorskip("triton")
from equipoise.kernels import elementwise_triton
from equipoise.kernels.elementwise_triton import scaled, sum_of_squares

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NARROW = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter has no BF16


@pytest.mark.parametrize("shape", [(0, 3), (1,), (7, 33), (64,)], ids=str)
def test_a_product_is_rounded_once(monkeypatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(elementwise_triton, "BLOCK", 64)
    value = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    factor = torch.tensor(0.37, device=DEVICE)
    got = scaled(value, factor, NARROW)
    assert got.dtype == NARROW
    assert torch.equal(got, (value * factor).to(NARROW))


def test_squares_of_all_tensors(monkeypatch) -> None:
    """More blocks than programs, an empty tensor, and two dtypes."""
    monkeypatch.setattr(elementwise_triton, "BLOCK", 64)
    monkeypatch.setattr(elementwise_triton, "PARTS", 2)
    generator = torch.Generator().manual_seed(1)
    values = [
        torch.randn(n, generator=generator).to(DEVICE, t) for n in (500, 0, 1, 64) for t in (torch.float32, NARROW)
    ]
    want = sum(value.double().square().sum() for value in values)
    torch.testing.assert_close(sum_of_squares(values).double(), want, rtol=1e-6, atol=0.0)
    values[3] = torch.full((3,), torch.inf, device=DEVICE)
    assert sum_of_squares(values).isinf()


@pytest.mark.parametrize("part", [lambda x: x[:, 1:4], lambda x: x[::2], lambda x: x[:1].expand(4, 8), lambda x: x.T])
def test_elements_that_do_not_lie_together(part) -> None:
    value = part(torch.randn(6, 8, generator=torch.Generator().manual_seed(3)).to(DEVICE))
    factor = torch.tensor(0.37, device=DEVICE)
    assert torch.equal(scaled(value, factor, torch.float32), value * factor)
    torch.testing.assert_close(sum_of_squares([value]), value.square().sum())
