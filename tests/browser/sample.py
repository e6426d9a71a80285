"""Run folders to look at, with everything that is in them kept as arrays.

Shapes: S steps, L layers, P ranks, E experts, M = E / P masters and R slots per rank.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from equipoise.balance.planner import plan_loads
from equipoise.balance.protocol import PlannerSettings
from equipoise.observe.schema import PHASES, TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.writer import TraceWriter

LAYERS, RANKS, EXPERTS, TOP_K, SLOTS = 12, 8, 64, 8, 2


@dataclass(frozen=True)
class SampleRun:
    """A run folder and what was written there: load_SLPE, delivered_SLPm, and records of metrics.jsonl."""

    path: Path
    steps: list[int]
    load_SLPE: np.ndarray
    slots_SLS: np.ndarray
    delivered_SLPm: np.ndarray
    records: list[dict[str, Any]]

    @property
    def before_SL(self) -> np.ndarray:
        """Largest over mean rank load."""
        return imbalance(self.load_SLPE.sum(2).reshape(*self.load_SLPE.shape[:2], RANKS, -1).sum(3))

    @property
    def after_SL(self) -> np.ndarray:
        return imbalance(self.delivered_SLPm.sum(3))


def imbalance(load_SLP: np.ndarray) -> np.ndarray:
    return load_SLP.max(-1) / load_SLP.mean(-1)


def loads(steps: list[int], seed: int = 0) -> np.ndarray:
    """[S, L, P, E]: a few experts of each layer are hot, which changes slowly; ranks differ a little."""
    random = np.random.default_rng(seed)
    popularity_LE = random.gamma(1.3, 1.0, (LAYERS, EXPERTS))
    drift_LE = random.normal(0, 0.05, (LAYERS, EXPERTS))
    made = []
    for step in steps:
        share_LE = popularity_LE * np.exp(drift_LE * step / 4)
        share_LE /= share_LE.sum(1, keepdims=True)
        share_LE = 0.6 * share_LE + 0.4 / EXPERTS
        made.append(random.poisson(2048 * TOP_K * share_LE[:, None, :].repeat(RANKS, 1)))
    return np.array(made)


def make_run(folder: Path, steps: list[int], balanced: bool = True, seed: int = 0) -> SampleRun:
    """Writes config-free run folder `folder` with a load trace and metrics.jsonl."""
    load_SLPE = loads(steps, seed)
    S, slots = len(steps), SLOTS if balanced else 0
    load_NE = torch.from_numpy(load_SLPE.sum(2).reshape(S * LAYERS, EXPERTS))
    placement = plan_loads(load_NE, RANKS, PlannerSettings(num_slots=slots))
    quota_SLI = placement.quota.numpy().reshape(S, LAYERS, -1)
    slots_SLS = placement.slot_expert.numpy().reshape(S, LAYERS, -1)
    delivered_SLPm = quota_SLI.reshape(S, LAYERS, RANKS, -1)
    run = SampleRun(folder, steps, load_SLPE, slots_SLS, delivered_SLPm, _records(steps, load_SLPE, balanced))
    write_trace(run, quota_SLI, balanced)
    write_metrics(folder, run.records)
    return run


def write_trace(run: SampleRun, quota_SLI: np.ndarray, balanced: bool) -> None:
    slots = SLOTS if balanced else 0
    planner = "exact_load" if balanced else ""
    info = TraceInfo(LAYERS, EXPERTS, TOP_K, RANKS, num_slots=slots, hidden_size=2048, planner=planner, device="sample")
    random = np.random.default_rng(3)
    with TraceWriter(run.path / "trace", info, name=f"{run.steps[0]:04}") as writer:
        for at, step in enumerate(run.steps):
            rows_LP = run.delivered_SLPm[at].sum(2)
            seconds_LPF = np.empty((LAYERS, RANKS, len(PHASES)), np.float32)
            cost = {"router": 4e-5, "balance": 6e-5 * balanced, "dispatch": 2e-4, "experts": 0.0, "combine": 2.2e-4}
            for index, phase in enumerate(PHASES):
                seconds_LPF[..., index] = cost.get(phase, 1e-4) * random.uniform(0.9, 1.1, rows_LP.shape)
                if phase == "experts":
                    seconds_LPF[..., index] = 5e-8 * rows_LP
            writer.write_layers(
                LayerRows(
                    step,
                    0,
                    0,
                    run.load_SLPE[at],
                    run.delivered_SLPm[at],
                    run.slots_SLS[at] if balanced else None,
                    quota_SLI[at] if balanced else None,
                    seconds_LPF,
                    expert_bytes=3 * 2048 * 768 * 2,
                )
            )


def _records(steps: list[int], load_SLPE: np.ndarray, balanced: bool) -> list[dict[str, Any]]:
    random = np.random.default_rng(5)
    speed = 5200 if balanced else 4100
    records = []
    for step in steps:
        record = {
            "step": step,
            "loss": 1.6 + 3.9 / step**0.55 + float(random.normal(0, 0.015)),
            "tokens_per_second": speed * (1 - 0.4 * math.exp(-step / 3)) + float(random.normal(0, 40)),
            "time_step_s": 16384 / speed,
        }
        if step % 20 == 0:
            record["eval_loss"] = record["loss"] + 0.06
        records.append(record)
    return records


def write_metrics(folder: Path, records: list[dict[str, Any]], mode: str = "w") -> None:
    with open(folder / "metrics.jsonl", mode) as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def write_profile(folder: Path) -> dict[str, Any]:
    """A summary as the profiler writes it."""
    times = {
        "router": (0.9, 1.1),
        "plan": (2.4, 0.0),
        "push": (0.6, 0.0),
        "dispatch": (6.1, 6.4),
        "experts": (21.3, 43.8),
    }
    times |= {"combine": (6.6, 5.9), "restore": (0.0, 0.7), "reduce": (0.0, 1.3)}
    phases = {
        name: {"forward_ms": f, "backward_ms": b, "device_ms": 0.0, "exposed_ms": 0.0} for name, (f, b) in times.items()
    }
    summary = {"steps": 3, "step_ms": 131.0, "has_device": False, "phases": phases, "other_host_ms": 33.9}
    (folder / "profile").mkdir()
    (folder / "profile" / "steps-10-12.rank-0.summary.json").write_text(json.dumps(summary))
    return summary
