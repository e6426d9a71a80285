"""Permute, combine and reorder in Triton against dense one-hot arithmetic, on values and every gradient."""

import pytest
import torch

from equipoise.kernels.permute import make_permutation

pytest.importorskip("triton")
from equipoise.kernels.permute_triton import gather_sum, scatter_rows

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IDS = {
    "no tokens": torch.empty(0, 2, dtype=torch.int32),
    "one token": torch.tensor([[2, 0]], dtype=torch.int32),
    "all on one": torch.full((5, 1), 3, dtype=torch.int32),
    "three slots": torch.tensor([[0, 3, 1], [3, 1, 2], [1, 0, 3], [3, 2, 0], [0, 1, 2]], dtype=torch.int32),
    "some dropped": torch.tensor([[0, -1], [-1, -1], [3, 1]], dtype=torch.int32),
    "all dropped": torch.full((3, 2), -1, dtype=torch.int32),
}


@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("keep_tail", [True, False])
@pytest.mark.parametrize("D", [1, 7, 64])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_round_trip_equals_dense(ids: torch.Tensor, D: int, keep_tail: bool, is_expanded: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    T, K = ids.shape
    ids = ids.to(DEVICE)
    x = torch.randn(T, D, generator=generator).to(DEVICE).requires_grad_()
    weights = torch.rand(T, K, generator=generator).to(DEVICE).requires_grad_()
    scale = torch.randn(4, D, generator=generator).to(DEVICE)  # stands for four experts: each scales its rows
    grad = torch.randn(1, 1 if is_expanded else D, generator=generator).to(DEVICE).expand(T, D)

    permutation = make_permutation(ids, 4)
    counts = permutation.counts_E.tolist()
    num_rows = sum(counts)
    rows = scatter_rows(x, permutation.row_TK, permutation.valid_TK, T * K if keep_tail else num_rows)
    expert = torch.arange(4).repeat_interleave(torch.tensor(counts)).to(DEVICE)
    out = rows.clone()
    out[:num_rows] = rows[:num_rows] * scale[expert]
    out[num_rows:] = float("nan")  # rows of nobody: a NaN there must not reach anything
    y = gather_sum(out, permutation.row_TK, permutation.valid_TK, weights, torch.float32)
    y.backward(grad)

    x2 = x.detach().double().requires_grad_()
    w2 = weights.detach().double().requires_grad_()
    y2 = (w2 * (ids >= 0))[..., None] * x2[:, None] * scale.double()[ids.long().clamp(min=0)]
    y2 = y2.sum(1)
    y2.backward(grad.double())
    torch.testing.assert_close(y.double(), y2, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.double(), x2.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(weights.grad.double(), w2.grad, rtol=1e-5, atol=1e-5)


def test_frozen_weights_cost_no_gradient() -> None:
    ids = IDS["three slots"].to(DEVICE)
    permutation = make_permutation(ids, 4)
    rows = torch.randn(15, 8).to(DEVICE).requires_grad_()
    weights = torch.rand(5, 3).to(DEVICE)
    y = gather_sum(rows, permutation.row_TK, permutation.valid_TK, weights, torch.float32)
    y.sum().backward()
    expected = weights.flatten()[permutation.slot_R.long()][:, None].expand(-1, 8)
    torch.testing.assert_close(rows.grad, expected)


def test_reorder_is_its_inverse_in_the_backward() -> None:
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    rows = torch.randn(9, 5).to(DEVICE).requires_grad_()
    out = scatter_rows(rows, order.argsort()[:, None], None, 9)
    assert torch.equal(out, rows.detach()[order])
    grad = torch.randn(9, 5).to(DEVICE)
    out.backward(grad)
    assert torch.equal(rows.grad, grad[order.argsort()])


def test_operators_are_registered_whole() -> None:
    ids = IDS["some dropped"].to(DEVICE)
    permutation = make_permutation(ids, 4)
    row, valid = permutation.row_TK, ids >= 0
    x, rows, weights = torch.randn(3, 4).to(DEVICE), torch.randn(6, 4).to(DEVICE), torch.rand(3, 2).to(DEVICE)
    operators = torch.ops.equipoise
    torch.library.opcheck(operators.scatter_rows.default, (x, row, 6))
    torch.library.opcheck(operators.gather_sum.default, (rows, row, valid, weights, torch.float32))
    torch.library.opcheck(operators.gather_sum.default, (rows, row, valid, None, torch.float32))
    torch.library.opcheck(operators.combine_backward.default, (x, rows, row, valid, weights, True))
