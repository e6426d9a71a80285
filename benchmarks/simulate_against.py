"""The simulator's presets against steps that `equipoise bench balance` measured, on a machine not at hand any more.

    python benchmarks/simulate_against.py benchmarks/results/balance-h200x2.json --hardware h200 --tokens 8192

A preset knows nothing of attention, loss and optimizer: that rest of a step is taken from one row, the balanced load
with balancing off, and the other rows are predicted from the loads that were laid down. (`simulate_cpu.py` fits all
rates to loads of the same run instead.) Writes rows and `simulate_error_max_NAME`, NAME as in the file's name, into
benchmarks/results/observe.json; other keys stay. A natural load is not in such a file, so it is left out.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from equipoise.balance.protocol import PlannerSettings
from equipoise.bench.balance import FORCED, NATURAL, OFF
from equipoise.bench.results import results_folder, update_results
from equipoise.moe.synthetic import Workload
from equipoise.simulate.hardware import ExpertSize, Hardware, load_hardware
from equipoise.simulate.loads import exact_loads
from equipoise.simulate.run import simulate, summarize

REST_FROM = ("balanced", OFF)


def layers_s(row: dict[str, Any], summary: dict[str, Any], hardware: Hardware, tokens: int) -> float:
    """Seconds of a step's MoE layers, in all of its microbatches of `tokens` on each rank."""
    model, balance = summary["model"], summary["balance"]
    expert = ExpertSize(model["hidden_size"], model["moe_intermediate_size"])
    imbalance = 1.0 if row["workload"] == "balanced" else summary["imbalance"]
    sizes = model["num_experts"], model["num_experts_per_tok"], summary["ep_size"]
    blocks = exact_loads(Workload(row["workload"], imbalance, *sizes), tokens, model["num_hidden_layers"], 1)
    slots = balance["num_redundant_experts_per_rank"]
    limits = (balance["tolerance"], balance["min_tokens"], balance["domain_size"], balance["copy_tokens"])
    settings = PlannerSettings(slots, *limits)
    planner = {OFF: OFF, FORCED: FORCED}.get(row["mode"], balance["planner"])
    frame = simulate(blocks, planner, settings, hardware=hardware, expert=expert)
    microbatches = summary["tokens_per_step"] / (summary["world_size"] * tokens)
    return microbatches * summarize(frame, hardware, expert, slots)["step_s"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="file of `equipoise bench balance`")
    parser.add_argument("--hardware", default="h200", help="preset, or a calibration file")
    parser.add_argument("--tokens", type=int, required=True, help="of each rank in a microbatch of that run")
    parser.add_argument("--out", type=Path, default=results_folder() / "observe.json")
    options = parser.parse_args()
    content, hardware = json.loads(options.results.read_text()), load_hardware(options.hardware)
    summary, name = content["summary"], options.results.stem.removeprefix("balance-")
    measured = [row for row in content["rows"] if row["workload"] != NATURAL]
    predicted = [layers_s(row, summary, hardware, options.tokens) for row in measured]
    rests = {(row["workload"], row["mode"]): row["step_s"] - layers for row, layers in zip(measured, predicted)}
    rest = rests[REST_FROM]
    part, rows = f"simulate {name}", []
    for row, layers in zip(measured, predicted):
        error = (rest + layers) / row["step_s"] - 1
        spread = row["step_s_max"] / row["step_s_min"] - 1
        rows.append(
            {"part": part, "workload": row["workload"], "mode": row["mode"], "predicted_s": rest + layers}
            | {"measured_s": row["step_s"], "spread": spread, "error": error, "rest_s": rest, "layers_s": layers}
        )
        figures = f"{1e3 * row['step_s']:8.1f} ms, predicted {1e3 * (rest + layers):8.1f} ms {error:+7.1%}"
        print(f"{row['workload']:12} {row['mode']:8} {figures}, spread {spread:.0%}")
    key = f"simulate_error_max_{name}"
    worst = max(abs(row["error"]) for row in rows)
    update_results(options.out, [part], rows, {key: worst}, ["equipoise", "numba"])
    print(json.dumps({key: worst}))


if __name__ == "__main__":
    main()
