"""The load of each layer and the prediction, as text."""

from collections.abc import Sequence

import numpy as np

from equipoise.simulate.assumptions import assumptions
from equipoise.trace.collect import Traced, short_name
from equipoise.trace.predict import PAYS, Prediction


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


def verdicts(traced: Traced, predictions: Sequence[Prediction], hardware: str) -> list[str]:
    """For each EP size, whether balancing pays, and what that holds for."""
    lines = []
    for p in predictions:
        gain = p.step_gain(traced.expert_share)
        found = f"pays, a step would take {1 - 1 / gain:.0%} less time" if gain >= PAYS else "does not pay"
        made_for = assumptions(p.ep_size, p.tokens_per_rank, p.copy_tokens, hardware)
        lines.append(f"{made_for}: balancing {found}; {p.turn}")
    return lines


def _table(titles: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in [titles, *rows])
