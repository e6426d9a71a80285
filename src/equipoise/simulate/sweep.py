"""Several settings side by side: off, the ceiling, and balancing with each number of slots, tolerance and ranks."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from equipoise.balance.plan import INT32_MAX
from equipoise.balance.protocol import PlannerSettings
from equipoise.simulate.hardware import ExpertSize, Hardware
from equipoise.simulate.loads import LoadBlock
from equipoise.simulate.run import FORCED, OFF, simulate_all, summarize

LoadsOf = Callable[[int], Iterable[LoadBlock]]
"""Makes the loads for a number of ranks."""


@dataclass(frozen=True)
class Sweep:
    """What to try. domain_size 0: no domains. copy_tokens: None takes the hardware's."""

    ranks: Sequence[int]
    planners: Sequence[str] = ("exact_load",)
    slots: Sequence[int] = (1, 2)
    tolerances: Sequence[float] = (0.01,)
    min_tokens: int = 1
    domain_size: int = 0
    copy_tokens: int | None = None

    def settings(self, hardware: Hardware, expert: ExpertSize, slots: int, tolerance: float) -> PlannerSettings:
        copy_tokens = hardware.copy_tokens(expert) if self.copy_tokens is None else self.copy_tokens
        return PlannerSettings(slots, tolerance, self.min_tokens, self.domain_size, copy_tokens)


def run_sweep(
    sweep: Sweep, loads_of: LoadsOf, hardware: Hardware, expert: ExpertSize, say: Callable[[str], None] = lambda _: None
) -> list[dict[str, Any]]:
    """One row for each setting: `summarize`'s fields, what was tried, `of_ceiling` (the ceiling's step time over the
    row's), `over_off` (off's over the row's), and `is_best` for the fastest of a number of ranks."""
    rows: list[dict[str, Any]] = []
    for ranks in sweep.ranks:
        tries: list[tuple[str, int, float]] = [(OFF, 0, 0.0)]
        tries += list(itertools.product(sweep.planners, sweep.slots, sweep.tolerances))
        tries.append((FORCED, 0, 0.0))
        say(f"{ranks} ranks: {len(tries)} settings")
        planned = [(planner, sweep.settings(hardware, expert, slots, tol)) for planner, slots, tol in tries]
        frames = simulate_all(loads_of(ranks), planned, hardware=hardware, expert=expert)
        found: list[dict[str, Any]] = [
            {"ranks": ranks, "planner": planner, "slots": slots, "tolerance": tolerance}
            | {"copy_tokens": settings.copy_tokens}
            | summarize(frame, hardware, expert, slots)
            for (planner, slots, tolerance), (_, settings), frame in zip(tries, planned, frames)
        ]
        off, ceiling = found[0]["step_s"], found[-1]["step_s"]
        best = min(found[:-1], key=lambda row: row["step_s"])
        for row in found:
            row |= {"of_ceiling": ceiling / row["step_s"], "over_off": off / row["step_s"], "is_best": row is best}
        rows += found
    return rows


def pays_with(
    sweep: Sweep, loads: LoadBlock, row: dict[str, Any], hardware: Hardware, expert: ExpertSize
) -> Callable[[float], bool | None]:
    """Whether balancing as in a row of `run_sweep` is faster than off with so many times the rows of `loads`; None
    where these are more than planners count."""
    settings = sweep.settings(hardware, expert, row["slots"], row["tolerance"])
    tries: list[tuple[str, PlannerSettings]] = [(OFF, settings), (row["planner"], settings)]

    def pays(factor: float) -> bool | None:
        if loads.sent_NP.sum(1).max() * factor > INT32_MAX:
            return None
        scaled = LoadBlock(loads.step, loads.microbatch, loads.layers_N, (loads.load_NPE * factor).astype(np.int64))
        off, on = simulate_all([scaled], tries, hardware=hardware, expert=expert)
        return float(on["layer_s"].sum()) < float(off["layer_s"].sum())

    return pays
