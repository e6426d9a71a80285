"""The loss in chunks, with gradients made in the forward, against autograd in one piece."""

import pytest
import torch

from equipoise.models import cross_entropy
from equipoise.models.cross_entropy import IGNORED_LABEL, linear_cross_entropy, plain_cross_entropy


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 16])
@pytest.mark.parametrize("chunk_tokens", [0, 1, 3, 16, 100])
@pytest.mark.parametrize("ignored", ["none", "some", "all"])
def test_values_and_gradients(monkeypatch, num_tokens: int, chunk_tokens: int, ignored: str) -> None:
    torch.manual_seed(0)
    num_features, num_words = 5, 11
    monkeypatch.setitem(cross_entropy._CHUNK_ELEMENTS, "cpu", chunk_tokens * num_words)
    labels = torch.randint(0, num_words, (num_tokens,))
    if ignored != "none":
        labels[:: 3 if ignored == "some" else 1] = IGNORED_LABEL
    x, weight = torch.randn(num_tokens, num_features), torch.randn(num_words, num_features)
    results = []
    for fn in (plain_cross_entropy, linear_cross_entropy):
        leaves = [t.clone().requires_grad_() for t in (x, weight)]
        loss = fn(*leaves, labels)
        (loss * 0.37).backward()
        results.append([loss.detach(), *(t.grad for t in leaves)])
    for expected, value in zip(*results):
        torch.testing.assert_close(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("wanted", [(False, False), (True, False), (False, True)])
def test_only_what_is_wanted_gets_a_gradient(wanted: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(6, 4).requires_grad_(wanted[0]), torch.randn(9, 4).requires_grad_(wanted[1])]
    labels = torch.tensor([0, 8, IGNORED_LABEL, 3, 3, 1])
    loss = linear_cross_entropy(*leaves, labels)
    torch.testing.assert_close(loss, plain_cross_entropy(*leaves, labels))
    assert loss.requires_grad == any(wanted)
    if any(wanted):
        loss.backward()
    assert tuple(t.grad is not None for t in leaves) == wanted


def test_sums_over_tokens_are_in_float32() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(512, 8).bfloat16(), torch.randn(16, 8).bfloat16()
    labels = torch.randint(0, 16, (512,))
    leaves = [t.clone().requires_grad_() for t in (x, weight)]
    loss = linear_cross_entropy(*leaves, labels)
    scale = 0.37  # 0.36914 in BF16
    (loss * scale).backward()
    exact = [t.double().requires_grad_() for t in (x, weight)]
    expected = plain_cross_entropy(*exact, labels)
    torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, labels, reduction="sum").mul(scale).backward()
    assert loss.dtype == torch.float32
    assert abs(float(loss.detach()) - float(expected.detach())) < 2e-3 * float(expected.detach())
    for leaf, reference in zip(leaves, exact):
        assert leaf.grad.dtype == torch.bfloat16
        assert (leaf.grad.double() - reference.grad).norm() < 1e-2 * reference.grad.norm()
        bias = (leaf.grad.double() * reference.grad).sum() / reference.grad.square().sum() - 1
        assert abs(float(bias)) < 1e-3, "all gradients are too large or too small by one factor"
