"""However a training is spread over ranks, it is the same training: loss, every gradient, norm, parameters."""

from itertools import product

import pytest

from distributed.harness import run_ranks
from distributed.parity import Case, compare_on_this_rank, toy_model

DISPATCHERS = ["all_to_all", "all_gather"]


def check(cases: list[Case], world_size: int) -> None:
    on_cpu = {"EQUIPOISE_ACCELERATOR": "cpu"}
    for results in run_ranks(compare_on_this_rank, world_size, cases, deadline_s=240, env=on_cpu):
        for case, differing in results:
            assert not differing, f"{case} differs: {differing}"


def combinations(layouts: list[tuple[int, int]], recomputes: list[str], accumulates: list[int]) -> list[Case]:
    return [
        Case(toy_model(), ep, replicate, dispatcher, recompute, accumulate)
        for (ep, replicate), recompute, accumulate in product(layouts, recomputes, accumulates)
        for dispatcher in (DISPATCHERS if ep > 1 else ["local"])
    ]


def test_one_rank() -> None:
    check(combinations([(1, 1)], ["none", "full", "selective"], [1, 2]), 1)


def test_one_rank_recomputes_layers_of_every_kind() -> None:
    """With and without shared experts and dense layers: FSDP's hooks inside a layer differ, the training does not."""
    models = [toy_model(n_shared_experts=shared, mlp_only_layers=dense) for shared in (0, 1) for dense in ((), (2,))]
    check([Case(m, recompute=r) for m in models for r in ("full", "selective")], 1)


# Each layout in fresh processes: DTensor caches meshes by equality, and a mesh of an earlier world has other groups.
@pytest.mark.parametrize("layout", [(2, 1), (1, 1)], ids="ep{0[0]}-replicate{0[1]}".format)
def test_two_ranks(layout: tuple[int, int]) -> None:
    check(combinations([layout], ["none", "full"], [1, 2]), 2)


SLOW_LAYOUTS = [pytest.param(layout, marks=pytest.mark.slow) for layout in [(2, 2), (4, 1), (2, 1), (1, 1), (1, 2)]]


@pytest.mark.parametrize("layout", SLOW_LAYOUTS, ids="ep{0[0]}-replicate{0[1]}".format)
def test_four_ranks(layout: tuple[int, int]) -> None:
    """EP over all ranks, EP with FSDP, FSDP alone, HSDP with and without EP."""
    check(combinations([layout], ["none", "full"], [1, 2]), 4)


AWKWARD = {
    "one token": {"lengths": (1,)},
    "3 and 7 tokens": {"lengths": (3, 7)},
    "unequal": {"lengths": (1, 3, 7, 12)},
    "all on one expert": {"selection_bias": 100.0, "k": 1},
    "idle ranks": {"selection_bias": 100.0, "k": 1, "lengths": (1, 3)},
    "tied embeddings": {"tie_word_embeddings": True},
    "uneven shards": {"num_experts": 6},
}


def awkward_case(ep: int, dispatcher: str, k: int = 3, num_experts: int = 8, tie_word_embeddings: bool = False, **rest):
    model = toy_model(
        num_experts=num_experts,
        num_experts_per_tok=k,
        selection_bias=True,
        bias_update_speed=0.0,
        tie_word_embeddings=tie_word_embeddings,
    )
    return Case(model, ep, 1, dispatcher, **rest)


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_awkward_inputs(world_size: int) -> None:
    """A rank whose experts get nothing, 1, 3 and 7 tokens, everything on one expert, shards that do not divide."""
    check([awkward_case(2, d, **case) for d in DISPATCHERS for case in AWKWARD.values()], world_size)
