"""Times `equipoise view` on a generated trace of 10,000 steps x 60 layers x 256 experts, in headless Chromium.

    python benchmarks/view.py --folder FOLDER [--repeats 5] [--steps 10000] [--layers 60] [--experts 256] [--ranks 8]

Generates FOLDER/big once (several GB: every step with its matrices, and metrics), starts the command, opens the page
and several layers, and writes its three keys into the summary of benchmarks/results/observe.json; with --replace into
the file that is there, whose other keys stay.

first_page_s: from asking for the page to all of its figures on the screen, the first time that anybody asks this
server, in a browser that has just been started. Median over repeats, each with a server and a browser of its own.
drilldown_s: from choosing a layer and step to all of its figures on the screen, the slowest of several, the first
included; some before plotly's script has been asked for, some after. Median over repeats. How long plotly takes until
the figures answer to the pointer, at first and later, are rows of their own.
server_memory_gb: the most resident memory that any server has had.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from equipoise.bench.results import parse_options, results_file, update_results
from equipoise.observe.schema import TraceInfo
from equipoise.observe.tables import LayerRows
from equipoise.observe.writer import TraceWriter

SKETCHED = ((0, 1), (17, 5000), (59, 10_000))
WITH_PLOTLY = ((30, 7777), (3, 42), (44, 9001))
"""Layers and steps that are looked at, before and after plotly's script was started."""
TAKEN = "() => document.body.dataset.interactive === document.body.dataset.drawn"
DRAWN = "() => Number(document.body.dataset.drawn || 0)"


