"""The load of each layer and the prediction, as text."""

from collections.abc import Sequence

import numpy as np

from equipoise.trace.collect import Traced, short_name
from equipoise.trace.predict import Prediction

PAYS = 1.02
"""Gain of a step from which balancing is called worth it: below, measurements differ by as much."""


def layer_table(traced: Traced, predictions: Sequence[Prediction]) -> str:
    """One line per MoE layer: its hottest experts, idle ones, and the busiest rank's load at each EP size."""
    titles = ["layer", "hottest experts (load over mean)", "idle", *(f"EP {p.ep_size}" for p in predictions)]
    rows = []
    for number, name in enumerate(traced.layers):
        load_E = traced.counts_LNE[number].sum(0)
        relative_E = load_E / max(load_E.mean(), 1e-9)
        hottest = np.argsort(-load_E, kind="stable")[:3]
        experts = ", ".join(f"{e} ({relative_E[e]:.2f})" for e in hottest)
        ranks = [f"{p.before_L[number]:.2f}" for p in predictions]
        rows.append([short_name(name), experts, str(int((load_E == 0).sum())), *ranks])
    return _table(titles, rows)


def prediction_table(traced: Traced, predictions: Sequence[Prediction]) -> str:
    """One line per EP size."""
    titles = ["EP size", "busiest rank", "balanced", "slots", "experts' time", "step", "microbatches"]
    rows = []
    for p in predictions:
        gains = [f"{p.expert_gain:.2f} x faster", f"{p.step_gain(traced.expert_share):.2f} x faster"]
        seen = str(p.samples) if p.samples else "less than 1"
        rows.append([str(p.ep_size), f"{p.before:.2f}", f"{p.after:.2f}", str(p.slots), *gains, seen])
    return _table(titles, rows)


def verdict(traced: Traced, predictions: Sequence[Prediction]) -> str:
    """Whether balancing pays, in a sentence."""
    best = max(predictions, key=lambda p: p.step_gain(traced.expert_share))
    gain = best.step_gain(traced.expert_share)
    if gain < PAYS:
        return "This load is even enough: balancing would not pay at any of these EP sizes."
    return f"Balancing would pay: at EP {best.ep_size} a step would take {1 - 1 / gain:.0%} less time."


def _table(titles: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [titles, *rows])
