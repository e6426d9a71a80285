"""Exact-load expert balancing: from the loads of a layer and microbatch to a plan, and the runtime that acts on it.

A library: our MoE layers use nothing that another framework's could not.
"""

from equipoise.balance.config import BalanceConfig
from equipoise.balance.plan import BalancePlan, Placement, check_placement, check_plan
from equipoise.balance.planner import ExactLoadPlanner, plan_loads
from equipoise.balance.protocol import Planner, PlannerSettings
from equipoise.balance.registry import planner_maker
from equipoise.balance.reroute import count_load, reroute
from equipoise.balance.runtime import Balancer, LoadRecord
from equipoise.balance.splits import complete_plan
from equipoise.balance.step import Attached, Entered, Step

__all__ = [
    "Attached",
    "BalanceConfig",
    "BalancePlan",
    "Balancer",
    "Entered",
    "ExactLoadPlanner",
    "LoadRecord",
    "Placement",
    "Planner",
    "PlannerSettings",
    "Step",
    "check_placement",
    "check_plan",
    "complete_plan",
    "count_load",
    "plan_loads",
    "planner_maker",
    "reroute",
]
