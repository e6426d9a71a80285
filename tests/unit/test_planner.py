"""The planner: all forms agree bit for bit, and every invariant of a plan holds for every load."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_planner import slow_bound, slow_plan

from equipoise.balance import ExactLoadPlanner, Placement, PlannerSettings, check_placement, plan_loads
from equipoise.balance.bounds import lower_bound
from equipoise.balance.cost import advise_slots, break_even_imbalance, tokens_per_copy
from equipoise.balance.plan import placement_from_copies
from equipoise.balance.planner_host import plan_load
from equipoise.balance.planner_numba import plan_batch
from equipoise.balance.quality import Size, synthetic_loads
from equipoise.errors import ConfigError, PlanError
from equipoise.moe.synthetic import Workload

COUNTS = st.one_of(st.just(0), st.integers(0, 3), st.integers(0, 200), st.sampled_from([1000, 1001, 4000]))


@st.composite
def problems(draw, max_ranks: int = 7, counts=COUNTS):
    """(load, number of ranks, settings) over awkward sizes and every setting."""
    num_ranks = draw(st.integers(1, max_ranks))
    num_masters = draw(st.integers(1, 4))
    load = draw(st.lists(counts, min_size=num_ranks * num_masters, max_size=num_ranks * num_masters))
    chosen = PlannerSettings(
        num_slots=draw(st.integers(0, num_masters + 1)),
        tolerance=draw(st.sampled_from([0.0, 0.01, 0.25])),
        min_tokens=draw(st.sampled_from([1, 1, 7, 100])),
        domain_size=draw(st.sampled_from([0, 0, *(d for d in range(1, num_ranks + 1) if num_ranks % d == 0)])),
        copy_tokens=draw(st.sampled_from([0, 0, 5, 300])),
    )
    return load, num_ranks, chosen


def equal(one: Placement, other: Placement) -> bool:
    return torch.equal(one.slot_expert, other.slot_expert) and torch.equal(one.quota, other.quota)


@settings(max_examples=50, deadline=None)
@given(problems(max_ranks=5))
def test_lists_and_tensors_agree_with_the_slow_planner(problem) -> None:
    load, num_ranks, chosen = problem
    copies = slow_plan(load, num_ranks, chosen)
    expected = placement_from_copies(
        load, num_ranks, chosen.num_slots, [(e, rank, tokens) for (e, rank), tokens in copies.items()]
    )
    assert equal(plan_load(torch.tensor(load), num_ranks, chosen), expected)
    assert equal(plan_loads(torch.tensor([load]), num_ranks, chosen)[0], expected)


@pytest.mark.parametrize(("copy_tokens", "min_tokens"), [(0, 1), (40, 3), (200, 50)])
@pytest.mark.parametrize(("num_ranks", "num_masters"), [(4, 3), (8, 8), (6, 7)])
def test_lists_and_tensors_agree_on_likely_loads(
    num_ranks: int, num_masters: int, copy_tokens: int, min_tokens: int
) -> None:
    size = Size(num_ranks, num_ranks * num_masters, 2, tokens=512)
    load_BE = torch.stack([load_PE.sum(0) for _, load_PE in synthetic_loads(size, 9, np.random.default_rng(7))])
    for slots in {1, 2, num_masters}:
        chosen = PlannerSettings(slots, tolerance=0.0, min_tokens=min_tokens, copy_tokens=copy_tokens)
        placements = plan_loads(load_BE, num_ranks, chosen)
        for number, load_E in enumerate(load_BE):
            assert equal(placements[number], plan_load(load_E, num_ranks, chosen))


@settings(max_examples=300, deadline=None)
@given(problems(max_ranks=9))
def test_the_compiled_form_agrees_with_lists(problem) -> None:
    load, num_ranks, chosen = problem
    loads = torch.tensor([load, load[::-1], [0] * len(load)])
    placements = plan_batch(loads, num_ranks, chosen, num_threads=1)
    for number, load_E in enumerate(loads):
        assert equal(placements[number], plan_load(load_E, num_ranks, chosen))


@pytest.mark.parametrize(("num_ranks", "num_experts", "copy_tokens"), [(64, 256, 0), (64, 256, 300), (16, 32, 7)])
def test_the_compiled_form_agrees_on_likely_loads(num_ranks: int, num_experts: int, copy_tokens: int) -> None:
    loads = synthetic_loads(Size(num_ranks, num_experts, 8), 12, np.random.default_rng(3))
    load_BE = torch.stack([load_PE.sum(0) for _, load_PE in loads])
    for slots, domain_size in ((1, 0), (2, 8)):
        chosen = PlannerSettings(slots, domain_size=domain_size, copy_tokens=copy_tokens)
        placements = ExactLoadPlanner().plan_batch(load_BE, num_ranks, chosen)
        for number, load_E in enumerate(load_BE):
            assert equal(placements[number], plan_load(load_E, num_ranks, chosen))


def test_the_compiled_form_refuses_what_the_others_refuse() -> None:
    for loads, num_ranks, message in (
        ([[1, -1]], 2, "cannot be negative"),
        ([[2**31 - 1, 1]], 2, "at most"),
        ([[1, 2, 3]], 2, "cannot be split"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan_batch(torch.tensor(loads), num_ranks, PlannerSettings())


@settings(max_examples=15, deadline=None)
@given(problems(max_ranks=4))
def test_without_host_reads_the_search_gives_the_same_plan(problem) -> None:
    load, num_ranks, chosen = problem
    fixed = plan_loads(torch.tensor([load]), num_ranks, chosen, reads_values=False)[0]
    assert equal(fixed, plan_load(torch.tensor(load), num_ranks, chosen))


@settings(max_examples=200, deadline=None)
@given(problems(max_ranks=9))
def test_every_plan_keeps_the_invariants(problem) -> None:
    load, num_ranks, chosen = problem
    load_E = torch.tensor(load)
    placement = plan_load(load_E, num_ranks, chosen)
    check_placement(placement, load_E, chosen.domain_size)
    hosted = placement.quota.view(num_ranks, -1)[:, placement.num_masters :].flatten()
    assert bool((hosted[placement.slot_expert >= 0] >= chosen.min_tokens).all())


@settings(max_examples=80, deadline=None)
@given(problems(max_ranks=9))
def test_as_many_slots_as_masters_reach_the_mean_exactly(problem) -> None:
    load, num_ranks, _ = problem
    full = PlannerSettings(num_slots=len(load) // num_ranks, tolerance=0.0)
    for placement in (
        plan_load(torch.tensor(load), num_ranks, full),
        plan_loads(torch.tensor([load]), num_ranks, full)[0],
    ):
        assert int(placement.rank_load.max()) == -(-sum(load) // num_ranks)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_a_plan_does_not_depend_on_its_batch(data) -> None:
    load, num_ranks, chosen = data.draw(problems(max_ranks=6))
    batch = [load, [0] * len(load), [1] * len(load), load[::-1], sorted(load)]
    placements = plan_loads(torch.tensor(batch), num_ranks, chosen)
    for number, other in enumerate(batch):
        assert equal(placements[number], plan_load(torch.tensor(other), num_ranks, chosen))


@settings(max_examples=100, deadline=None)
@given(problems(max_ranks=6, counts=st.integers(0, 60)))
def test_no_plan_beats_the_lower_bound(problem) -> None:
    load, num_ranks, chosen = problem
    bound = int(lower_bound(torch.tensor([load]), num_ranks, chosen.num_slots))
    assert bound == max(slow_bound(load, num_ranks, chosen.num_slots), -(-sum(load) // num_ranks))
    assert int(plan_load(torch.tensor(load), num_ranks, chosen).rank_load.max()) >= bound


@pytest.mark.parametrize("form", ["lists", "tensors"])
def test_counts_up_to_what_int32_holds(form: str) -> None:
    load_E = torch.tensor([2**31 - 1 - 3, 0, 1, 0, 0, 2, 0, 0])
    full = PlannerSettings(num_slots=2, tolerance=0.0)
    placement = plan_load(load_E, 4, full) if form == "lists" else plan_loads(load_E[None], 4, full)[0]
    check_placement(placement, load_E)
    assert int(placement.rank_load.max()) == 2**29
    load_E[1] = 1
    with pytest.raises(ConfigError, match=r"2147483648 tokens in one load; at most 2147483647"):
        plan_load(load_E, 4, full) if form == "lists" else plan_loads(load_E[None], 4, full)


def test_source_ranks_with_and_without_tokens_are_summed() -> None:
    load_PE = torch.tensor([[90, 0, 0, 0], [0, 0, 0, 0]], dtype=torch.int32)
    placement = ExactLoadPlanner()(load_PE, PlannerSettings(1, tolerance=0.0))
    assert placement.rank_load.tolist() == [45, 45]
    assert placement.slot_expert.tolist() == [-1, 0]


def test_all_tokens_on_one_expert_spread_over_all_ranks() -> None:
    load = [0] * 12
    load[4] = 600
    placement = plan_load(torch.tensor(load), 6, PlannerSettings(1, tolerance=0.0))
    assert placement.rank_load.tolist() == [100] * 6
    assert placement.slot_expert.tolist() == [4, 4, -1, 4, 4, 4]


def test_more_slots_than_experts_to_clone_places_none_twice() -> None:
    """One hot rank whose experts are all cloned already: nothing is left for the other slots."""
    load_E = torch.tensor([500, 500, 0, 0, 0, 0])
    placement = plan_load(load_E, 3, PlannerSettings(num_slots=5, tolerance=0.0))
    check_placement(placement, load_E)
    assert int(placement.rank_load.max()) == 334


@pytest.mark.parametrize(("num_ranks", "num_masters"), [(3, 5), (5, 3), (6, 7), (7, 1), (1, 4), (12, 2)])
def test_sizes_that_are_no_powers_of_two(num_ranks: int, num_masters: int) -> None:
    load_E = torch.arange(num_ranks * num_masters) ** 2
    placement = plan_load(load_E, num_ranks, PlannerSettings(num_slots=num_masters, tolerance=0.0))
    check_placement(placement, load_E)
    assert int(placement.rank_load.max()) == -(-int(load_E.sum()) // num_ranks)


def test_a_wider_tolerance_never_needs_more_copies() -> None:
    torch.manual_seed(0)
    for _ in range(20):
        load_E = (torch.rand(32) ** 3 * 4000).long()
        copies = []
        for tolerance in (0.0, 0.005, 0.01, 0.05, 0.2, 0.5, 5.0):
            placement = plan_load(load_E, 8, PlannerSettings(2, tolerance))
            assert int(placement.rank_load.max()) <= max(
                float(load_E.sum()) / 8 * (1 + tolerance), -(-load_E.sum() // 8)
            )
            copies.append(int(placement.num_copies))
        assert copies == sorted(copies, reverse=True)
        assert copies[-1] == 0


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_the_busiest_rank_stays_flat_while_the_router_drifts_out_of_balance(num_ranks: int) -> None:
    """A hot rank that grows from its share to nearly everything, over the steps of a long run."""
    experts, top_k, tokens = 4 * num_ranks, 4, 512
    for imbalance in torch.linspace(1, 0.95 * num_ranks, 9).tolist():
        workload = Workload("hot_rank", imbalance, experts, top_k, num_ranks)
        load_PE = torch.tensor([workload.routing(rank=rank).expert_counts(tokens) for rank in range(num_ranks)])
        placement = ExactLoadPlanner()(load_PE, PlannerSettings(num_slots=2))
        before = load_PE.sum(0).view(num_ranks, -1).sum(1)
        assert int(before.max()) == pytest.approx(imbalance * tokens * top_k, rel=0.01)
        assert int(placement.rank_load.max()) <= 1.01 * tokens * top_k


def test_replicas_stay_in_their_domain_and_the_floor_is_its_mean() -> None:
    """Two domains of two ranks; all the load is in the first, which can only share it between its own ranks."""
    load_E = torch.tensor([800, 0, 0, 0, 40, 0, 0, 0])
    one = plan_load(load_E, 4, PlannerSettings(1, tolerance=0.0))
    two = plan_load(load_E, 4, PlannerSettings(1, tolerance=0.0, domain_size=2))
    assert one.rank_load.tolist() == [210] * 4
    assert two.rank_load.tolist() == [400, 400, 40, 0]
    assert int(lower_bound(load_E[None], 4, 1, domain_size=2)) == 400
    check_placement(two, load_E, domain_size=2)
    with pytest.raises(PlanError, match="another domain"):
        check_placement(one, load_E, domain_size=2)


@pytest.mark.parametrize(("copy_tokens", "copies"), [(0, 1), (149, 1), (150, 0), (5000, 0)])
def test_no_plan_when_the_copy_costs_what_it_saves(copy_tokens: int, copies: int) -> None:
    """Loads of 400 and 100 become 250 and 250: the busiest rank saves 150 tokens for one copy."""
    load_E = torch.tensor([400, 0, 100, 0])
    placement = plan_load(load_E, 2, PlannerSettings(1, tolerance=0.0, copy_tokens=copy_tokens))
    assert int(placement.num_copies) == copies


@pytest.mark.parametrize("tokens", [0, 1, 16])
def test_small_batches_are_left_alone(tokens: int) -> None:
    """With 16 tokens a rank and top-8, a copy worth 1,000 tokens is never made up for, however uneven the load."""
    load_E = torch.zeros(128, dtype=torch.int64)
    load_E[:8] = 8 * tokens
    placement = plan_load(load_E, 8, PlannerSettings(2, copy_tokens=1000))
    assert int(placement.num_copies) == 0
    assert torch.equal(placement.quota.view(8, 18)[:, :16].flatten(), load_E.int())


def test_copy_time_in_tokens_does_not_depend_on_the_expert() -> None:
    assert tokens_per_copy(600e12, 400e9, syncs=1, training=False) == 1500
    assert tokens_per_copy(600e12, 400e9) == 1000
    assert break_even_imbalance(mean_rank_load=16384, copy_tokens=1000) == pytest.approx(1.061, abs=1e-3)
    with pytest.raises(ConfigError, match="bytes_per_s is 0; expected a positive rate"):
        tokens_per_copy(1e12, 0)


def test_advised_slots_follow_what_copies_cost() -> None:
    """A hot rank with two even experts, four ranks: the others need parts of both."""
    load_BE = torch.tensor([[900, 900, 50, 50, 50, 50, 50, 50], [50, 50, 50, 50, 900, 900, 50, 50]])
    assert advise_slots(load_BE, 4, PlannerSettings(tolerance=0.01))[0] == 1
    slots, costs = advise_slots(load_BE, 4, PlannerSettings(tolerance=0.01, copy_tokens=5000))
    assert slots == 0
    assert len(costs) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan_load(torch.ones(10, dtype=torch.int64), 4, PlannerSettings()), "10 experts cannot be split"),
        (lambda: plan_loads(torch.ones(1, 10).long(), 4, PlannerSettings()), "10 experts cannot be split evenly"),
        (lambda: plan_load(torch.ones(8).long(), 4, PlannerSettings(domain_size=3)), "domains of 3 ranks"),
        (lambda: plan_load(-torch.ones(8).long(), 4, PlannerSettings()), "a load of -1 tokens"),
        (lambda: plan_load(torch.ones(4).long(), 4, PlannerSettings(num_slots=2**15)), "at most 65535 slots"),
        (lambda: PlannerSettings(num_slots=-1), "num_slots is -1"),
        (lambda: PlannerSettings(tolerance=-0.1), "tolerance is -0.1"),
        (lambda: PlannerSettings(min_tokens=0), "min_tokens is 0"),
        (lambda: PlannerSettings(domain_size=-2), "domain_size is -2"),
        (lambda: PlannerSettings(copy_tokens=2**19), "copy_tokens is 524288"),
    ],
)
def test_what_cannot_be_served_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("slot_expert", "quota", "message"),
    [
        ([-1, -1, 1], [4, 0, 2, 0, 2, 2], None),
        ([1, -1, -1], [4, 2, 3, 0, 2, 0], "expert 1 has 4 tokens, the quotas compute 5"),
        ([1, -1, -1], [4, 2, 2, 0, 1, 1], "physical expert 5 .* has a quota of 1 tokens"),
        ([1, -1, -1], [4, 5, -1, 0, 2, 0], "physical expert 2 .* has a quota of -1 tokens"),
        ([0, -1, -1], [4, 0, 4, 0, 2, 0], "rank 0 hosts an expert twice"),
        ([3, -1, -1], [4, 0, 4, 0, 2, 0], "hosts expert 3, expected -1 to 2"),
        ([-1, -1, 1], [4, 0, 0, 0, 2, 4], "rises from 4 to 6"),
        ([1, -1], [4, 2, 2, 0, 2, 0], r"slot_expert is torch.int32 \(2,\)"),
    ],
)
def test_broken_placements_are_told_apart(slot_expert: list[int], quota: list[int], message: str | None) -> None:
    slots, quotas = (torch.tensor(values, dtype=torch.int32) for values in (slot_expert, quota))
    placement = Placement(slots, quotas, num_ranks=3, num_experts=3)
    expectation = nullcontext() if message is None else pytest.raises(PlanError, match=message)
    with expectation:
        check_placement(placement, torch.tensor([4, 4, 2]))


def test_two_replicas_of_one_expert_on_one_rank_are_refused() -> None:
    placement = Placement(
        torch.tensor([-1, -1, 0, 0], dtype=torch.int32),
        torch.tensor([2, 0, 0, 4, 1, 1], dtype=torch.int32),
        num_ranks=2,
        num_experts=2,
    )
    with pytest.raises(PlanError, match="rank 1 hosts an expert twice"):
        check_placement(placement, torch.tensor([4, 4]))
