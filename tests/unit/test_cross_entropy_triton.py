"""The loss's kernel, which replaces logits by their gradient, against FP64; tests of the whole loss are elsewhere."""

import pytest
import torch

from equipoise.models.cross_entropy import IGNORED_LABEL

pytest.importorskip("triton")
from equipoise.kernels import cross_entropy_triton
from equipoise.kernels.cross_entropy_triton import loss_and_gradient

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if torch.cuda.is_available() else [torch.float32]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["random", "large", "one infinite"])
@pytest.mark.parametrize(("T", "V"), [(0, 5), (1, 1), (3, 7), (5, 64), (4, 1000), (3, 200)])
def test_loss_and_gradient_equal_fp64(monkeypatch, T: int, V: int, kind: str, dtype: torch.dtype) -> None:
    monkeypatch.setattr(cross_entropy_triton, "BLOCK", 64)  # several blocks in a row, the last one not full
    generator = torch.Generator().manual_seed(V)
    logits = (torch.randn(T, V, generator=generator) * (100 if kind == "large" else 3)).to(DEVICE, dtype)
    labels = torch.randint(0, V, (T,), generator=generator).to(DEVICE)
    if T > 2:
        labels[1] = IGNORED_LABEL
        labels[2] = V - 1
        if kind == "one infinite":
            logits[0, (int(labels[0]) + 1) % V] = float("-inf")
    exact = logits.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(exact, labels, ignore_index=IGNORED_LABEL, reduction="none")
    expected.sum().backward()
    loss = loss_and_gradient(logits, labels, IGNORED_LABEL)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=1e-5, atol=1e-5)
    tolerance = 1e-5 if dtype == torch.float32 else 4e-3
    torch.testing.assert_close(logits.double(), exact.grad, rtol=tolerance, atol=tolerance / 10)


def test_a_nan_reaches_the_loss() -> None:
    logits = torch.randn(2, 9).to(DEVICE)
    logits[1, 4] = float("nan")
    loss = loss_and_gradient(logits, torch.tensor([3, 3]).to(DEVICE), IGNORED_LABEL)
    assert loss.isnan().tolist() == [False, True]
    assert logits.isnan().all(1).tolist() == [False, True]


def test_logits_with_gaps_are_refused() -> None:
    with pytest.raises(ValueError, match="contiguous"):
        loss_and_gradient(torch.randn(2, 8).to(DEVICE)[:, :4], torch.tensor([0, 1]).to(DEVICE), IGNORED_LABEL)


def test_operator_is_registered_whole() -> None:
    arguments = torch.randn(2, 5).to(DEVICE), torch.tensor([1, IGNORED_LABEL]).to(DEVICE), IGNORED_LABEL
    torch.library.opcheck(torch.ops.equipoise.loss_and_gradient.default, arguments)
