"""Load statistics from counts, on sizes that are easy to get wrong."""

import pytest
import torch

from equipoise.balance import Balancer, LoadRecord, Placement
from equipoise.balance.runtime import _UnreadRecord
from equipoise.errors import ConfigError
from equipoise.train.balance_statistics import (
    BalanceResult,
    balance_metrics,
    sum_device_records,
    sum_records,
)
from equipoise.train.load_statistics import (
    dead_experts,
    expert_maxvio,
    load_metrics,
    rank_imbalance,
    spread_over_layers,
)

CASES = {  # counts, ep_size: maxvio, imbalance, dead
    "even": ([2, 2, 2, 2], 2, 0.0, 1.0, 0),
    "all on one": ([8, 0, 0, 0], 2, 3.0, 2.0, 3),
    "all on one, EP = E": ([8, 0, 0, 0], 4, 3.0, 4.0, 3),
    "uneven experts, even ranks": ([3, 1, 1, 3], 2, 0.5, 1.0, 0),
    "uneven ranks": ([3, 3, 1, 1], 2, 0.5, 1.5, 0),
    "no tokens": ([0, 0, 0, 0], 2, 0.0, 1.0, 4),
    "one expert": ([5], 1, 0.0, 1.0, 0),
    "EP 1": ([9, 0, 0], 1, 2.0, 1.0, 2),
    "3 ranks": ([1, 2, 3, 0, 0, 0], 3, 2.0, 1.5, 3),
}


@pytest.mark.parametrize(("counts", "ep_size", "maxvio", "imbalance", "dead"), CASES.values(), ids=CASES)
def test_values(counts: list[int], ep_size: int, maxvio: float, imbalance: float, dead: int) -> None:
    counts_E = torch.tensor(counts, dtype=torch.int32)
    assert float(expert_maxvio(counts_E)) == maxvio
    assert float(rank_imbalance(counts_E, ep_size)) == imbalance
    assert int(dead_experts(counts_E)) == dead


def test_leading_dimensions_are_independent() -> None:
    counts = torch.randint(0, 3, (2, 3, 6))
    for i in range(2):
        for j in range(3):
            assert expert_maxvio(counts)[i, j] == expert_maxvio(counts[i, j])
            assert rank_imbalance(counts, 3)[i, j] == rank_imbalance(counts[i, j], 3)
            assert dead_experts(counts)[i, j] == dead_experts(counts[i, j])


def test_large_counts_do_not_overflow() -> None:
    assert float(rank_imbalance(torch.full((4,), 2**31 - 1, dtype=torch.int32), 2)) == 1.0


def test_experts_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"6 experts .* ep_size=4"):
        rank_imbalance(torch.ones(6), 4)


@pytest.mark.parametrize(
    ("values", "p50", "p95", "most"),
    [([1.0], 1, 1, 1), ([1.0, 3.0], 2, 2.9, 3), (list(range(101)), 50, 95, 100)],
)
def test_spread_over_layers(values: list[float], p50: float, p95: float, most: float) -> None:
    spread = spread_over_layers(torch.tensor(values))
    assert (spread["p50"], spread["p95"], spread["max"]) == pytest.approx((p50, p95, most))


def test_imbalance_is_of_microbatches_while_dead_and_maxvio_are_of_the_step() -> None:
    # Each of two microbatches loads one rank only, alternating; summed over the step all is even.
    metrics = load_metrics(torch.tensor([[4, 4, 4, 4]]), torch.tensor([2.0]), 2.0)
    assert metrics["rank_imbalance"] == metrics["rank_imbalance_max"] == 2.0
    assert metrics["expert_maxvio"] == 0.0
    assert metrics["dead_experts"] == 0
    assert metrics["layers"] == {"rank_imbalance": [2.0], "expert_maxvio": [0.0], "dead_experts": [0]}


