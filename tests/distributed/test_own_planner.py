"""A planner of the user's own on several ranks: what is wrong with it is told on all of them, before weights move."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distributed.balance_rig import WEIGHTS, E
from distributed.harness import run_ranks
from equipoise.balance import BalanceConfig, Balancer
from equipoise.errors import PlanError, RankFailure

PLANNERS = """
import torch.distributed as dist
from equipoise.balance.plan import placement_from_copies

def place(load_PE, settings, copies, ranks=2, slots=1):
    return placement_from_copies(load_PE.sum(0).tolist(), ranks, slots, copies)

def right(load_PE, settings):
    return place(load_PE, settings, [(0, 1, 5)])

def other_expert(load_PE, settings):
    return place(load_PE, settings, [(dist.get_rank(), 1, 5)])

def other_quota(load_PE, settings):
    return place(load_PE, settings, [(0, 1, 5 - dist.get_rank())])

def nothing(load_PE, settings):
    return None

def wrong_ranks(load_PE, settings):
    return place(load_PE, settings, [], ranks=4)

def wrong_slots(load_PE, settings):
    return place(load_PE, settings, [], slots=2)

def fails_on_one(load_PE, settings):
    if dist.get_rank() == 1:
        raise KeyError("mine")
    return place(load_PE, settings, [])
"""
MESSAGES = {
    "other_expert": "gave rank 1 of the EP group another placement than rank 0",
    "other_quota": "gave rank 1 of the EP group another placement than rank 0",
    "nothing": "a NoneType where a Placement is expected",
    "wrong_ranks": "for 4 ranks of 1 slots, expected 2 of 1",
    "wrong_slots": "for 2 ranks of 2 slots, expected 2 of 1",
}


def use(path: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    ids = torch.tensor([[0, 1]] * 10)  # 20 tokens each for experts 0 and 1, which are both at home on rank 0

    def plan_of(name: str):
        config = BalanceConfig(planner=f"{path}:{name}")
        balancer = Balancer(dist.group.WORLD, num_experts=E, weights=WEIGHTS, dtype=torch.float32, config=config)
        return balancer.route(ids, key=(0, 0)).plan

    plan = plan_of("right")
    assert plan.slot_expert.tolist() == [-1, 0]
    assert plan.quota.tolist() == [15, 20, 0, 0, 0, 0, 0, 0, 0, 5]
    for name, message in MESSAGES.items():
        with pytest.raises(PlanError, match=message) as caught:
            plan_of(name)
        assert f"{name}'" in str(caught.value)
    with pytest.raises(KeyError if dist.get_rank() == 1 else RankFailure, match="mine"):
        plan_of("fails_on_one")


def test_ranks_with_different_plans_and_whatever_else_is_wrong_are_told_on_every_rank(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(PLANNERS)
    run_ranks(use, 2, str(tmp_path / "mine.py"), deadline_s=60)
