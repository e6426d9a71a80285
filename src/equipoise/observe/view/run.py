"""One run as the viewer sees it: what its folder holds now, in numbers ready to be drawn.

Shapes: S recorded steps, L MoE layers, B buckets of steps.
"""

import threading
from pathlib import Path
from typing import Any

import numpy as np

from equipoise.errors import TraceError
from equipoise.observe.reader import Trace, open_trace
from equipoise.observe.schema import TRACE_FOLDER
from equipoise.observe.view.buckets import bucket_max, bucket_mean, bucket_starts, plain
from equipoise.observe.view.detail import layer_detail
from equipoise.observe.view.history import History, HistoryReader, identities
from equipoise.observe.view.metrics_file import METRICS_FILE, MetricsFile
from equipoise.observe.view.profiles import read_profiles

CURVE_POINTS = 1000
HEAT_COLUMNS = 160
RUN_FILE = "run.json"
METRICS = ("loss", "eval_loss", "tokens_per_second", "time_step_s", "grad_norm")


class Run:
    """A run folder, or a trace's folder or file. All methods may be called by several threads.

    Raises:
        TraceError: there is nothing to show, or the trace cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.resolve().name
        self.version = 0
        self.problem = ""
        self._lock = threading.Lock()
        self._metrics = MetricsFile(path / METRICS_FILE)
        self._trace: Trace | None = None
        self._history: HistoryReader | None = None
        self._identities: set[tuple] = set()
        self._open_trace()
        if self._trace is None and not self._metrics.path.exists() and not (path / RUN_FILE).exists():
            open_trace(path)  # raises with what was looked for
        self._metrics.refresh()

    def _open_trace(self) -> bool:
        """Opens the trace if there is one by now."""
        folder = self.path / TRACE_FOLDER
        if self.path.is_dir() and not any(folder.glob("*.parquet")) and not any(self.path.glob("*.parquet")):
            return False
        self._trace = open_trace(self.path)
        self._identities = identities(self._trace)
        self._history = HistoryReader(self._trace)
        return True

    def refresh(self) -> None:
        """Looks for new lines and files. A trace that cannot be read any more becomes `problem`; the rest stays."""
        with self._lock:
            changed = self._metrics.refresh()
            try:
                changed |= self._refresh_trace()
                problem = ""
            except TraceError as error:
                problem = str(error)
            changed |= problem != self.problem
            self.problem = problem
            self.version += changed

    def _refresh_trace(self) -> bool:
        if self._trace is None:
            return self._open_trace()
        changed = self._trace.refresh()
        present = identities(self._trace)
        others = {path for path, *_ in self._identities - present} & {path for path, *_ in present}
        if others:  # under a name that it knows: a resumed run has cut a file, or another run has begun here
            return self._open_trace()
        self._identities = present
        return changed

    def describe(self) -> dict[str, Any]:
        """Name, sizes, and what there is to see."""
        with self._lock:
            info = None if self._trace is None else self._trace.info
            return {
                "name": self.name,
                "path": str(self.path),
                "version": self.version,
                "problem": self.problem,
                "has_metrics": len(self._metrics) > 0,
                "has_trace": info is not None,
                "info": None if info is None else vars(info),
                "last_step": self._metrics.last_step,
            }

    def overview(self) -> dict[str, Any]:
        """Curves, imbalance, heat maps and the worst layers.

        Raises:
            TraceError: the trace cannot be read.
        """
        with self._lock:
            history = None if self._history is None else self._history.read()
            curves = self._curves()
            if history is None:
                imbalance = self._imbalance_of_metrics()
                heat, worst = self._heat_of_metrics()
                recorded = None
            else:
                imbalance = _imbalance(history)
                heat, worst = _heat(history), _worst_layers(history)
                recorded = {"count": len(history.steps_S), "with_matrices": int(history.has_matrices_S.sum())}
            return {
                "version": self.version,
                "curves": curves,
                "imbalance": imbalance,
                "heat": heat,
                "worst": worst,
                "recorded": recorded,
                "summary": self._summary(history),
                "profiles": read_profiles(self.path),
            }

    def detail(self, step: int | None, layer: int, microbatch: int = 0, group: int = 0) -> dict[str, Any]:
        """One layer of the recorded step that is nearest to `step` (None: the last), if possible one with matrices.

        Raises:
            TraceError: no trace, or no such layer, microbatch or group.
        """
        with self._lock:
            if self._trace is None or self._history is None:
                raise TraceError(
                    f"{self.path} has no load trace, so there is nothing to drill into: train with a [trace] section "
                    "(docs/traces.md)"
                )
            history, info = self._history.read(), self._trace.info
            steps = history.steps_S[history.has_matrices_S] if history.has_matrices_S.any() else history.steps_S
            if not len(steps):
                raise TraceError(f"{self.path}: the trace has no rows yet")
            index = len(steps) - 1 if step is None else int(np.abs(steps - step).argmin())
            chosen = int(steps[index])
            load = self._trace.load(chosen, layer, microbatch, group)
            row = int(np.searchsorted(history.steps_S, chosen))
            detail = {
                "step": chosen,
                "layer": layer,
                "microbatch": microbatch,
                "group": group,
                "previous": int(steps[index - 1]) if index else None,
                "next": int(steps[index + 1]) if index + 1 < len(steps) else None,
                "first": int(steps[0]),
                "last": int(steps[-1]),
                "num_ranks": info.ep_size,
                "num_experts": info.num_experts,
                "layers": {"before": plain(history.before_SL[row]), "after": plain(history.after_SL[row])},
            }
        return detail | layer_detail(load, info)

    def steps_to_export(self, limit: int) -> list[int]:
        """At most `limit` recorded steps with matrices, evenly spread, with the first and the last."""
        with self._lock:
            if self._history is None:
                return []
            history = self._history.read()
            steps = history.steps_S[history.has_matrices_S]
            if len(steps) > limit:
                steps = steps[np.linspace(0, len(steps) - 1, limit).round().astype(int)]
            return [int(step) for step in steps]

    def _curves(self) -> dict[str, Any]:
        steps = self._metrics.column("step")
        starts = bucket_starts(len(steps), CURVE_POINTS)
        curves: dict[str, Any] = {"step": plain(bucket_mean(steps, starts), 9), "per_point": _bucket_size(starts)}
        for name in METRICS:
            values = self._metrics.column(name)
            known = np.isfinite(values)
            if name == "eval_loss":
                curves[name] = {"step": plain(steps[known], 9), "value": plain(values[known])}
            elif known.any():
                curves[name] = plain(bucket_mean(values, starts))
        return curves

    def _imbalance_of_metrics(self) -> dict[str, Any] | None:
        before = self._metrics.column("rank_imbalance")
        if not np.isfinite(before).any():
            return None
        starts = bucket_starts(len(before), CURVE_POINTS)
        worst = bucket_max(self._metrics.column("rank_imbalance_max"), starts)
        imbalance = {
            "source": "metrics",
            "step": plain(bucket_mean(self._metrics.column("step"), starts), 9),
            "per_point": _bucket_size(starts),
            "before": plain(bucket_mean(before, starts)),
            "worst_before": plain(worst),
        }
        after = self._metrics.column("rank_imbalance_after")
        if np.isfinite(after).any():
            imbalance["after"] = plain(bucket_mean(after, starts))
            imbalance["worst_after"] = plain(bucket_max(self._metrics.column("rank_imbalance_after_max"), starts))
        return imbalance

    def _heat_of_metrics(self) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
        before_SL = self._metrics.layers("rank_imbalance")
        if before_SL is None:
            return None, []
        steps = self._metrics.column("step").astype(np.int64)
        unknown_SL = np.full_like(before_SL, np.nan)
        none = np.zeros(len(steps))
        history = History(steps, before_SL, unknown_SL, before_SL, unknown_SL, np.ones_like(before_SL), none, none > 0)
        heat = _heat(history)
        heat["after"] = None
        return heat, _worst_layers(history)

    def _summary(self, history: History | None) -> dict[str, float | None]:
        """Figures to compare runs by. Means leave out the first tenth of the steps, which warm up."""
        last_step = self._metrics.last_step
        skip = len(self._metrics) // 10
        summary: dict[str, float | None] = {}
        for name in ("tokens_per_second", "time_step_s", "balance_plan_s", "balance_sync_s"):
            summary[name] = _mean(self._metrics.column(name)[skip:])
        for name in ("loss", "eval_loss"):
            values = self._metrics.column(name)
            values = values[np.isfinite(values)]
            summary[name] = float(values[-1]) if len(values) else None
        summary["step"] = None if last_step is None else float(last_step)
        if history is None:
            summary["imbalance_before"] = _mean(self._metrics.column("rank_imbalance")[skip:])
            summary["imbalance_after"] = _mean(self._metrics.column("rank_imbalance_after")[skip:])
            summary["copies"] = _mean(self._metrics.column("balance_copies")[skip:])
        else:
            skip = len(history.steps_S) // 10
            summary["imbalance_before"] = _mean(history.before_SL[skip:])
            summary["imbalance_after"] = _mean(history.after_SL[skip:])
            groups = 1 if self._trace is None else self._trace.info.num_groups
            summary["copies"] = _mean(history.copies_S[skip:] / groups)
            if summary["step"] is None and len(history.steps_S):
                summary["step"] = float(history.steps_S[-1])
        return summary


def _bucket_size(starts: np.ndarray) -> int:
    return int(starts[1] - starts[0]) if len(starts) > 1 else 1


def _mean(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean(dtype=np.float64)) if known.size else None


def _imbalance(history: History) -> dict[str, Any]:
    """Over layers: the mean, and the worst."""
    starts = bucket_starts(len(history.steps_S), CURVE_POINTS)
    return {
        "source": "trace",
        "step": plain(bucket_mean(history.steps_S, starts), 9),
        "per_point": _bucket_size(starts),
        "before": plain(bucket_mean(_mean_over(history.before_SL, 1), starts)),
        "after": plain(bucket_mean(_mean_over(history.after_SL, 1), starts)),
        "worst_before": plain(bucket_max(np.fmax.reduce(history.worst_before_SL, axis=1), starts)),
        "worst_after": plain(bucket_max(np.fmax.reduce(history.worst_after_SL, axis=1), starts)),
    }


def _mean_over(values: np.ndarray, axis: int) -> np.ndarray:
    """Mean of the numbers that are there; NaN where there are none."""
    known = np.isfinite(values)
    sums, counts = np.where(known, values, 0.0).sum(axis, dtype=np.float64), known.sum(axis)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _heat(history: History) -> dict[str, Any]:
    """Means by layer and bucket of steps, and the step of each bucket in which the layer was worst before balancing."""
    S, L = history.before_SL.shape
    starts = bucket_starts(S, HEAT_COLUMNS)
    ends = np.append(starts[1:], S)
    worst_step_BL = np.zeros((len(starts), L), np.int64)
    ranked_SL = np.where(np.isfinite(history.worst_before_SL), history.worst_before_SL, -1.0)
    if history.has_matrices_S.any():  # rather a step that can be drilled into
        ranked_SL = np.where(history.has_matrices_S[:, None], ranked_SL, ranked_SL - 1e6)
    for bucket, (start, end) in enumerate(zip(starts, ends)):
        worst_step_BL[bucket] = history.steps_S[start + ranked_SL[start:end].argmax(0)]
    return {
        "step": [int(x) for x in history.steps_S[starts]],
        "last": [int(x) for x in history.steps_S[ends - 1]],
        "before": plain(bucket_mean(history.before_SL, starts).T, 4),
        "after": plain(bucket_mean(history.after_SL, starts).T, 4),
        "worst_step": worst_step_BL.T.tolist(),
    }


def _worst_layers(history: History, number: int = 8) -> list[dict[str, Any]]:
    """The layers with the largest mean before balancing, with the step in which each was worst."""
    if not history.before_SL.size:
        return []
    mean_L = np.nan_to_num(_mean_over(history.before_SL, 0))
    rows = []
    for layer in np.argsort(-mean_L, kind="stable")[:number]:
        worst_S = np.nan_to_num(history.worst_before_SL[:, layer])
        row = {
            "layer": int(layer),
            "before": float(mean_L[layer]),
            "after": _mean(history.after_SL[:, layer]),
            "worst_before": float(worst_S.max()),
            "worst_after": _max(history.worst_after_SL[:, layer]),
            "worst_step": int(history.steps_S[worst_S.argmax()]),
        }
        rows.append(row)
    return rows


def _max(values: np.ndarray) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.max()) if known.size else None
