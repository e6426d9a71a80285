"""What replaying graphs gains for a model that the host is too slow for: `moe-100m` on one GPU, with kernels launched
one by one and with `train.cuda_graph`.

Every mode is a run of `equipoise train` of its own, and they take turns. The speed is by the wall clock, from one line
of metrics.jsonl to another: data, optimizer and whatever lies between steps count.

Run: python benchmarks/small_model_gpu.py   (writes benchmarks/results/small-model-h200.json)
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from equipoise.accelerator import get_accelerator
from equipoise.bench.results import device_word, parse_options, results_file, write_results

MODES = {
    "launches": ("--train.no-cuda-graph",),
    "graph": ("--train.cuda-graph",),
    "launches, compiled": ("--train.no-cuda-graph", "--train.compile"),
    "graph, compiled": ("--train.cuda-graph", "--train.compile"),
}


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file that is being written."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def run(mode: str, first: int, last: int, folder: Path) -> dict[str, Any]:
    """Times the steps after `first` up to `last`. Trains a little longer, since a run's last line waits for its
    evaluation."""
    command = [sys.executable, "-m", "equipoise", "train", "moe-100m", "--nproc-per-node", "1", "--out", str(folder)]
    command += ["--train.steps", str(last + 2), "--train.eval-every", "0", *MODES[mode]]
    seen: dict[int, float] = {}
    with (folder.parent / "errors").open("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        while process.poll() is None and last not in seen:
            for step in range(len(seen) + 1, len(lines_of(folder / "metrics.jsonl")) + 1):
                seen[step] = time.perf_counter()
            time.sleep(0.001)
        if process.wait() != 0:
            errors.seek(0)
            sys.exit(f"{mode}: the run failed\n{errors.read()}")
    records = lines_of(folder / "metrics.jsonl")
    seconds = seen[last] - seen[first]
    device_s = [record["time_step_s"] for record in records[first:last]]
    return {
        "mode": mode,
        "tokens_per_second": (last - first) * records[0]["tokens"] / seconds,
        "step_s_wall": seconds / (last - first),
        "step_s_device_median": statistics.median(device_s),
        "losses": {str(step): records[step - 1]["loss"] for step in (1, 10, last)},
        "memory_peak_bytes": records[-1]["memory_peak_bytes"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps that are timed")
    parser.add_argument("--warm-up", type=int, default=40, help="steps before them")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), metavar="MODE")
    options = parse_options(parser)
    rows = []
    for number in range(options.rounds):
        for mode in options.modes:
            with tempfile.TemporaryDirectory() as folder:
                rows.append(run(mode, options.warm_up, options.warm_up + options.steps, Path(folder) / "run"))
            rows[-1]["round"] = number
            print(rows[-1], flush=True)
    speed = {
        mode: statistics.median(row["tokens_per_second"] for row in rows if row["mode"] == mode)
        for mode in options.modes
    }
    summary: dict[str, Any] = {"tokens_per_second": speed}
    if "launches" in speed:
        summary["over_launches"] = {mode: value / speed["launches"] for mode, value in speed.items()}
    name = get_accelerator().device_name()
    out = results_file(options, f"small-model-{device_word(name)}.json")
    print(summary, "written to", write_results(out, rows, summary, ["torch", "triton"], {"accelerator": name}))


if __name__ == "__main__":
    main()
