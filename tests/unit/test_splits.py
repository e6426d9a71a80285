"""Splits and reroute: what is delivered equals what was planned, to the token, and every rank finds its own part."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.balance import (
    BalancePlan,
    ExactLoadPlanner,
    Placement,
    PlannerSettings,
    check_plan,
    complete_plan,
    count_load,
    reroute,
)
from equipoise.balance.plan import placement_from_copies
from equipoise.errors import PlanError


def slow_split(placement: Placement, load: list[list[int]]) -> list[list[int]]:
    """Tokens [source][physical id], token by token: own rank first, then ranks in order, masters before slots."""
    num_ranks, num_locals = placement.num_ranks, placement.num_masters + placement.num_slots
    expert_of = placement.physical_expert.tolist()
    left = placement.quota.tolist()
    sent = [[0] * len(left) for _ in range(num_ranks)]
    rest = [list(row) for row in load]
    for physical, expert in enumerate(expert_of):
        rank = physical // num_locals
        own = min(load[rank][expert], left[physical]) if expert >= 0 else 0
        sent[rank][physical] += own
        rest[rank][expert] -= own
        left[physical] -= own
    for expert in range(placement.num_experts):
        instances = [i for i, e in enumerate(expert_of) if e == expert]
        instances.sort(key=lambda i: (i % num_locals >= placement.num_masters, i))
        for rank in range(num_ranks):
            for _ in range(rest[rank][expert]):
                physical = next(i for i in instances if left[i])
                sent[rank][physical] += 1
                left[physical] -= 1
    return sent


def slow_reroute(ids: list[list[int]], plan: BalancePlan) -> list[list[int]]:
    """Physical ids by a plain loop over tokens."""
    placement = plan.placement
    num_locals = placement.num_masters + placement.num_slots
    expert_of, left = placement.physical_expert.tolist(), plan.send.tolist()
    out = []
    for row in ids:
        out.append([])
        for expert in row:
            if expert < 0:
                out[-1].append(-1)
                continue
            able = [i for i, e in enumerate(expert_of) if e == expert and left[i]]
            able.sort(key=lambda i: (i // num_locals != plan.rank, i % num_locals >= placement.num_masters, i))
            left[able[0]] -= 1
            out[-1].append(able[0])
    assert not any(left)
    return out


@st.composite
def routed(draw):
    """Logical ids of every rank, ragged: other numbers of tokens on each rank, none on some, ids of -1 among them."""
    num_ranks, num_masters, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 3))
    num_experts = num_ranks * num_masters
    hot = draw(st.integers(0, num_experts - 1))
    expert = st.one_of(st.just(hot), st.integers(-1, num_experts - 1))
    rows = st.lists(st.lists(expert, min_size=top_k, max_size=top_k), max_size=12)
    ids = [torch.tensor(draw(rows), dtype=torch.int32).view(-1, top_k) for _ in range(num_ranks)]
    return ids, num_experts, draw(st.integers(0, num_masters))


@settings(max_examples=80, deadline=None)
@given(routed(), st.sampled_from([torch.int32, torch.int64]))
def test_delivered_equals_planned_and_reroute_equals_a_plain_loop(problem, dtype: torch.dtype) -> None:
    all_ids, num_experts, num_slots = problem
    load_PE = torch.stack([count_load(ids, num_experts) for ids in all_ids])
    placement = ExactLoadPlanner()(load_PE, PlannerSettings(num_slots, tolerance=0.0))
    sent = slow_split(placement, load_PE.tolist())
    delivered = torch.zeros_like(placement.quota)
    for rank, ids in enumerate(all_ids):
        plan = complete_plan(placement, load_PE, rank)
        check_plan(plan, load_PE)
        assert plan.send.tolist() == sent[rank]
        mine = slice(rank * plan.recv.shape[1], (rank + 1) * plan.recv.shape[1])
        assert plan.recv.tolist() == [row[mine] for row in sent]
        physical = reroute(ids.to(dtype), plan)
        assert physical.dtype == dtype
        assert physical.tolist() == slow_reroute(ids.tolist(), plan)
        counts = count_load(physical, placement.quota.numel())
        assert torch.equal(counts, plan.send)
        delivered += counts
    assert torch.equal(delivered, placement.quota)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(1, 4), st.randoms(use_true_random=False))
def test_huge_and_ragged_sources_add_up(num_ranks: int, num_masters: int, random) -> None:
    """Counts near what int32 holds, zero-token ranks, empty experts."""
    E = num_ranks * num_masters
    most = (2**31 - 1) // (num_ranks * E)
    load = [[random.choice([0, 1, random.randint(0, most)]) for _ in range(E)] for _ in range(num_ranks)]
    load[random.randrange(num_ranks)] = [0] * E
    load_PE = torch.tensor(load, dtype=torch.int32)
    placement = ExactLoadPlanner()(load_PE, PlannerSettings(num_masters, tolerance=0.0))
    plans = [complete_plan(placement, load_PE, rank) for rank in range(num_ranks)]
    for plan in plans:
        check_plan(plan, load_PE)
    assert torch.equal(torch.stack([plan.send for plan in plans]), torch.cat([plan.recv for plan in plans], 1))


def test_own_tokens_stay_then_ranks_fill_the_master_first() -> None:
    """Expert 0 (home rank 0) has a replica on rank 2 with a quota of 5; ranks 0, 1, 2 hold 4, 4, 2 of its tokens."""
    load_PE = torch.tensor([[4, 0, 0], [4, 0, 0], [2, 0, 0]])
    placement = placement_from_copies([10, 0, 0], 3, 1, [(0, 2, 5)])
    sends = [complete_plan(placement, load_PE, rank).send.view(3, 2).tolist() for rank in range(3)]
    assert sends == [[[4, 0], [0, 0], [0, 0]], [[1, 0], [0, 0], [0, 3]], [[0, 0], [0, 0], [0, 2]]]


def test_three_replicas_on_two_nodes_get_their_quotas() -> None:
    """Nearest-replica rules leave a replica idle when two share a node; quotas do not."""
    load_PE = torch.tensor([[0, 0, 0, 0], [0, 0, 0, 0], [60, 0, 0, 0], [60, 0, 0, 0]])
    placement = ExactLoadPlanner()(load_PE, PlannerSettings(1, tolerance=0.0))
    delivered = sum(complete_plan(placement, load_PE, rank).send for rank in range(4))
    assert delivered.view(4, 2).sum(1).tolist() == [30, 30, 30, 30]


def test_padding_changes_no_plan() -> None:
    """Padded rows carry ids of -1: they are no load."""
    ids_TK = torch.tensor([[0, 1], [0, 2], [0, 3]])
    padded = torch.cat([ids_TK, torch.full((5, 2), -1)])
    assert count_load(ids_TK, 4).tolist() == count_load(padded, 4).tolist() == [3, 1, 1, 1]
    load_PE = torch.stack([count_load(padded, 4), torch.zeros(4, dtype=torch.int32)])
    plan = complete_plan(ExactLoadPlanner()(load_PE, PlannerSettings(1, tolerance=0.0)), load_PE, 0)
    assert int(plan.placement.num_copies) == 1
    assert torch.equal(reroute(padded, plan)[:3], reroute(ids_TK, plan))
    assert (reroute(padded, plan)[3:] == -1).all()


@pytest.mark.parametrize("num_experts", [4, 40_000])
@pytest.mark.parametrize("num_tokens", [0, 1, 31, 128])
def test_any_number_of_tokens_and_experts(num_tokens: int, num_experts: int) -> None:
    ids_TK = torch.randint(0, 3, (num_tokens, 2), generator=torch.Generator().manual_seed(0))
    load_PE = torch.stack([count_load(ids_TK, num_experts), torch.zeros(num_experts, dtype=torch.int32)])
    placement = ExactLoadPlanner()(load_PE, PlannerSettings(2, tolerance=0.0))
    plan = complete_plan(placement, load_PE, 0)
    physical = reroute(ids_TK, plan)
    assert physical.shape == ids_TK.shape
    assert torch.equal(placement.physical_expert[physical.flatten()], ids_TK.flatten().int())


@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("send", r"rank 0 sends \[5, 0, 0\] tokens per expert, has \[4, 0, 0\]"),
        ("recv", r"rank 0 receives \[6, 0\], its quotas are \[5, 0\]"),
    ],
)
def test_a_plan_that_delivers_something_else_is_refused(field: str, message: str) -> None:
    load_PE = torch.tensor([[4, 0, 0], [4, 0, 0], [2, 0, 0]])
    plan = complete_plan(placement_from_copies([10, 0, 0], 3, 1, [(0, 2, 5)]), load_PE, 0)
    getattr(plan, field).view(-1)[0] += 1
    with pytest.raises(PlanError, match=message):
        check_plan(plan, load_PE)
