"""Laid-down routing: flat where it should be flat, as skewed as stated, the router's own gradient."""

import pytest
import torch

from equipoise.errors import ConfigError
from equipoise.moe.router import Router, RouterConfig
from equipoise.moe.synthetic import WORKLOADS, SyntheticRouting, Workload

SIZES = [(2, 8, 2), (4, 8, 3), (3, 9, 2), (8, 64, 8), (1, 5, 1)]
CPU = torch.device("cpu")


def group_ids(P: int, E: int, K: int, T: int, name: str, imbalance: float = 1.5, step: int = 0) -> list[torch.Tensor]:
    workload = Workload(name, imbalance, E, K, P)
    return [workload.routing(step, rank).ids(T, CPU) for rank in range(P)]


def rank_loads(ids: list[torch.Tensor], P: int, E: int) -> torch.Tensor:
    return torch.bincount(torch.cat(ids).flatten() // (E // P), minlength=P).double()


@pytest.mark.parametrize("T", [0, 1, 3, 7, 100])
@pytest.mark.parametrize(("P", "E", "K"), SIZES)
def test_even_routing_is_flat_for_ranks_and_experts(P: int, E: int, K: int, T: int) -> None:
    """notes on other systems: "forced balance" must not idle ranks when tokens are few."""
    ids = group_ids(P, E, K, T, "balanced")
    for ids_TK in ids:
        assert ids_TK.shape == (T, K)
        assert all(len(set(row)) == K for row in ids_TK.tolist())
        per_rank = torch.bincount(ids_TK.flatten() // (E // P), minlength=P)
        assert int(per_rank.max() - per_rank.min()) <= 1
    counts = torch.bincount(torch.cat(ids).flatten(), minlength=E)
    assert int(counts.max() - counts.min()) <= 1
    ranks = counts.view(P, -1).sum(1)
    assert int(ranks.max() - ranks.min()) <= 1


@pytest.mark.parametrize("name", ["hot_rank", "rotating", "spread", "ragged_sources"])
@pytest.mark.parametrize("imbalance", [1.0, 1.2, 1.8, 2.0, 3.5])
@pytest.mark.parametrize(("P", "E", "K"), [(2, 8, 2), (4, 32, 4), (8, 64, 8)])
def test_ranks_are_as_uneven_as_stated(P: int, E: int, K: int, imbalance: float, name: str) -> None:
    if imbalance > P:
        pytest.skip("more than one rank can have")
    ids = group_ids(P, E, K, 1000, name, imbalance)
    assert all(len(set(row)) == K for ids_TK in ids for row in ids_TK.tolist())
    load = rank_loads(ids, P, E)
    assert float(load.max() / load.mean()) == pytest.approx(imbalance, abs=5e-3)
    if imbalance > 1:
        assert int(load.argmax()) == 0


@pytest.mark.parametrize(("P", "E", "K", "hottest"), [(2, 8, 2, 1.14), (4, 32, 4, 1.5), (8, 64, 8, 1.5), (8, 32, 1, 4)])
def test_hot_experts_are_few_and_on_ranks_apart(P: int, E: int, K: int, hottest: float) -> None:
    ids = group_ids(P, E, K, 1000, "hot_experts", hottest)
    counts = torch.bincount(torch.cat(ids).flatten(), minlength=E).double()
    hot = max(1, P // 4)
    found = counts.topk(hot).indices // (E // P)
    assert len(set(found.tolist())) == hot
    others = counts.sort().values[:-hot]
    assert float(others.max() - others.min()) <= P
    load = counts.view(P, -1).sum(1)
    assert float(load.max() / load.mean()) == pytest.approx(hottest, abs=5e-3)


@pytest.mark.parametrize(("P", "imbalance", "active"), [(2, 1.5, 1), (4, 2.0, 2), (8, 1.5, 5), (4, 4.0, 1)])
def test_zero_load_ranks_get_nothing(P: int, imbalance: float, active: int) -> None:
    load = rank_loads(group_ids(P, 8 * P, 4, 100, "zero_load_ranks", imbalance), P, 8 * P)
    assert int((load > 0).sum()) == active
    assert float(load.max() - load[:active].min()) <= P


def test_ragged_sources_have_unequal_numbers_of_tokens() -> None:
    assert [len(ids) for ids in group_ids(4, 16, 2, 100, "ragged_sources")] == [100, 75, 50, 25]


def test_a_rotating_hot_rank_comes_round_and_a_burst_passes() -> None:
    hottest = [int(rank_loads(group_ids(4, 8, 2, 40, "rotating", 2.0, step), 4, 8).argmax()) for step in range(5)]
    assert hottest == [0, 1, 2, 3, 0]
    loads = [rank_loads(group_ids(4, 8, 2, 40, "burst", 2.0, step), 4, 8) for step in range(5)]
    assert [float(load.max() / load.mean()) for load in loads] == [2.0, 1.0, 1.0, 1.0, 2.0]


@pytest.mark.parametrize("imbalance", [0.5, 4.5])
def test_impossible_imbalance_is_refused_with_the_range(imbalance: float) -> None:
    with pytest.raises(ConfigError, match="can have 1 to 4"):
        Workload("hot_rank", imbalance, 16, 2, 4)


def test_an_expert_can_have_no_more_than_every_token() -> None:
    with pytest.raises(ConfigError, match=r"can have 1 to 1\.429"):
        Workload("hot_experts", 1.5, 8, 2, 2)


def test_an_unknown_workload_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="hot_experts"):
        Workload("hot", 1.5, 8, 2, 2)


@pytest.mark.parametrize("name", WORKLOADS)
def test_one_rank_is_even_whatever_the_workload(name: str) -> None:
    assert len(set(Workload(name, 1.0, 6, 2, 1).shares())) == 1


def make_router(routing: SyntheticRouting) -> Router:
    router = Router(RouterConfig(hidden_size=6, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    router.synthetic = routing
    return router


def test_only_the_choice_is_replaced_and_the_gradient_is_the_routers() -> None:
    routing = Workload("ragged_sources", 1.5, 8, 2, 4).routing(rank=1)
    router, x_TD = make_router(routing), torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    valid_T = torch.arange(12) < 7
    chosen = router(x_TD, valid_T)
    assert sorted(chosen.ids_TK[0].tolist()) == sorted(routing.ids(12, CPU)[0].tolist())
    assert (chosen.ids_TK[7:] == -1).all()
    assert int(chosen.counts_E.sum()) == 14
    assert int(router(x_TD).counts_E.sum()) == 18  # nine of twelve tokens take part
    scores_TE = (x_TD @ router.weight.T).softmax(-1)
    expected = scores_TE.gather(1, chosen.ids_TK.long().clamp(min=0))
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(chosen.weights_TK, expected)
    (gradient,) = torch.autograd.grad(chosen.weights_TK[:7, 0].sum(), router.weight)
    (want,) = torch.autograd.grad(expected[:7, 0].sum(), router.weight)
    torch.testing.assert_close(gradient, want)


def test_compiles_into_one_graph() -> None:
    router, x_TD = make_router(Workload("ragged_sources", 1.5, 8, 2, 2).routing(rank=1)), torch.randn(9, 6)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x_TD).weights_TK, router(x_TD).weights_TK)
    assert torch.equal(compiled(x_TD).counts_E, router(x_TD).counts_E)
