"""The table of all routings that have been run beside the published figures, and a figure of it.

Run: python benchmarks/train/h200-ep8/compare.py [FOLDER]   (reads FOLDER/*.json, writes FOLDER/table.md and table.svg;
default benchmarks/results/train-h200-ep8)
"""

import json
import sys
from pathlib import Path
from typing import Any

from equipoise.bench.results import results_folder

HERE = Path(__file__).resolve().parent
GOALS = {"on, 1 slot": 0.95, "on, 2 slots": 0.96}
"""Least share of force-balanced tokens/s at every skew."""


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """By routing: the file's content."""
    files = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json")) if path.stem != "curves"}
    return {name: content for name, content in files.items() if "of_forced" in content.get("summary", {})}


def table(found: dict[str, dict[str, Any]], reference: dict[str, Any]) -> str:
    lines = [
        "| routing | mode | step s | tokens/s | of forced | peak GB | imbalance before | after |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, row in reference["rows"].items():
        values = (
            f"{row['step_s']:.4f} | {row['tokens_per_second']:,} | {row['of_forced']:.4f} | {row['memory_peak_gb']}"
        )
        lines.append(f"| published | {name} | {values} | | |")
    for routing, content in found.items():
        shares = content["summary"]["of_forced"]
        for row in content["rows"]:
            after = "" if row["imbalance_after"] is None else f"{row['imbalance_after']:.3f}"
            share = f"{shares[row['mode']]:.4f}" if shares else ""
            values = f"{row['step_s']:.4f} | {row['tokens_per_second']:,.0f} | {share}"
            ends = f"{row['memory_peak_gb']:.2f} | {row['imbalance_before']:.3f} | {after}"
            lines.append(f"| {routing} | {row['mode']} | {values} | {ends} |")
    return "\n".join([*lines, ""])


def verdicts(found: dict[str, dict[str, Any]], reference: dict[str, Any]) -> list[str]:
    """One line for each goal: met or missed, by how much; or which modes have no figures."""
    lines = []
    for routing, content in found.items():
        shares, rows = content["summary"]["of_forced"], {row["mode"]: row for row in content["rows"]}
        missing = [mode for mode in (*GOALS, "forced", "off", "off, all_to_all") if mode not in rows]
        if missing:
            lines.append(f"- {routing}: not measured: {'; '.join(missing)}")
        for mode, goal in GOALS.items():
            if mode in shares:
                lines.append(line(f"{routing}: {mode} of forced", shares[mode], goal))
        for mode in ("forced", "on, 1 slot", "off"):
            if mode in rows:
                goal = reference["rows"][mode]["tokens_per_second"]
                lines.append(line(f"{routing}: {mode}, tokens/s", rows[mode]["tokens_per_second"], goal))
        if {"off, all_to_all", "on, 1 slot"} <= rows.keys():
            saved = rows["off, all_to_all"]["memory_peak_gb"] - rows["on, 1 slot"]["memory_peak_gb"]
            lines.append(line(f"{routing}: GB that on saves", saved, 3.0))
            most = reference["rows"]["on, 1 slot"]["memory_peak_gb"]
            peak = rows["on, 1 slot"]["memory_peak_gb"]
            lines.append(
                f"- {routing}: on, 1 slot, GB: {peak:.4g}, at most {most}: {'met' if peak <= most else 'missed'}"
            )
    return lines


def line(what: str, value: float, goal: float) -> str:
    return f"- {what}: {value:,.4g}, asked {goal:,.4g}: {'met' if value >= goal else 'missed'}"


def figure(found: dict[str, dict[str, Any]], reference: dict[str, Any]) -> str:
    """Bars of the share of force-balanced tokens/s, by routing and mode."""
    groups = {"published": {name: row["of_forced"] for name, row in reference["rows"].items() if name != "baseline"}}
    groups |= {routing: content["summary"]["of_forced"] for routing, content in found.items()}
    colors = {"off": "#868e96", "off, all_to_all": "#ced4da", "on, 1 slot": "#d9480f", "on, 2 slots": "#f59f00"}
    bar, gap, top, height, left = 22, 26, 40, 240, 50
    parts, x = [], left + gap
    text, small = (f'font-family="sans-serif" font-size="{size}" fill="#333"' for size in (12, 9))
    for routing, shares in groups.items():
        begin = x
        for mode, color in colors.items():
            if mode in shares:
                size = height * shares[mode] / 1.05
                y = top + height - size
                parts.append(f'<rect x="{x}" y="{y:.1f}" width="{bar - 3}" height="{size:.1f}" fill="{color}"/>')
                parts.append(f'<text x="{x - 2}" y="{y - 4:.1f}" {small}>{shares[mode]:.2f}</text>')
                x += bar
        middle = (begin + x) / 2
        parts.append(f'<text x="{middle:.0f}" y="{top + height + 18}" text-anchor="middle" {text}>{routing}</text>')
        x += gap
    ceiling = top + height - height / 1.05
    parts.append(f'<line x1="{left}" x2="{x}" y1="{ceiling:.1f}" y2="{ceiling:.1f}" stroke="#2b8a3e"/>')
    parts.append(f'<text x="{left}" y="{top - 16}" {text}>tokens/s over force-balanced (green)</text>')
    for number, (mode, color) in enumerate(colors.items()):
        at = left + 130 * number
        parts.append(f'<rect x="{at}" y="{top + height + 32}" width="12" height="12" fill="{color}"/>')
        parts.append(f'<text x="{at + 17}" y="{top + height + 42}" {text}>{mode}</text>')
    size = f"0 0 {max(x, left + 560)} {top + height + 60}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{size}" role="img">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else results_folder() / "train-h200-ep8"
    reference = json.loads((HERE / "reference.json").read_text())
    found = read(folder)
    if not found:
        sys.exit(f"{folder} has no results: run run.sh first")
    rows, lines = table(found, reference), verdicts(found, reference)
    (folder / "table.md").write_text(rows + "\n" + "\n".join(lines) + "\n")
    (folder / "table.svg").write_text(figure(found, reference))
    print(rows, *lines, sep="\n")


if __name__ == "__main__":
    main()
