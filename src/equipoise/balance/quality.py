"""How well planners balance: synthetic loads, and a study of the largest rank load over the mean.

Loads are drawn token by token from one distribution over experts, the same for every rank: lognormal weights, Zipf, and
one hot rank whose experts share its tokens evenly. With many masters per rank the last is the case in which slots bind.

Shapes: P ranks, E experts, M = E / P masters per rank.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from equipoise.balance.baselines import UltraEPPlanner
from equipoise.balance.bounds import lower_bound
from equipoise.balance.exact import optimal_load
from equipoise.balance.plan import Placement, check_placement
from equipoise.balance.protocol import Planner, PlannerSettings
from equipoise.balance.splits import complete_plan
from equipoise.errors import PlanError

LOGNORMAL_SIGMAS = (0.5, 1.0, 2.0)
ZIPF_EXPONENTS = (0.5, 1.5)
HOT_RANK_RATIOS = (1.2, 6.0)
KINDS = ("lognormal", "zipf", "hot_rank")


@dataclass(frozen=True)
class Size:
    """num_ranks x num_experts, tokens per rank, experts per token."""

    num_ranks: int
    num_experts: int
    top_k: int
    tokens: int = 8192

    @property
    def name(self) -> str:
        return f"{self.num_ranks}x{self.num_experts}"


SIZES = (Size(8, 32, 4), Size(8, 128, 8), Size(64, 256, 8))


def expert_weights(kind: str, number: int, num_ranks: int, num_experts: int, rng: np.random.Generator) -> np.ndarray:
    """float64 [E], probabilities of the experts; `number` cycles through the sigmas of the lognormal kind."""
    if kind == "lognormal":
        weights = np.exp(LOGNORMAL_SIGMAS[number % len(LOGNORMAL_SIGMAS)] * rng.standard_normal(num_experts))
    elif kind == "zipf":
        weights = rng.permutation(np.arange(1, num_experts + 1) ** -rng.uniform(*ZIPF_EXPONENTS))
    else:
        ratio = min(rng.uniform(*HOT_RANK_RATIOS), float(num_ranks))
        weights_PM = np.full((num_ranks, num_experts // num_ranks), (num_ranks - ratio) / max(num_ranks - 1, 1))
        weights_PM[rng.integers(num_ranks)] = ratio
        weights = weights_PM.ravel()
    return weights / weights.sum()


def synthetic_loads(size: Size, count: int, rng: np.random.Generator) -> Iterator[tuple[str, torch.Tensor]]:
    """`count` load matrices int64 [P, E] in equal parts of the three kinds, with the name of the kind."""
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        weights = expert_weights(kind, number // len(KINDS), size.num_ranks, size.num_experts, rng)
        yield kind, torch.from_numpy(rng.multinomial(size.tokens * size.top_k, weights, size=size.num_ranks))


@dataclass(frozen=True)
class Outcome:
    """One planner on one set of loads.

    ratio: largest over mean rank load. bound: what the ratio cannot be below. seconds: processor time of a plan, which
    other programs on the machine do not lengthen as they do the elapsed time.
    """

    kinds: list[str]
    ratio: np.ndarray
    bound: np.ndarray
    copies: np.ndarray
    seconds: np.ndarray

    def quantile(self, share: float) -> float:
        """The ratio that this share of the loads does not exceed."""
        return float(np.quantile(self.ratio, share, method="higher"))

    def row(self, name: str, size: Size, settings: PlannerSettings) -> dict[str, Any]:
        """The outcome as one row of a results file."""
        gap = self.ratio / self.bound
        return {
            "planner": name,
            "size": size.name,
            "slots": settings.num_slots,
            "tolerance": settings.tolerance,
            "loads": len(self.ratio),
            "mean": float(self.ratio.mean()),
            **{f"p{round(100 * share)}": self.quantile(share) for share in (0.5, 0.9, 0.95, 0.99)},
            "max": float(self.ratio.max()),
            "mean_by_kind": {kind: float(self.ratio[np.array(self.kinds) == kind].mean()) for kind in KINDS},
            "bound_mean": float(self.bound.mean()),
            "gap_to_bound_mean": float(gap.mean()),
            "gap_to_bound_p99": float(np.quantile(gap, 0.99, method="higher")),
            "copies_mean": float(self.copies.mean()),
            "plan_cpu_ms_median": float(np.median(self.seconds) * 1e3),
        }


def measure(
    planner: Planner, loads: list[tuple[str, torch.Tensor]], settings: PlannerSettings, deliveries: int = 0
) -> Outcome:
    """Plans every load, checks every plan, and for the first `deliveries` also what every rank sends.

    Raises `PlanError` when a plan breaks an invariant or delivers other numbers of tokens than planned.
    """
    ratio, bound, copies, seconds = [], [], [], []
    for number, (_, load_PE) in enumerate(loads):
        load_E, num_ranks = load_PE.sum(0), load_PE.shape[0]
        start = time.process_time()
        placement = planner(load_PE, settings)
        seconds.append(time.process_time() - start)
        check_placement(placement, load_E, settings.domain_size)
        if number < deliveries:
            check_delivery(placement, load_PE)
        mean = max(int(load_E.sum()) / num_ranks, 1.0)
        ratio.append(int(placement.rank_load.max()) / mean)
        least = lower_bound(load_E[None], num_ranks, settings.num_slots, settings.domain_size)
        bound.append(max(int(least), 1) / mean)
        copies.append(int(placement.num_copies))
    return Outcome([kind for kind, _ in loads], *map(np.array, (ratio, bound, copies, seconds)))


def check_delivery(placement: Placement, load_PE: torch.Tensor) -> None:
    """Raises `PlanError` unless the ranks' sends add up to the quotas, and each rank's to its own tokens."""
    plans = [complete_plan(placement, load_PE, rank) for rank in range(placement.num_ranks)]
    delivered = torch.stack([plan.send for plan in plans]).sum(0)
    if not torch.equal(delivered, placement.quota.long()):
        raise PlanError(f"delivered {delivered.tolist()}, planned {placement.quota.tolist()}")


def milp_gap(planner: Planner, instances: int, rng: np.random.Generator) -> dict[str, Any]:
    """Largest ratio of a planner's largest rank load to the MILP's optimum, on small loads (P up to 6, M up to 3).

    Slots are fewer than masters where that is possible: with as many the mean is always reached.
    """
    worst, above_mean = 1.0, 0
    for _ in range(instances):
        num_ranks, num_masters = int(rng.integers(2, 7)), int(rng.integers(1, 4))
        settings = PlannerSettings(int(rng.integers(1, max(num_masters, 2))), tolerance=0.0)
        size = Size(num_ranks, num_ranks * num_masters, 2, tokens=512)
        weights = expert_weights(KINDS[rng.integers(3)], int(rng.integers(3)), num_ranks, size.num_experts, rng)
        load_PE = torch.from_numpy(rng.multinomial(size.tokens * size.top_k, weights, size=num_ranks))
        optimum = optimal_load(load_PE.sum(0), num_ranks, settings)
        above_mean += optimum > size.tokens * size.top_k * 1.0001
        worst = max(worst, int(planner(load_PE, settings).rank_load.max()) / optimum)
    return {"milp_instances": instances, "milp_above_mean": above_mean, "milp_gap_max": worst}


def study(
    make_planner: Callable[[], Planner],
    name: str,
    seed: int,
    count: int = 1000,
    instances: int = 200,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows and summary of the quality study; `say` gets a line after each row. All draws come from `seed`.

    Summary: `r<slots>_<size>_p<share>`, the ratio of largest to mean rank load that so many percent of the loads do not
    exceed, at tolerance 0; `milp_gap_max`, the largest ratio to the optimum on small loads; `full_slots_max`, the
    largest ratio to the mean rounded up with as many slots as masters; and at tolerance 1 %, the planner with one slot
    against the UltraEP-style one with two: `copies_ratio` (the largest of the sizes) and `imbalance_ratio_<size>`.
    """
    rows: list[dict[str, Any]] = []
    summary: dict[str, Any] = {}

    def run(who: str, planner: Planner, size: Size, loads: list, slots: int, tolerance: float) -> Outcome:
        settings = PlannerSettings(slots, tolerance)
        outcome = measure(planner, loads, settings, deliveries=10)
        rows.append(outcome.row(who, size, settings))
        row = rows[-1]
        say(
            f"{who:12} {size.name:7} R={slots} tolerance {tolerance:<5} mean {row['mean']:.4f} p90 {row['p90']:.4f} "
            f"p95 {row['p95']:.4f} p99 {row['p99']:.4f} max {row['max']:.4f} | bound {row['bound_mean']:.4f} "
            f"gap {row['gap_to_bound_mean']:.4f} | copies {row['copies_mean']:.2f} | {row['plan_cpu_ms_median']:.2f} ms"
        )
        return outcome

    copies_ratio = full_slots = 0.0
    for number, size in enumerate(SIZES):
        loads = list(synthetic_loads(size, count, np.random.default_rng([seed, number])))
        exact = {slots: run(name, make_planner(), size, loads, slots, 0.0) for slots in (1, 2)}
        full = run(name, make_planner(), size, loads[: count // 5], size.num_experts // size.num_ranks, 0.0)
        default = run(name, make_planner(), size, loads, 1, 0.01)
        other = run("ultraep", UltraEPPlanner(), size, loads, 2, 0.01)
        full_slots = max(full_slots, float((full.ratio / full.bound).max()))
        copies_ratio = max(copies_ratio, float(default.copies.mean() / other.copies.mean()))
        summary[f"imbalance_ratio_{size.name}"] = float(default.ratio.mean() / other.ratio.mean())
        for slots, share in ((1, 0.9), (1, 0.99), (2, 0.95), (2, 0.99)):
            summary[f"r{slots}_{size.name}_p{round(100 * share)}"] = exact[slots].quantile(share)
    small = milp_gap(make_planner(), instances, np.random.default_rng([seed, len(SIZES)]))
    say(f"{instances} small loads against the optimum: worst ratio {small['milp_gap_max']:.5f}")
    return rows, {"seed": seed, **summary, **small, "full_slots_max": full_slots, "copies_ratio": copies_ratio}
