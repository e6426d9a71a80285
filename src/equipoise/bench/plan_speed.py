"""How long a whole plan takes on an accelerator: the kernel, and in the same run the forms that it replaces."""

import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import numpy as np
import torch

from equipoise.accelerator import Accelerator
from equipoise.balance.baselines import UltraEPPlanner
from equipoise.balance.device_planner import DevicePlanner
from equipoise.balance.plan import BalancePlan, Placement
from equipoise.balance.planner import plan_loads
from equipoise.balance.planner_host import plan_load
from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.quality import Size
from equipoise.balance.splits import complete_plan
from equipoise.bench.kernel_timing import graph_us
from equipoise.errors import ConfigError

SIZES = (
    (Size(8, 32, 4), (1,)),
    (Size(8, 128, 8), (1, 2)),
    (Size(64, 256, 8), (1, 2)),
    (Size(64, 512, 8), (2,)),
)
"""What is measured: sizes with their numbers of slots."""

IMBALANCES = (1.5, 2.0, 3.0)

SEPARATELY_MEASURED = (
    {"planner": "UltraEP 1.0.0", "size": "64x256", "slots": 2, "us": [54, 63], "after": 1.010, "copies": [45, 51]},
    {"planner": "UltraEP 1.0.0", "size": "64x256", "slots": 1, "us": [54, 85], "after": [1.010, 1.040]},
    {"planner": "UltraEP 1.0.0", "size": "8x32", "slots": 1, "us": [17, 60], "after": [1.025, 1.182]},
)
"""For orientation: not of this run. UltraEP's own test program on an H200, its placement kernel without splits, on its
own loads of initial imbalance 1.5 to 3."""


def skewed_load(size: Size, imbalance: float, rng: np.random.Generator) -> torch.Tensor:
    """int32 [P, E], random tokens by lognormal expert weights whose spread gives this largest over mean rank load."""
    draw_E = rng.standard_normal(size.num_experts)
    low, high = 0.0, 20.0
    for _ in range(60):
        spread = (low + high) / 2
        weights_E = np.exp(spread * (draw_E - draw_E.max()))
        rank_P = weights_E.reshape(size.num_ranks, -1).sum(1)
        low, high = (spread, high) if rank_P.max() / rank_P.mean() < imbalance else (low, spread)
    counts_PE = rng.multinomial(size.tokens * size.top_k, weights_E / weights_E.sum(), size=size.num_ranks)
    return torch.from_numpy(counts_PE).int()


def elapsed_us(work: Callable[[], object], accelerator: Accelerator, rounds: int) -> float:
    """Median microseconds of one call until the device has finished it, launches included."""
    took = []
    for _ in range(rounds + 1):
        accelerator.synchronize()
        start = time.perf_counter()
        work()
        accelerator.synchronize()
        took.append((time.perf_counter() - start) * 1e6)
    return median(took[1:])


def study_speed(
    accelerator: Accelerator, seed: int, say: Callable[[str], None] = lambda line: None
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and summary of `plan-DEVICE.json`: `plan_us_<size>_r<slots>`, the slowest of the imbalances.

    The kernel's time is that of a launch inside a graph; the peers' is the elapsed time of a call, since they launch
    thousands of kernels or work on the host. Raises `ConfigError` where the kernel does not run.
    """
    device = accelerator.device()
    if device.type != "cuda":
        raise ConfigError(f"the speed of plans is measured with graphs of a GPU; this is {device.type}")
    rows: list[dict[str, Any]] = []
    summary: dict[str, float] = {}
    for size, all_slots in SIZES:
        for slots in all_slots:
            chosen = PlannerSettings(slots)
            worst = 0.0
            for imbalance in IMBALANCES:
                load_PE = skewed_load(size, imbalance, np.random.default_rng([seed, size.num_experts])).to(device)
                planner = DevicePlanner()
                plan = planner(load_PE, 0, chosen)
                us = graph_us(partial(planner, load_PE, 0, chosen))
                worst = max(worst, us)
                rows.append(_row("kernel", size, chosen, load_PE, plan.placement, us))
                _same(plan, load_PE, chosen)
                say(_line(rows[-1]))
            summary[f"plan_us_{size.name}_r{slots}"] = worst
            for name, make, rounds in _peers(load_PE, chosen):
                us = elapsed_us(make, accelerator, rounds)
                rows.append(_row(name, size, chosen, load_PE, make(), us))
                say(_line(rows[-1]))
    rows += SEPARATELY_MEASURED
    return rows, summary


def _peers(load_PE: torch.Tensor, chosen: PlannerSettings) -> list[tuple[str, Callable[[], Placement], int]]:
    """Other ways to a placement on the device, with how often each is timed."""
    num_ranks = load_PE.shape[0]

    def tensors() -> Placement:
        placement = plan_loads(load_PE.sum(0)[None], num_ranks, chosen)[0]
        return complete_plan(placement, load_PE, 0).placement

    def host() -> Placement:
        load = load_PE.cpu()
        plan = complete_plan(plan_load(load.sum(0), num_ranks, chosen), load, 0)
        plan.send.to(load_PE.device), plan.recv.to(load_PE.device)
        return plan.placement.to(load_PE.device)

    def ultraep() -> Placement:
        return UltraEPPlanner()(load_PE.cpu(), chosen).to(load_PE.device)

    return [("tensor form", tensors, 3), ("list form on the host", host, 10), ("UltraEP-style, in Python", ultraep, 5)]


def _row(
    planner: str, size: Size, chosen: PlannerSettings, load_PE: torch.Tensor, placement: Placement, us: float
) -> dict[str, Any]:
    before_P = load_PE.long().sum(0).view(size.num_ranks, -1).sum(1)
    mean = float(before_P.double().mean())
    return {
        "planner": planner,
        "size": size.name,
        "slots": chosen.num_slots,
        "us": us,
        "before": float(before_P.max()) / mean,
        "after": float(placement.rank_load.max()) / mean,
        "copies": int(placement.num_copies),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['planner']:25} {row['size']:7} R={row['slots']} {row['us']:10.1f} us, largest over mean "
        f"{row['before']:.2f} -> {row['after']:.4f}, {row['copies']} copies"
    )


def _same(plan: BalancePlan, load_PE: torch.Tensor, chosen: PlannerSettings) -> None:
    """Raises unless the plan is that of the list form: no time counts for a wrong plan."""
    load = load_PE.cpu()
    expected = complete_plan(plan_load(load.sum(0), load.shape[0], chosen), load, plan.rank)
    for name in ("slot_expert", "quota", "send", "recv"):
        if not torch.equal(getattr(plan, name).cpu(), getattr(expected, name)):
            raise AssertionError(f"{name} of the kernel's plan is not that of the list form")
