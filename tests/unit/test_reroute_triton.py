"""The counting sort and the reroute in Triton against their plain forms: equal bits, on awkward sizes."""

import pytest
import torch

from equipoise.kernels.permute import Permutation, plain_permutation
from equipoise.kernels.reroute import plain_reroute

pytest.importorskip("triton")
from equipoise.kernels import reroute_triton
from equipoise.kernels.reroute_triton import triton_permutation, triton_reroute

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_ids(T: int, K: int, num_experts: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(T * 31 + K)
    ids = torch.randint(num_experts, (T, K), generator=generator, dtype=torch.int32)
    if kind == "one":
        ids.fill_(num_experts - 1)
    elif kind == "dropped":
        ids[torch.rand(T, K, generator=generator) < 0.4] = -1
    elif kind == "none":
        ids.fill_(-1)
    elif kind == "hot":
        ids[torch.rand(T, K, generator=generator) < 0.6] = 1 % num_experts
    return ids.to(DEVICE)


def random_plan(ids: torch.Tensor, E: int, P: int, R: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots with random foreign experts (some free) and a random cut of this rank's tokens over the instances."""
    generator = torch.Generator().manual_seed(E + P + R)
    M = E // P
    slots = torch.full((P, R), -1, dtype=torch.int32)
    for owner in range(P):
        foreign = [e for e in torch.randperm(E, generator=generator).tolist() if e // M != owner]
        for slot, expert in enumerate(foreign[:R]):
            if torch.rand((), generator=generator) < 0.8:
                slots[owner, slot] = expert
    send = torch.zeros(P, M + R, dtype=torch.int32)
    for expert in range(E):
        places = [(expert // M, expert % M)] + [(o, M + s) for o, s in (slots == expert).nonzero().tolist()]
        count = int((ids == expert).sum())
        cuts = torch.randint(count + 1, (len(places) - 1,), generator=generator).sort().values.tolist()
        for place, first, last in zip(places, [0, *cuts], [*cuts, count]):
            send[place] = last - first
    return slots.flatten().to(DEVICE), send.flatten().to(DEVICE)


def assert_equal(got: Permutation, expected: Permutation, ids: torch.Tensor) -> None:
    assert got.valid_TK is not None
    assert torch.equal(got.valid_TK, ids >= 0)
    for name in ("slot_R", "row_TK", "counts_E"):
        assert getattr(got, name).dtype == torch.int32
        assert torch.equal(getattr(got, name).long(), getattr(expected, name)), name


@pytest.mark.parametrize("kind", ["random", "one", "dropped", "none", "hot"])
@pytest.mark.parametrize(("T", "K", "E"), [(0, 2, 4), (1, 1, 1), (7, 3, 5), (300, 2, 20), (260, 4, 33)])
def test_permutation_equals_the_sort(T: int, K: int, E: int, kind: str) -> None:
    ids = random_ids(T, K, E, kind)
    assert_equal(triton_permutation(ids, E), plain_permutation(ids, E), ids)


def test_many_blocks_are_scanned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reroute_triton, "MOST_UNSCANNED_COUNTS", 1)
    ids = random_ids(601, 3, 6, "dropped")
    assert_equal(triton_permutation(ids, 6), plain_permutation(ids, 6), ids)
    plan = random_plan(ids, 6, 3, 2, 1)
    physical = plain_reroute(ids, *plan, 6, 3, 1)
    got, permutation = triton_reroute(ids, *plan, 6, 3, 1)
    assert torch.equal(got, physical)
    assert_equal(permutation, plain_permutation(physical, 12), physical)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", ["random", "one", "dropped", "none", "hot"])
@pytest.mark.parametrize(
    ("T", "K", "E", "P", "R", "rank"),
    [
        (0, 2, 4, 2, 1, 0),
        (1, 1, 2, 2, 1, 1),
        (7, 3, 6, 3, 0, 0),
        (9, 2, 6, 3, 2, 1),
        (300, 3, 20, 5, 3, 4),
        (5, 1, 3, 1, 2, 0),
    ],
)
def test_reroute_equals_the_plain_form(
    T: int, K: int, E: int, P: int, R: int, rank: int, kind: str, dtype: torch.dtype
) -> None:
    ids = random_ids(T, K, E, kind).to(dtype)
    plan = random_plan(ids, E, P, R, rank)
    physical = plain_reroute(ids, *plan, E, P, rank)
    got, permutation = triton_reroute(ids, *plan, E, P, rank)
    assert got.dtype == dtype
    assert torch.equal(got, physical)
    assert_equal(permutation, plain_permutation(physical, plan[1].numel()), physical)


def test_ids_that_the_plan_does_not_know_stay_in_range() -> None:
    ids = random_ids(50, 2, 6, "random")
    slots, send = random_plan(ids, 6, 3, 1, 0)
    got, permutation = triton_reroute(torch.zeros_like(ids), slots, send, 6, 3, 0)
    assert 0 <= int(got.min()) <= int(got.max()) < 9
    assert 0 <= int(permutation.row_TK.min()) <= int(permutation.row_TK.max()) < 100
