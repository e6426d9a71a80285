"""Router logits from 16-bit products: as exact as those of FP32 matrices, and so are their gradients."""

import pytest
import torch

from equipoise.kernels.router_logits import (
    plain_router_logits,
    product_in_float32,
    router_logits,
    split_bfloat16,
    split_gradients,
)

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def inputs(T: int, D: int, E: int) -> list[torch.Tensor]:
    """Tokens, weights and a gradient of the logits."""
    generator = torch.Generator().manual_seed(T + D + E)
    x, weight, grad = (torch.randn(s, generator=generator) for s in ((T, D), (E, D), (T, E)))
    return [x.bfloat16().to(DEVICE), (0.02 * weight).bfloat16().to(DEVICE), (1e-6 * grad).to(DEVICE)]


def error(value: torch.Tensor, exact: torch.Tensor) -> float:
    return float((value.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize(("T", "D", "E"), [(1, 1, 1), (5, 16, 3), (64, 200, 8)])
def test_values_and_gradients(T: int, D: int, E: int) -> None:
    x, weight, grad = inputs(T, D, E)
    assert error(product_in_float32(x, weight.T), x.double() @ weight.double().T) < 2e-6
    grad_x, grad_weight = split_gradients(grad, x, weight, True, True)
    assert grad_x.dtype == grad_weight.dtype == torch.bfloat16
    for value, exact in ((grad_x, grad.double() @ weight.double()), (grad_weight, grad.double().T @ x.double())):
        best = error(exact.bfloat16(), exact)  # what rounding the result costs
        assert error(value, exact) < 1.1 * best + 1e-5


def test_a_split_keeps_16_bits() -> None:
    """One 16-bit part alone, which keeps 8, does not: the split is needed."""
    _, _, grad = inputs(64, 8, 8)
    high, low = split_bfloat16(grad).chunk(2, 1)
    assert torch.equal(high, grad.bfloat16())
    assert torch.equal(low, (grad - grad.bfloat16().float()).bfloat16())
    assert error(high.double() + low.double(), grad.double()) < 2**-16
    assert error(high, grad.double()) > 2**-11


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True), (False, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autograd(dtype: torch.dtype, wanted: tuple[bool, bool]) -> None:
    results = []
    for fn in (plain_router_logits, router_logits):
        leaves = [t.to(dtype, copy=True).requires_grad_(want) for t, want in zip(inputs(6, 16, 4), wanted)]
        logits = fn(*leaves)
        assert logits.dtype == torch.float32
        if any(wanted):
            (logits.sin().sum() * 1e-3).backward()
        results.append([logits.detach(), *(t.grad for t in leaves)])
    for expected, value in zip(*results):
        torch.testing.assert_close(value, expected, rtol=1e-5 if dtype == torch.float32 else 1e-2, atol=1e-6)
