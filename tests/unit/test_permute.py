"""Permutation and combine against dense one-hot arithmetic, on values and every gradient."""

import pytest
import torch

from equipoise.kernels.permute import combine, make_permutation, permute, weights_of_rows

IDS = {
    "no tokens": torch.empty(0, 2, dtype=torch.int32),
    "one token": torch.tensor([[2, 0]], dtype=torch.int32),
    "all on one": torch.full((5, 1), 3, dtype=torch.int32),
    "ragged": torch.tensor([[0, 3], [3, 1], [1, 0], [3, 2], [0, 1], [2, 3], [3, 0]], dtype=torch.int32),
    "some dropped": torch.tensor([[0, -1], [-1, -1], [3, 1]], dtype=torch.int32),
    "all dropped": torch.full((3, 2), -1, dtype=torch.int32),
}


@pytest.mark.parametrize("keep_tail", [True, False])
@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_round_trip_equals_dense(ids: torch.Tensor, keep_tail: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    T, K = ids.shape
    x = torch.randn(T, 6, generator=generator).requires_grad_()
    weights = torch.rand(T, K, generator=generator).requires_grad_()
    scale = torch.randn(4, 6, generator=generator)  # stands for four experts: each scales its rows
    grad = torch.randn(T, 6, generator=generator)

    permutation = make_permutation(ids, 4)
    num_rows = int(permutation.counts_E.sum())
    rows = permute(x, permutation, None if keep_tail else num_rows)
    expert = torch.arange(4).repeat_interleave(permutation.counts_E)
    out = rows.clone()
    out[:num_rows] = rows[:num_rows] * scale[expert]
    out[num_rows:] = float("nan")  # rows of nobody: a NaN there must not reach anything
    y = combine(out, weights, permutation)
    y.backward(grad)

    x2 = x.detach().double().requires_grad_()
    w2 = weights.detach().double().requires_grad_()
    valid = (ids >= 0).double()
    y2 = (w2 * valid)[..., None] * x2[:, None] * scale.double()[ids.long().clamp(min=0)]
    y2 = y2.sum(1)
    y2.backward(grad.double())
    torch.testing.assert_close(y.double(), y2, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), x2.grad, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights.grad.double(), w2.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ids", IDS.values(), ids=IDS.keys())
def test_weights_given_to_rows_are_those_of_combine(ids: torch.Tensor) -> None:
    """Rows times their weights, combined without, against combine with them: values and every gradient."""
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(ids.shape[0], 6, generator=generator), torch.rand(ids.shape, generator=generator)
    grad = torch.randn(ids.shape[0], 6, generator=generator)
    found = []
    for weighs_rows in (True, False):
        x, weights = (tensor.detach().clone().requires_grad_() for tensor in (x, weights))
        permutation = make_permutation(ids, 4)
        rows = permute(x, permutation).tanh()
        if weighs_rows:
            y = combine(rows * weights_of_rows(weights, permutation)[:, None], None, permutation)
        else:
            y = combine(rows, weights, permutation)
        y.backward(grad)
        found.append((y.detach(), x.grad, weights.grad))
    for a, b in zip(*found):
        torch.testing.assert_close(a, b)


def test_rows_are_stable_in_token_order() -> None:
    permutation = make_permutation(torch.tensor([[1], [0], [1], [0], [1]]), 2)
    assert permutation.token_R.tolist() == [1, 3, 0, 2, 4]
    assert permutation.counts_E.tolist() == [2, 3]


def test_combine_sums_in_fp32() -> None:
    """256 slots of 1 + 1/256 in BF16 sum to 257 in FP32 and drift when each partial sum is rounded to BF16."""
    ids = torch.zeros(1, 256, dtype=torch.int32)
    rows = torch.ones(256, 1, dtype=torch.bfloat16)
    weights = torch.full((1, 256), 1 + 1 / 256)
    assert combine(rows, weights, make_permutation(ids, 1)).item() == pytest.approx(257, abs=1.01)
    assert combine(rows, weights, make_permutation(ids, 1), torch.float32).item() == 257.0


@pytest.mark.slow
def test_offsets_past_two_to_the_31() -> None:
    """cases.md C15: 299,600 rows of width 7,168 pass 2^31 elements; the last rows must be right, both ways.

    One-byte floats: small whole numbers are exact, and the sums of the backward are rounded once.
    """
    T, K, D = 37_450, 8, 7168
    values_T = torch.arange(T).remainder(7).float()
    x = values_T[:, None].expand(T, D).to(torch.float8_e4m3fn).requires_grad_()
    ids = torch.arange(T * K, dtype=torch.int32).view(T, K).remainder(8)
    permutation = make_permutation(ids, 8)
    rows = permute(x, permutation)
    assert rows.numel() > 2**31
    late = slice(-10, None)
    assert torch.equal(rows[late].float(), x.detach().float().index_select(0, permutation.token_R[late]))

    grad_R = torch.arange(rows.shape[0]).remainder(5).float()
    rows.backward(grad_R[:, None].to(torch.float8_e4m3fn).expand(-1, D))
    assert x.grad is not None
    want_T = grad_R[permutation.row_TK[late]].sum(1).to(torch.float8_e4m3fn).float()
    assert torch.equal(x.grad[late].float(), want_T[:, None].expand(-1, D))