def generate(folder: Path, steps: int, layers: int, experts: int, ranks: int) -> None:
    """A run with loads that drift, one slot per rank, and every step with matrices. Plans are made up: each rank's slot
    takes a part of the hottest expert's rows of the fullest rank."""
    M, I = experts // ranks, experts // ranks + 1
    info = TraceInfo(layers, experts, 8, ranks, num_slots=1, hidden_size=7168, dtype="bfloat16", planner="made up")
    random = np.random.default_rng(0)
    pool = random.poisson(random.gamma(2.0, 64.0, (1, layers, 1, experts)), (16, layers, ranks, experts))
    partial = folder.with_name(folder.name + ".tmp")
    partial.mkdir(parents=True)
    with TraceWriter(partial / "trace", info) as writer:
        for step in range(1, steps + 1):
            load_LPE = np.roll(pool[step % 16], (step // 500) % layers, axis=0) + random.integers(
                0, 8, (layers, 1, experts)
            )
            load_LE = load_LPE.sum(1)
            delivered = np.zeros((layers, ranks, I), np.int64)
            delivered[:, :, :M] = load_LE.reshape(layers, ranks, M)
            rank_LP = delivered.sum(2)
            fullest, emptiest = rank_LP.argmax(1), rank_LP.argmin(1)
            at = np.arange(layers)
            local = delivered[at, fullest, :M].argmax(1)
            moved = np.minimum((rank_LP[at, fullest] - rank_LP[at, emptiest]) // 2, delivered[at, fullest, local])
            delivered[at, fullest, local] -= moved
            delivered[at, emptiest, M] = moved
            slots = np.full((layers, ranks), -1)
            slots[at, emptiest] = fullest * M + local
            writer.write_layers(LayerRows(step, 0, 0, load_LPE, delivered, slots, delivered.reshape(layers, -1)))
    with open(partial / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = {
                "step": step,
                "loss": 2 + 9 / step**0.3,
                "tokens_per_second": 1e5 + step % 100,
                "time_step_s": 0.1,
            }
            per_layer = [round(1 + 0.01 * ((step + layer) % 97), 4) for layer in range(layers)]
            names = ("rank_imbalance", "expert_maxvio", "dead_experts")
            file.write(json.dumps(record | {"layers": dict.fromkeys(names, per_layer)}) + "\n")
    partial.rename(folder)


def most_memory(pid: int) -> float:
    """GB."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) * 1024 / 1e9


def _wait(page: Any, drawn: int) -> None:
    """Until more than `drawn` views have been drawn and shown; looks every 10 ms."""
    page.wait_for_function("(drawn) => Number(document.body.dataset.drawn || 0) > drawn", arg=drawn, polling=10)
    page.evaluate("() => new Promise((resolve) => requestAnimationFrame(() => setTimeout(resolve)))")


def _look(page: Any, layer: int, step: int) -> float:
    """Seconds of one look at a layer."""
    drawn = page.evaluate(DRAWN)
    began = time.perf_counter()
    page.evaluate(f"location.hash = 'view=layer&run=0&layer={layer}&step={step}'")
    _wait(page, drawn)
    return time.perf_counter() - began


def measure(run: Path, chromium: str | None) -> list[dict[str, Any]]:
    """Rows of the results: one for the first page, one for each look at a layer, one for the memory."""
    from playwright.sync_api import sync_playwright

    started = time.perf_counter()
    command = [sys.executable, "-m", "equipoise", "view", str(run), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        lines = iter(server.stdout.readline, "")
        address = next(line for line in lines if line.startswith("http")).strip()
        start_s = time.perf_counter() - started
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page()
            began = time.perf_counter()
            page.goto(address)
            _wait(page, 0)
            rows = [{"what": "first page", "seconds": time.perf_counter() - began, "command_start_s": start_s}]
            for layer, step in SKETCHED:
                rows.append({"what": f"layer {layer}, step {step}", "seconds": _look(page, layer, step)})
            began = time.perf_counter()
            page.locator("#stacks").hover()
            page.wait_for_function(TAKEN, polling=10)
            rows.append({"what": "plotly starts and takes over", "seconds": time.perf_counter() - began})
            for layer, step in WITH_PLOTLY:
                rows.append({"what": f"layer {layer}, step {step}, with plotly", "seconds": _look(page, layer, step)})
            began = time.perf_counter()
            page.wait_for_function(TAKEN, polling=10)
            rows.append({"what": "plotly takes over", "seconds": time.perf_counter() - began})
            browser.close()
        rows.append({"what": "server memory", "gb": most_memory(server.pid)})
        return rows
    finally:
        server.terminate()
        server.wait(10)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the generated run, which is kept")
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--layers", type=int, default=60)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument(
        "--chromium", default=shutil.which("chromium"), help="path of the browser; default: %(default)s"
    )
    parser.add_argument("--repeats", type=int, default=5, help="servers and browsers that are started")
    options = parse_options(parser)
    run = options.folder / "big"
    if not run.exists():
        generate(run, options.steps, options.layers, options.experts, options.ranks)
    turns = [measure(run, options.chromium) for _ in range(options.repeats)]
    looks = [[row["seconds"] for row in rows if row["what"].startswith("layer")] for rows in turns]
    summary = {
        "first_page_s": median(rows[0]["seconds"] for rows in turns),
        "drilldown_s": median(map(max, looks)),
        "server_memory_gb": max(rows[-1]["gb"] for rows in turns),
    }
    trace_bytes = sum(path.stat().st_size for path in (run / "trace").iterdir())
    sizes = {"steps": options.steps, "layers": options.layers, "experts": options.experts, "ranks": options.ranks}
    print(
        json.dumps(
            summary | {"drilldown_median_s": median(x for turn in looks for x in turn), "trace_gb": trace_bytes / 1e9},
            indent=1,
        )
    )
    mine = [
        {"part": "view", "turn": turn, **sizes, "trace_gb": trace_bytes / 1e9, **row}
        for turn, rows in enumerate(turns)
        for row in rows
    ]
    packages = ["equipoise", "numpy", "pyarrow", "starlette", "uvicorn", "plotly", "playwright"]
    print("written to", update_results(results_file(options, "observe.json"), ["view"], mine, summary, packages))


if __name__ == "__main__":
    main()
