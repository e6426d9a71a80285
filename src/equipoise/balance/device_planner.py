"""Plans that never leave the device: for transports that read them there."""

import logging
from functools import lru_cache

import torch

from equipoise.balance.plan import BalancePlan, Placement
from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings, check_sizes
from equipoise.balance.rules import TARGET_STEPS, VARIANTS
from equipoise.balance.splits import complete_plan
from equipoise.kernels.plan import make_plan_workspace, plan, plan_problem

logger = logging.getLogger(__name__)


class DevicePlanner:
    """Makes the whole plan of one rank on the device of the load: no host sync, capturable as a CUDA graph.

    By one kernel where Triton runs (`kernels/plan.py`), else by the tensor forms, some thousand small kernels; both give
    the same plan. Holds the kernel's scratch memory, so calls that can overlap, as on two streams, need a planner each.
    """

    def __init__(self) -> None:
        self._workspaces: dict[tuple, torch.Tensor] = {}

    def __call__(self, load_PE: torch.Tensor, rank: int, settings: PlannerSettings) -> BalancePlan:
        """`load_PE`: integer tensor [P, E]. Counts are not checked: that would be a host sync."""
        P, E = load_PE.shape
        check_sizes(E, P, settings)
        problem = plan_problem(load_PE.device.type, P, E, settings.num_slots)
        if problem is not None:
            _say_once(load_PE.device.type, problem)
            placement = plan_loads(load_PE.sum(0)[None], P, settings, reads_values=False)[0]
            return complete_plan(placement, load_PE, rank)
        rules_V4, steps_K = rule_tables(load_PE.device)
        slot_expert, quota, send, recv = plan(
            load_PE.int().contiguous(),
            rules_V4,
            steps_K,
            self._workspace(P, E, settings.num_slots, load_PE.device),
            rank,
            settings.num_slots,
            settings.tolerance_ppm,
            settings.min_tokens,
            settings.domain_size,
            settings.copy_tokens,
        )
        return BalancePlan(Placement(slot_expert, quota, P, E), send, recv, rank)

    def _workspace(self, num_ranks: int, num_experts: int, num_slots: int, device: torch.device) -> torch.Tensor:
        key = (num_ranks, num_experts, num_slots, device)
        if key not in self._workspaces:
            candidates = (len(TARGET_STEPS) + 1) * len(VARIANTS)
            self._workspaces[key] = make_plan_workspace(num_ranks, num_experts, num_slots, candidates, device)
        return self._workspaces[key]


@lru_cache
def rule_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rules (int32 [V, 4]) and the targets' steps (int32 [K]) as `kernels/plan.py` takes them."""
    threshold = {"fit": 0, "large": 2**31 - 1, "small": -1}
    rules = [(v.giver, v.receiver == "fit", threshold[v.receiver], v.fill) for v in VARIANTS]
    return (
        torch.tensor(rules, dtype=torch.int32, device=device),
        torch.tensor(TARGET_STEPS, dtype=torch.int32, device=device),
    )


@lru_cache
def _say_once(device_type: str, problem: str) -> None:
    logger.info("plans are made by tensor operations on %s: %s", device_type, problem)
