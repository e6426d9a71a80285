"""The simulator's presets against steps that `equipoise bench balance` measured, on a machine not at hand any more.

    python benchmarks/simulate_against.py benchmarks/results/balance-h200x2.json --hardware h200 --tokens 8192
    python benchmarks/simulate_against.py benchmarks/results/balance-h200-ep2.json --tokens 16384 --recipe h200-ep2 \\
        --layers 2

A preset knows nothing of attention, loss and optimizer: that rest of a step is taken from one row, the balanced load
with balancing off, or the same as routing forced even. A preset's time for planning is that of the device; a run that
planned on the host says how long it took (`plan_s_per_step`), and that of the balanced load is taken in its place. All
other rows are predicted from the loads that were laid down. (`simulate_cpu.py` fits all rates to loads of the same run
instead.)

Files of `balance_gpu.py` do not say their model: a recipe and the number of layers do.

Writes rows and `simulate_error_max_NAME`, NAME as in the file's name, into benchmarks/results/observe.json, and what
the error is with the preset's time for planning, `simulate_error_max_NAME_preset`; with --replace into the file that is
there, whose other keys stay. Loads of the router's own choice are not in such a file, so they are left out.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from equipoise.balance.protocol import PlannerSettings
from equipoise.bench.balance import FORCED, NATURAL, OFF, ON
from equipoise.bench.results import parse_options, results_file, update_results
from equipoise.moe.synthetic import Workload
from equipoise.simulate.hardware import ExpertSize, Hardware, load_hardware
from equipoise.simulate.loads import exact_loads
from equipoise.simulate.run import simulate, summarize
from equipoise.train.config import TrainConfig
from equipoise.train.load import load_config


def layers_s(row: dict[str, Any], summary: dict[str, Any], hardware: Hardware, tokens: int) -> float:
    """Seconds of a step's MoE layers, in all of its microbatches of `tokens` on each rank."""
    model, balance = summary["model"], summary["balance"]
    expert = ExpertSize(model["hidden_size"], model["moe_intermediate_size"])
    imbalance = 1.0 if row["workload"] == "balanced" else row.get("imbalance") or summary["imbalance"]
    sizes = model["num_experts"], model["num_experts_per_tok"], summary["ep_size"]
    blocks = exact_loads(Workload(row["workload"], imbalance, *sizes), tokens, model["num_hidden_layers"], 1)
    slots = row.get("slots") or balance["num_redundant_experts_per_rank"]
    limits = (balance["tolerance"], balance["min_tokens"], balance["domain_size"], balance["copy_tokens"])
    settings = PlannerSettings(slots, *limits)
    planner = {OFF: OFF, FORCED: FORCED}.get(row["mode"], balance["planner"])
    frame = simulate(blocks, planner, settings, hardware=hardware, expert=expert)
    microbatches = summary["tokens_per_step"] / (summary["world_size"] * tokens)
    return microbatches * summarize(frame, hardware, expert, slots)["step_s"]


def of_balance_gpu(content: dict[str, Any], recipe: str, layers: int, tokens: int) -> dict[str, Any]:
    """A file of `balance_gpu.py` in the form of `equipoise bench balance`."""
    config = load_config(TrainConfig, recipe)
    assert config.balance is not None
    hardware = content["hardware"]
    summary = {
        "model": config.model.model_dump() | {"num_hidden_layers": layers},
        "balance": config.balance.model_dump() | {"copy_tokens": hardware["copy_tokens"]},
        "ep_size": hardware["devices"],
        "world_size": hardware["devices"],
        "tokens_per_step": hardware["devices"] * tokens,
    }
    seconds = {"step_s": "step_ms", "step_s_min": "step_ms_min", "step_s_max": "step_ms_max"}
    rows = [
        row | {ours: row[theirs] / 1e3 for ours, theirs in seconds.items()}
        for row in content["rows"]
        if row["mode"] in (OFF, ON, FORCED)
    ]
    return {"summary": summary, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path, help="file of `equipoise bench balance` or of balance_gpu.py")
    parser.add_argument("--hardware", default="h200", help="preset, or a calibration file")
    parser.add_argument("--tokens", type=int, required=True, help="of each rank in a microbatch of that run")
    parser.add_argument("--recipe", help="of a file of balance_gpu.py")
    parser.add_argument("--layers", type=int, help="of a file of balance_gpu.py")
    options = parse_options(parser)
    content, hardware = json.loads(options.results.read_text()), load_hardware(options.hardware)
    if options.recipe:
        content = of_balance_gpu(content, options.recipe, options.layers, options.tokens)
    summary, name = content["summary"], options.results.stem.removeprefix("balance-")
    measured = {(row["workload"], row["mode"]): row for row in content["rows"] if row["workload"] != NATURAL}
    preset = {key: layers_s(row, summary, hardware, options.tokens) for key, row in measured.items()}
    layers = preset
    even = ("balanced", OFF) if ("balanced", OFF) in measured else next(key for key in measured if key[1] == FORCED)
    plan_s = measured.get(("balanced", ON), {}).get("plan_s_per_step", 0.0)
    if plan_s:
        microbatches = summary["tokens_per_step"] / summary["world_size"] / options.tokens
        times = microbatches * summary["model"]["num_hidden_layers"]
        on_host = replace(hardware, balance_s=plan_s / times)
        layers = {key: layers_s(row, summary, on_host, options.tokens) for key, row in measured.items()}
    rest = measured[even]["step_s"] - layers[even]
    part, rows, errors = f"simulate {name}", [], []
    for key, row in measured.items():
        predicted, seconds = rest + layers[key], row["step_s"]
        errors.append(abs((rest + preset[key]) / seconds - 1))
        spread = row["step_s_max"] / row["step_s_min"] - 1
        rows.append(
            {"part": part, "workload": key[0], "mode": key[1], "predicted_s": predicted, "measured_s": seconds}
            | {"spread": spread, "error": predicted / seconds - 1, "preset_s": rest + preset[key], "rest_s": rest}
        )
        figures = f"{1e3 * seconds:8.1f} ms, predicted {1e3 * predicted:8.1f} ms {predicted / seconds - 1:+7.1%}"
        print(f"{key[0]:12} {key[1]:8} {figures}, spread {spread:.0%}")
    worst = {f"simulate_error_max_{name}": max(abs(row["error"]) for row in rows)}
    worst |= {f"simulate_error_max_{name}_preset": max(errors)}
    out = update_results(results_file(options, "observe.json"), [part], rows, worst, ["equipoise", "numba"])
    print(json.dumps(worst), f"\nwritten to {out}")


if __name__ == "__main__":
    main()
