"""A sweep's rows as a table, as a plot of characters, and in a sentence."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from equipoise.simulate.assumptions import assumptions
from equipoise.simulate.run import FORCED

BAR = 40
WIDTH = 125


def show(console: Console, rows: Sequence[dict[str, Any]], title: str, lines: Sequence[str]) -> None:
    """Prints the table, the plot and the verdicts, which are `lines`."""
    console.width = max(console.width, WIDTH)
    console.print(_table(rows, title))
    for line in plot(rows):
        console.print(line, markup=False, soft_wrap=True)
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _table(rows: Sequence[dict[str, Any]], title: str) -> Table:
    table = Table(title=title)
    for number, heading in enumerate(
        ("ranks", "planner", "slots", "tol.", "ms", "of ceiling", "routed", "planned", "p95", "copies", "remote",
         "rows MiB", "slots MiB")
    ):  # fmt: skip
        table.add_column(heading, justify="left" if number == 1 else "right", no_wrap=number == 1)
    previous = None
    for row in rows:
        if previous not in (None, row["ranks"]):
            table.add_section()
        table.add_row(
            "" if row["ranks"] == previous else str(row["ranks"]),
            row["planner"] + (" *" if row["is_best"] else ""),
            str(row["slots"] or ""),
            f"{row['tolerance']:g}" if row["slots"] else "",
            f"{row['step_s'] * 1e3:.2f}",
            f"{row['of_ceiling']:.1%}",
            f"{row['rank_imbalance']:.3f}",
            f"{row['rank_imbalance_after']:.3f}",
            f"{row['rank_imbalance_after_p95']:.3f}",
            f"{row['copies']:.1f}",
            f"{row['remote_share']:.0%}",
            f"{row['activation_bytes'] / 2**20:,.0f}",
            f"{row['slot_bytes'] / 2**20:,.0f}",
        )
        previous = row["ranks"]
    return table


def plot(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A bar for each row, as long as its time over the longest of its number of ranks."""
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        part = [row for row in rows if row["ranks"] == ranks]
        longest = max(row["step_s"] for row in part)
        for row in part:
            name = row["planner"] + (f" R={row['slots']} {row['tolerance']:g}" if row["slots"] else "")
            bar = "#" * max(1, round(BAR * row["step_s"] / longest))
            lines.append(f"{ranks:5} {name:24} {bar:{BAR}} {row['step_s'] * 1e3:.2f} ms")
    return lines


def verdicts(
    rows: Sequence[dict[str, Any]], top_k: int, hardware: str, turn: Callable[[dict[str, Any], float, bool], str]
) -> list[str]:
    """For each number of ranks, whether balancing is predicted to pay, and what that holds for.

    turn: of a row with balancing, its tokens per rank, and whether it pays: where the verdict turns (`turning_point`),
    or nothing.
    """
    lines = []
    for ranks in dict.fromkeys(row["ranks"] for row in rows):
        tried = [row for row in rows if row["ranks"] == ranks and row["planner"] != FORCED]
        (best,) = [row for row in tried if row["is_best"]]
        balanced = min(tried[1:], key=lambda row: row["step_s"])
        tokens = best["rows"] / ranks / top_k
        start = f"{assumptions(ranks, tokens, balanced['copy_tokens'], hardware)}: balancing "
        end = turn(balanced, tokens, best is balanced)
        end = f"; {end}" if end else ""
        if best is balanced:
            slots = "1 slot" if best["slots"] == 1 else f"{best['slots']} slots"
            lines.append(
                f"{start}pays, {best['over_off']:.2f} x the speed of off with {best['planner']}, {slots} per rank and "
                f"a tolerance of {best['tolerance']:g}{end}"
            )
        else:
            lines.append(f"{start}does not pay{end}")
    return lines
