"""Expert selection: exact counts, and one tie rule on every device (the lower id wins)."""

import pytest
import torch

from equipoise.kernels.select_experts import keep_best_groups, select_experts, stable_topk


def slow_topk(scores: list[float], k: int) -> list[int]:
    return sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:k]


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 100])
@pytest.mark.parametrize("k", [1, 3, 8])
def test_topk_equals_a_stable_sort(num_tokens: int, k: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    scores = torch.randint(-3, 4, (num_tokens, 8), generator=generator).float()  # many ties, both signs
    expected = [slow_topk(row, k) for row in scores.tolist()]
    assert stable_topk(scores, k).tolist() == expected


def test_equal_logits_select_the_lowest_ids() -> None:
    ids, counts = select_experts(torch.zeros(3, 256), None, None, 8, 1, 1)
    assert ids.tolist() == [list(range(8))] * 3
    assert counts.tolist() == [3] * 8 + [0] * 248


def test_negative_zero_ties_with_zero() -> None:
    assert stable_topk(torch.tensor([[-0.0, 0.0, -1.0]]), 2).tolist() == [[0, 1]]


def test_nan_scores_give_ids_in_range() -> None:
    ids, _ = select_experts(torch.full((4, 6), float("nan")), None, None, 2, 1, 1)
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 6


@pytest.mark.parametrize("valid", [[], [True], [False], [True, False, True], [False] * 5])
def test_padding_selects_nothing_and_counts_nowhere(valid: list[bool]) -> None:
    scores = torch.randn(len(valid), 6, generator=torch.Generator().manual_seed(0))
    mask = torch.tensor(valid, dtype=torch.bool)
    ids, counts = select_experts(scores, None, mask, 2, 1, 1)
    assert (ids[~mask] == -1).all()
    assert (ids[mask] >= 0).all()
    assert int(counts.sum()) == 2 * sum(valid)


def test_bias_takes_part_in_the_choice_only() -> None:
    ids, _ = select_experts(torch.tensor([[0.9, 0.1, 0.2]]), torch.tensor([0.0, 5.0, 0.0]), None, 1, 1, 1)
    assert ids.tolist() == [[1]]


def test_rejected_groups_lose_to_negative_scores() -> None:
    """cases.md C04: with negative biases a rejected expert's masked score must not be the largest."""
    scores = torch.tensor([[0.6, 0.5, 0.1, 0.1]])
    ids, _ = select_experts(scores, torch.full((4,), -1.0), None, 2, 2, 1)
    assert ids.tolist() == [[0, 1]]


def test_equal_groups_keep_the_lowest() -> None:
    kept = keep_best_groups(torch.zeros(1, 6), 3, 2)
    assert torch.isfinite(kept).tolist() == [[True, True, True, True, False, False]]


def test_fine_fp32_biases_select_like_the_reference() -> None:
    """cases.md C03 (a): 256 biases between 6.817 and 7.063 are distinct in FP32 and almost all equal in BF16."""
    bias = torch.linspace(6.817, 7.063, 256)
    scores = torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) * 1e-3
    ids, _ = select_experts(scores, bias, None, 8, 1, 1)
    expected = [slow_topk(row, 8) for row in (scores + bias).tolist()]
    assert ids.tolist() == expected
    rounded, _ = select_experts(scores, bias.bfloat16().float(), None, 8, 1, 1)
    assert rounded.tolist() != expected  # the case can fail


def test_fake_matches_real_and_compiles_whole() -> None:
    def fn(scores):
        return select_experts(scores, None, None, 2, 1, 1)

    scores = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    compiled = torch.compile(fn, fullgraph=True, backend="aot_eager")
    for a, b in zip(fn(scores), compiled(scores)):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype
