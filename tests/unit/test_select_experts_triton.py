"""The router's kernels against their plain forms: equal ids and counts, weights and gradients as FP64 has them."""

import pytest
import torch

from equipoise.kernels.router_weights import (
    fused_router_weights,
    plain_router_weights,
    router_weights_backward,
    router_weights_forward,
)
from equipoise.kernels.select_experts import plain_select

pytest.importorskip("triton")
from equipoise.kernels.select_experts_triton import triton_select

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("kind", ["random", "ties", "nan", "infinite"])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("T", "E", "k"), [(0, 4, 2), (1, 1, 1), (9, 6, 3), (130, 20, 8), (5, 256, 8)])
def test_selection_equals_the_plain_form(T: int, E: int, k: int, has_bias: bool, kind: str) -> None:
    generator = torch.Generator().manual_seed(T)
    scores = torch.randn(T, E, generator=generator)
    if kind == "ties":
        scores = (scores * 2).round() * 0.5 * torch.where(scores < 0, -0.0, 1.0)
    elif kind == "nan":
        scores[torch.rand(T, E, generator=generator) < 0.3] = float("nan")
    elif kind == "infinite":
        scores[torch.rand(T, E, generator=generator) < 0.5] = float("-inf")
        scores[torch.rand(T, E, generator=generator) < 0.2] = float("inf")
    bias = torch.randn(E, generator=generator).to(DEVICE) if has_bias else None
    valid = (torch.rand(T, generator=generator) < 0.7).to(DEVICE) if has_bias else None
    scores = scores.to(DEVICE)
    ids, counts = triton_select(scores, bias, valid, k)
    expected_ids, expected_counts = plain_select(scores, bias, valid, k, 1, 1)
    assert ids.dtype == counts.dtype == torch.int32
    assert torch.equal(ids, expected_ids)
    assert torch.equal(counts, expected_counts)


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("is_normalised", [False, True])
@pytest.mark.parametrize("is_softmax", [False, True])
@pytest.mark.parametrize(("T", "E", "k"), [(0, 4, 2), (1, 1, 1), (9, 6, 3), (33, 20, 8)])
def test_weights_equal_fp64(T: int, E: int, k: int, is_softmax: bool, is_normalised: bool, is_expanded: bool) -> None:
    generator = torch.Generator().manual_seed(T)
    logits = (3 * torch.randn(T, E, generator=generator)).to(DEVICE).requires_grad_()
    ids = logits.detach().topk(k, -1).indices.int()
    if T > 1:
        ids[1] = -1
    grad = torch.randn(1 if is_expanded else T, 1 if is_expanded else k, generator=generator).to(DEVICE).expand(T, k)
    weights = fused_router_weights(logits, ids, is_softmax, is_normalised, 2.5)
    weights.backward(grad)

    exact = logits.detach().double().requires_grad_()
    scores = exact.softmax(-1) if is_softmax else exact.sigmoid()
    expected = plain_router_weights(scores, ids, is_normalised, 2.5)
    expected.backward(grad.double())
    torch.testing.assert_close(weights.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.grad.double(), exact.grad, rtol=1e-5, atol=1e-6)


def test_operator_is_registered_whole() -> None:
    logits = torch.randn(3, 5).to(DEVICE)
    ids = torch.tensor([[0, 4], [-1, -1], [2, 1]], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(router_weights_forward, (logits, ids, True, True, 1.0))
    torch.library.opcheck(router_weights_backward, (torch.ones(3, 2).to(DEVICE), logits, ids, True, True, 1.0))


def test_compiles_whole() -> None:
    ids = torch.tensor([[0, 4], [-1, -1], [2, 1]], dtype=torch.int32, device=DEVICE)
    run = lambda logits: fused_router_weights(logits, ids, True, True, 1.5).square().sum()  # noqa: E731
    compiled, gradients = torch.compile(run, fullgraph=True, backend="aot_eager"), []
    for function in (run, compiled):
        logits = torch.linspace(-1, 1, 15).view(3, 5).to(DEVICE).requires_grad_()
        function(logits).backward()
        gradients.append(logits.grad)
    assert torch.equal(*gradients)