@pytest.mark.parametrize("second", [[100, 200], [200, 100]])
def test_layers_are_averaged_after_their_ranks_are_compared(second: list[int]) -> None:
    """Loads of 100 and 200 in both layers are 1.333 over the mean (0.75 the other way round), whoever has the more."""
    counts_LE = torch.tensor([[100, 200], second])
    metrics = load_metrics(counts_LE, rank_imbalance(counts_LE, ep_size=2), 4 / 3)
    assert metrics["rank_imbalance"] == pytest.approx(4 / 3)
    assert 1 / metrics["rank_imbalance"] == pytest.approx(0.75)


def test_what_balancing_delivered_is_summarised_over_layers() -> None:
    """Two microbatches of three layers, in an EP group that is a quarter of the world."""
    loads = [(0, 1.0), (1, 1.2), (2, 2.0), (0, 1.1), (1, 1.0), (2, 1.8)]
    records = [LoadRecord((layer, 0), 2.5, after, 3, 100, 0.5) for layer, after in loads]
    after_L, totals, worst = sum_records(records, waited_s=2.0, world_size=4)
    assert (4 * after_L).tolist() == pytest.approx([1.05, 1.1, 1.9])
    metrics = balance_metrics(BalanceResult(4 * after_L, worst, *(4 * totals).tolist()))
    assert metrics["rank_imbalance_after"] == pytest.approx(1.35)
    assert metrics["rank_imbalance_after_p50"] == pytest.approx(1.1)
    assert metrics["rank_imbalance_after_p95"] == pytest.approx(1.82)
    assert metrics["rank_imbalance_after_max"] == 2.0
    assert metrics["balance_sync_s"] == 2.0
    assert (metrics["balance_copies"], metrics["balance_bytes"], metrics["balance_plan_s"]) == (18, 600, 3.0)


@pytest.mark.parametrize(
    "layers", [[0, 1, 2, 0, 1, 2], [3], [0, 0, 0, 1, 1, 1], [2, 0, 1, 2, 0, 1], [0, 1, 0]], ids=str
)
def test_sums_on_the_device_are_those_of_the_host(layers: list[int]) -> None:
    """Plans of two ranks with two masters and one slot each, one of them without tokens."""
    balancer = Balancer(None, 4, {"w": (5, 2)}, torch.bfloat16)
    balancer.num_ranks, balancer.num_masters, balancer.num_slots = 2, 2, 1
    assert balancer.take_device_records() is None
    generator = torch.Generator().manual_seed(len(layers))
    for number, layer in enumerate(layers):
        quota = torch.randint(0, 9, (6,), generator=generator, dtype=torch.int32) * (number != 1)
        load_E = torch.stack([quota[0] + quota[5], quota[1], quota[2], quota[3] + quota[4]])
        placement = Placement(torch.tensor([3, -1 if number else 0], dtype=torch.int32), quota, 2, 4)
        balancer._records.append(_UnreadRecord((layer, 0), load_E, placement))
    kept = list(balancer._records)
    on_device = balancer.take_device_records()
    assert on_device is not None
    assert balancer.take_records() == []
    balancer._records.extend(kept)
    wanted = sum_records(balancer.take_records(), 2.0, 4)
    found = sum_device_records(on_device, 2.0, 4)
    for ours, theirs in zip(found[:2], wanted[:2]):
        torch.testing.assert_close(ours, theirs, rtol=1e-15, atol=0)
    assert float(found[2]) == wanted[2]
    assert float(wanted[1][0]) * 4 == len(layers) + 1, "copies"


def test_summary_over_layers() -> None:
    counts_LE = torch.tensor([[2, 2, 2, 2], [8, 0, 0, 0]])
    metrics = load_metrics(counts_LE, rank_imbalance(counts_LE, ep_size=2), 3.5)
    assert metrics["rank_imbalance"] == metrics["rank_imbalance_p50"] == 1.5
    assert metrics["rank_imbalance_p95"] == pytest.approx(1.95)
    assert metrics["rank_imbalance_max"] == 3.5
    assert metrics["expert_maxvio"] == 1.5
    assert metrics["dead_experts"] == 3
    assert metrics["layers"] == {"rank_imbalance": [1, 2], "expert_maxvio": [0, 3], "dead_experts": [0, 3]}


def test_a_model_without_moe_layers_has_no_load() -> None:
    assert load_metrics(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0), 1.0) == {}
