"""Norm and rotary position of queries and keys in one kernel, against FP64."""

import pytest
import torch

from equipoise.kernels.rotary_norm import _rotary_norm, _rotary_norm_backward, plain_rotary_norm, rotary_norm
from equipoise.models.rotary import rotary_tables, rotate

pytest.importorskip("triton")
from equipoise.kernels import rotary_norm_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]
EPS = 1e-3
SHAPES = [(1, 1, 1, 16), (2, 5, 3, 16), (2, 0, 4, 16)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, own_positions: bool) -> list[torch.Tensor]:
    B, S, _, H = shape
    generator = torch.Generator().manual_seed(sum(shape))
    x, weight = torch.randn(shape, generator=generator) * 3, torch.rand(H, generator=generator) + 0.5
    positions = torch.randint(0, 99, (B if own_positions else 1, S), generator=generator)
    cos, sin = rotary_tables(positions, H, 100.0, dtype)
    return [x.to(DEVICE, dtype), weight.to(DEVICE, dtype), cos.to(DEVICE), sin.to(DEVICE)]


def results(function, arguments: list[torch.Tensor], grad: torch.Tensor) -> list[torch.Tensor]:
    x, weight = (value.clone().requires_grad_() for value in arguments[:2])
    out = function(x, weight, *arguments[2:], EPS)
    return [out.detach(), *torch.autograd.grad(out, (x, weight), grad)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("own_positions", [False, True])
@pytest.mark.parametrize("by_head", [False, True], ids=["tokens outside", "heads outside"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(monkeypatch, shape, by_head: bool, own_positions: bool, dtype: torch.dtype) -> None:
    """With several tokens and heads in a tile, several tiles in a program, and gradients as attention leaves them."""
    monkeypatch.setattr(rotary_norm_triton, "TILE", 64)
    monkeypatch.setattr(rotary_norm_triton, "PROGRAMS", 2)
    arguments = inputs(shape, dtype, own_positions)
    grad = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    if by_head:
        grad = grad.transpose(1, 2).contiguous().transpose(1, 2)
    got = results(_rotary_norm, arguments, grad)
    want = results(plain_rotary_norm, [value.double() for value in arguments], grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for value, exact in zip(got, want):
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("one_gradient_for_all", [False, True])
def test_elements_that_do_not_lie_together(one_gradient_for_all: bool) -> None:
    """Heads of a product for queries, keys and values; every other weight; tables and gradients without a batch."""
    x, weight, cos, sin = inputs((2, 5, 3, 16), torch.float32, False)
    arguments = [x[:, :, 1:], weight.repeat_interleave(2)[::2], cos.expand(2, -1, -1, -1), sin.expand(2, -1, -1, -1)]
    grad = torch.randn(2, 5, 2, 1).to(DEVICE).expand(2, 5, 2, 16)
    if one_gradient_for_all:
        grad = torch.randn(1, 1, 1, 16).to(DEVICE).expand(2, 5, 2, 16)
    want = [value.double() for value in arguments]

    def strided(x, weight, cos, sin, eps):  # `results` takes copies, which lie together
        whole = torch.stack([weight, weight], 1)
        return _rotary_norm(torch.cat([x[:, :, :1], x], 2)[:, :, 1:], whole[:, 0], cos, sin, eps)

    for value, exact in zip(results(strided, arguments, grad), results(plain_rotary_norm, want, grad.double())):
        torch.testing.assert_close(value.double(), exact, rtol=1e-5, atol=1e-5)


def test_the_plain_form_is_the_models() -> None:
    x, weight, cos, sin = inputs((2, 5, 3, 16), torch.float32, True)
    want = rotate(torch.nn.functional.rms_norm(x, (16,), weight, EPS).transpose(1, 2), cos, sin)
    assert torch.equal(plain_rotary_norm(x, weight, cos, sin, EPS).transpose(1, 2), want)
    torch.testing.assert_close(rotary_norm(x, weight, cos, sin, EPS).transpose(1, 2), want)


def test_operators_are_registered_whole() -> None:
    arguments = inputs((2, 3, 2, 16), torch.float32, False)
    grad = torch.randn(2, 3, 2, 16).to(DEVICE)
    torch.library.opcheck(
        _rotary_norm, (arguments[0].requires_grad_(), arguments[1].requires_grad_(), *arguments[2:], EPS)
    )
    torch.library.opcheck(_rotary_norm_backward, (grad, *(value.detach() for value in arguments), EPS))


def test_compiled_whole() -> None:
    """As in a compiled layer: one graph, and the same gradients."""
    arguments = inputs((1, 3, 2, 16), torch.float32, False)
    grad = torch.randn(1, 3, 2, 16, generator=torch.Generator().manual_seed(2)).to(DEVICE)

    def function(x, weight, cos, sin, eps):
        return _rotary_norm(x * 2, weight, cos, sin, eps).transpose(1, 2).transpose(1, 2) * 3

    compiled = torch.compile(function, fullgraph=True, backend="inductor" if DEVICE.type == "cuda" else "aot_eager")
    for got, want in zip(results(compiled, arguments, grad), results(function, arguments, grad)):
        torch.testing.assert_close(got, want)
