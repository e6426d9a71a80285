"""Plans that never leave the device: for transports that read them there."""

import logging
from functools import lru_cache

import torch

from equipoise.balance.plan import INT32_MAX, BalancePlan, Placement
from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings, check_sizes
from equipoise.balance.rules import TARGET_STEPS, VARIANTS
from equipoise.balance.splits import complete_plan
from equipoise.errors import ConfigError
from equipoise.kernels.plan import (
    CountExchange,
    ExchangedPlan,
    ExchangedPlanner,
    PlanTables,
    PlanTerms,
    make_plan_workspace,
    plan,
    plan_problem,
)
from equipoise.symmetric.space import SymmetricSpace

logger = logging.getLogger(__name__)


def _terms(rank: int, settings: PlannerSettings) -> PlanTerms:
    return PlanTerms(
        rank,
        settings.num_slots,
        settings.tolerance_ppm,
        settings.min_tokens,
        settings.domain_size,
        settings.copy_tokens,
    )


class DevicePlanner:
    """Makes the whole plan of one rank on the device of the load: no host sync, capturable as a CUDA graph.

    By one kernel where Triton runs (`kernels/plan.py`), else by the tensor forms, some thousand small kernels; both
    give the same plan. The first call for a size allocates what the kernel needs and keeps it, scratch memory included:
    calls that can overlap, as on two streams, need a planner each, and the first one must not be the captured one.
    """

    def __init__(self) -> None:
        self._prepared: dict[tuple[int, int, int, torch.device], PlanTables | None] = {}

    def __call__(self, load_PE: torch.Tensor, rank: int, settings: PlannerSettings) -> BalancePlan:
        """`load_PE`: integer tensor [P, E]. Counts are not checked: that would be a host sync."""
        P, E = load_PE.shape
        check_sizes(E, P, settings)
        size = (P, E, settings.num_slots, load_PE.device)
        if size not in self._prepared:
            self._prepared[size] = _prepare(*size)
        tensors = self._prepared[size]
        if tensors is None:
            placement = plan_loads(load_PE.sum(0)[None], P, settings, reads_values=False)[0]
            return complete_plan(placement, load_PE, rank)
        slot_expert, quota, send, recv = plan(load_PE.int().contiguous(), tensors, _terms(rank, settings))
        return BalancePlan(Placement(slot_expert, quota, P, E), send, recv, rank)


class ExchangingPlanner:
    """Plans of one EP group on the device, from each rank's own counts: the launch that plans also exchanges them.

    Made and called by all ranks together, in one order, on streams whose order is the same everywhere.

    Raises:
        ConfigError: sizes that the kernel does not serve, or no Triton.
    """

    def __init__(self, space: SymmetricSpace, num_experts: int, settings: PlannerSettings) -> None:
        check_sizes(num_experts, space.num_ranks, settings)
        problem = plan_problem(space.device.type, space.num_ranks, num_experts, settings.num_slots)
        if problem is not None:
            raise ConfigError(f"plans cannot be made on the device: {problem}")
        tables_P = space.allocate((2, space.num_ranks, num_experts), torch.int32, "counts for a plan").pointers_P
        channel = space.channel("exchange of counts for a plan")
        exchange = CountExchange(space.signals, channel, tables_P)
        prepared = _prepare(space.num_ranks, num_experts, settings.num_slots, space.device)
        assert prepared is not None
        self._plan = ExchangedPlanner(space.num_ranks, num_experts, exchange, prepared, _terms(space.rank, settings))

    def __call__(self, counts_E: torch.Tensor) -> ExchangedPlan:
        """`counts_E`: int32, contiguous, this rank's tokens for each expert."""
        return self._plan(counts_E)


def _prepare(num_ranks: int, num_experts: int, num_slots: int, device: torch.device) -> PlanTables | None:
    """The kernel's tensors; None, and a line in the log, where the tensor forms have to do."""
    problem = plan_problem(device.type, num_ranks, num_experts, num_slots)
    if problem is not None:
        _say_once(device.type, problem)
        return None
    rules_V4, steps_K = rule_tables(device)
    num_candidates = (len(steps_K) + 1) * len(rules_V4)
    workspace = make_plan_workspace(num_ranks, num_experts, num_slots, num_candidates, device)
    return PlanTables(rules_V4, steps_K, workspace)


def rule_tables(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The rules (int32 [V, 4]) and the targets' steps (int32 [K]) as `kernels/plan.py` takes them."""
    threshold = {"fit": 0, "large": INT32_MAX, "small": -1}
    rules = [(v.giver, v.receiver == "fit", threshold[v.receiver], v.fill) for v in VARIANTS]
    return (
        torch.tensor(rules, dtype=torch.int32, device=device),
        torch.tensor(TARGET_STEPS, dtype=torch.int32, device=device),
    )


@lru_cache
def _say_once(device_type: str, problem: str) -> None:
    logger.info("plans are made by tensor operations on %s: %s", device_type, problem)
