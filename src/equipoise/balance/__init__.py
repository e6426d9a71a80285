"""Exact-load expert balancing: from the loads of one layer and microbatch to a plan, on any device."""

from equipoise.balance.plan import BalancePlan, Placement, check_placement, check_plan
from equipoise.balance.planner import ExactLoadPlanner, plan_loads
from equipoise.balance.protocol import Planner, PlannerSettings
from equipoise.balance.registry import planner_maker
from equipoise.balance.reroute import count_load, reroute
from equipoise.balance.splits import complete_plan

__all__ = [
    "BalancePlan",
    "ExactLoadPlanner",
    "Placement",
    "Planner",
    "PlannerSettings",
    "check_placement",
    "check_plan",
    "complete_plan",
    "count_load",
    "plan_loads",
    "planner_maker",
    "reroute",
]
