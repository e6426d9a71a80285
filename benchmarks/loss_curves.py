"""Loss curves of training with balancing on and off: same recipe, seed and text, overlaid in a figure.

Every mode is a run of `equipoise train` of its own; options behind `--` go to both. The largest difference of the
losses of a step is in the summary, the first step at which they are apart, and whether both fell without a NaN (last
tenth of the steps below the first).

Run: python benchmarks/loss_curves.py demo --nproc 2 --steps 300   (writes
benchmarks/results/loss-curves-demo.json and .svg; h200-ep2 on two GPUs)
"""

import argparse
import contextlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from equipoise.bench.results import free_unless, parse_options, results_file, write_results

MODES = {"off": ("--balance", "none"), "on": ("--balance.num-redundant-experts-per-rank",)}
COLORS = {"off": "#1f5fbf", "on": "#d9480f"}
APART = 1e-4
"""A difference beyond the rounding of single steps; from there on the two runs route tokens differently."""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 60, 20, 40, 45


def start(recipe: str, num_ranks: int, steps: int, mode: str, slots: int, more: list[str], folder: Path) -> Any:
    """One run, whose step records and last words are in `folder`."""
    chosen = [*MODES[mode], str(slots)] if mode == "on" else list(MODES[mode])
    command = [sys.executable, "-m", "equipoise", "train", recipe, "--nproc-per-node", str(num_ranks)]
    command += ["--out", str(folder / "run"), "--train.steps", str(steps), "--train.eval_every", "0", *chosen, *more]
    with (folder / "errors").open("wb") as errors:
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)


def descendants(pid: int) -> list[int]:
    """Processes that this one has started, and those that they have; none where there is no /proc."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = list(parents.get(pid, []))
    for child in found:  # which grows
        found += parents.get(child, [])
    return found


def end(process: Any) -> None:
    """Kills a run and its ranks: these have sessions of their own and would outlive their launcher."""
    for pid in (process.pid, *descendants(process.pid)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def step_records(process: Any, folder: Path, limit_s: float) -> list[dict]:
    """What a run has recorded when it ends, or at the limit, where it is ended.

    Raises:
        SystemExit: it failed, or had recorded nothing by then; with the end of what it said.
    """
    failed = False
    try:
        failed = process.wait(limit_s) != 0
    except subprocess.TimeoutExpired:
        end(process)
    lines = []
    with contextlib.suppress(FileNotFoundError):
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines(keepends=True)
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    records = [record for record in records if "loss" in record]
    if failed or not records:
        raise SystemExit(f"a run failed:\n{(folder / 'errors').read_text(errors='replace')[-3000:]}")
    return records


def curve(losses: list[float], low: float, high: float) -> str:
    """Points of a polyline."""
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    x = lambda i: LEFT + across * i / max(len(losses) - 1, 1)  # noqa: E731
    y = lambda loss: TOP + down * (high - loss) / max(high - low, 1e-9)  # noqa: E731
    return " ".join(f"{x(i):.1f},{y(loss):.1f}" for i, loss in enumerate(losses))


def figure(losses: dict[str, list[float]], title: str) -> str:
    """An SVG of the curves, the later ones dashed so that both are seen where they coincide."""
    low, high = (choose(min(v) if choose is min else max(v) for v in losses.values()) for choose in (min, max))
    text = 'font-family="sans-serif" font-size="13" fill="#333"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="22" {text}>{title}</text>',
    ]
    for tick in range(5):
        value = low + (high - low) * tick / 4
        y = TOP + (HEIGHT - TOP - BOTTOM) * (1 - tick / 4)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end" {text}>{value:.2f}</text>')
    steps = len(next(iter(losses.values())))
    for tick in range(4):
        x = LEFT + (WIDTH - LEFT - RIGHT) * tick / 3
        step = 1 + round((steps - 1) * tick / 3)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 22}" text-anchor="middle" {text}>{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 5}" text-anchor="middle" {text}>step</text>')
    for number, (mode, values) in enumerate(losses.items()):
        dash = ' stroke-dasharray="5 4"' if number else ""
        style = f'fill="none" stroke="{COLORS[mode]}" stroke-width="{2 if number else 3}"{dash}'
        parts.append(f'<polyline points="{curve(values, low, high)}" {style}/>')
        x = WIDTH - RIGHT - 170 + 85 * number
        parts.append(f'<line x1="{x}" x2="{x + 26}" y1="18" y2="18" {style}/>')
        parts.append(f'<text x="{x + 32}" y="22" {text}>{mode}</text>')
    return "\n".join([*parts, "</svg>", ""])


def falls(losses: list[float]) -> bool:
    tenth = max(len(losses) // 10, 1)
    return all(map(math.isfinite, losses)) and statistics.fmean(losses[-tenth:]) < statistics.fmean(losses[:tenth])


def curve_summary(off: list[float], on: list[float]) -> dict[str, Any]:
    """Of the steps that both have."""
    differences = [abs(a - b) for a, b in zip(on, off)]
    return {
        "steps": len(differences),
        "largest_difference": max(differences),
        "first_step_apart": next((step for step, x in enumerate(differences, 1) if x > APART), None),
        "both_fall": falls(off) and falls(on),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--slots", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=600.0, help="of each run; what it has by then is taken")
    parser.add_argument("--at-once", action="store_true", help="both runs on the same devices at the same time")
    split = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    own, more = sys.argv[1:split], sys.argv[split + 1 :]
    options = parse_options(parser, own)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends the runs too
    rows: list[dict[str, Any]] = []
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folders = {mode: Path(name) / mode for mode in MODES}
        running: dict[str, Any] = {}
        try:
            records_of: dict[str, list[dict]] = {}
            for mode, folder in folders.items():
                folder.mkdir()
                running[mode] = start(options.recipe, options.nproc, options.steps, mode, options.slots, more, folder)
                if not options.at_once:
                    records_of[mode] = step_records(running[mode], folder, options.limit_s)
            deadline = time.monotonic() + options.limit_s
            for mode, folder in folders.items():
                if options.at_once:
                    records_of[mode] = step_records(running[mode], folder, max(deadline - time.monotonic(), 0.1))
                records = records_of[mode]
                losses[mode] = [record["loss"] for record in records]
                fields = ("step", "loss", "rank_imbalance", "rank_imbalance_after", "balance_copies")
                rows += [{"mode": mode} | {key: record[key] for key in fields if key in record} for record in records]
                print(f"{mode}: {losses[mode][0]:.4f} -> {losses[mode][-1]:.4f} in {len(records)} steps", flush=True)
        finally:
            for process in running.values():
                if process.poll() is None:
                    end(process)
    summary = curve_summary(losses["off"], losses["on"])
    out = results_file(options, f"loss-curves-{options.recipe}.json")
    write_results(out, rows, summary, ("torch", "triton"))
    title = f"{options.recipe}: training loss, balancing off and on, {summary['steps']} steps"
    both = {mode: values[: summary["steps"]] for mode, values in losses.items()}
    picture = free_unless(options.replace, out.with_suffix(".svg"))
    picture.write_text(figure(both, title))
    print(summary, out, picture, flush=True)


if __name__ == "__main__":
    main()
