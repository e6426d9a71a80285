"""Laid-down routing: flat where it should be flat, as skewed as stated, the router's own gradient."""

import pytest
import torch

from equipoise.errors import ConfigError
from equipoise.moe.router import Router, RouterConfig
from equipoise.moe.synthetic import SyntheticRouting

SIZES = [(2, 8, 2), (4, 8, 3), (3, 9, 2), (8, 64, 8), (1, 5, 1)]


def group_ids(P: int, E: int, K: int, T: int, **changes) -> list[torch.Tensor]:
    return [SyntheticRouting(E, K, P, rank, **changes).ids(T, torch.device("cpu")) for rank in range(P)]


@pytest.mark.parametrize("T", [0, 1, 3, 7, 100])
@pytest.mark.parametrize(("P", "E", "K"), SIZES)
def test_even_routing_is_flat_for_ranks_and_experts(P: int, E: int, K: int, T: int) -> None:
    """notes on other systems: "forced balance" must not idle ranks when tokens are few."""
    ids = group_ids(P, E, K, T)
    for ids_TK in ids:
        assert ids_TK.shape == (T, K)
        assert all(len(set(row)) == K for row in ids_TK.tolist())
        per_rank = torch.bincount(ids_TK.flatten() // (E // P), minlength=P)
        assert int(per_rank.max() - per_rank.min()) <= 1
    counts = torch.bincount(torch.cat(ids).flatten(), minlength=E)
    assert int(counts.max() - counts.min()) <= 1
    ranks = counts.view(P, -1).sum(1)
    assert int(ranks.max() - ranks.min()) <= 1


@pytest.mark.parametrize("hot_rank", [0, 1])
@pytest.mark.parametrize("imbalance", [1.0, 1.2, 1.8, 2.0, 3.5])
@pytest.mark.parametrize(("P", "E", "K"), [(2, 8, 2), (4, 32, 4), (8, 64, 8)])
def test_ranks_are_as_uneven_as_stated(P: int, E: int, K: int, imbalance: float, hot_rank: int) -> None:
    if imbalance > P:
        pytest.skip("more than one rank can have")
    ids = torch.cat(group_ids(P, E, K, 1000, imbalance=imbalance, hot_rank=hot_rank))
    assert all(len(set(row)) == K for row in ids.tolist())
    load = torch.bincount(ids.flatten() // (E // P), minlength=P).double()
    assert float(load.max() / load.mean()) == pytest.approx(imbalance, abs=5e-3)
    if imbalance > 1:
        assert int(load.argmax()) == hot_rank


def test_a_moving_hot_rank_comes_round() -> None:
    routing = SyntheticRouting(8, 2, 4, imbalance=2.0)
    assert [routing.moved(step).hot_rank for step in range(5)] == [0, 1, 2, 3, 0]


@pytest.mark.parametrize("imbalance", [0.5, 4.5])
def test_impossible_imbalance_is_refused_with_the_range(imbalance: float) -> None:
    with pytest.raises(ConfigError, match="can be 1 to 4"):
        SyntheticRouting(16, 2, 4, imbalance=imbalance)


def make_router() -> Router:
    router = Router(RouterConfig(hidden_size=6, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True))
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    router.synthetic = SyntheticRouting(8, 2, 2)
    return router


def test_only_the_choice_is_replaced_and_the_gradient_is_the_routers() -> None:
    router, x_TD = make_router(), torch.randn(9, 6, generator=torch.Generator().manual_seed(1))
    valid_T = torch.arange(9) < 7
    routing = router(x_TD, valid_T)
    assert sorted(routing.ids_TK[0].tolist()) == sorted(router.synthetic.ids(9, x_TD.device)[0].tolist())
    assert (routing.ids_TK[7:] == -1).all()
    assert int(routing.counts_E.sum()) == 14
    scores_TE = (x_TD @ router.weight.T).softmax(-1)
    expected = scores_TE.gather(1, routing.ids_TK.long().clamp(min=0))
    expected = expected / expected.sum(-1, keepdim=True)
    torch.testing.assert_close(routing.weights_TK, expected)
    (gradient,) = torch.autograd.grad(routing.weights_TK[:7, 0].sum(), router.weight)
    (want,) = torch.autograd.grad(expected[:7, 0].sum(), router.weight)
    torch.testing.assert_close(gradient, want)


def test_compiles_into_one_graph() -> None:
    router, x_TD = make_router(), torch.randn(9, 6)
    compiled = torch.compile(router, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x_TD).weights_TK, router(x_TD).weights_TK)
    assert torch.equal(compiled(x_TD).counts_E, router(x_TD).counts_E)
