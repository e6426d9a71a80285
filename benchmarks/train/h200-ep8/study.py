"""One routing of the study in README.md: parity, then off, on (1 and 2 slots), forced and off over `all_to_all` in
turns, then a profile of on. Writes its file after every round, so that a run that is cut short leaves what it has.

Run by run.sh.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from balance_gpu import Bench, Mode, benchmark_config, symmetric_bytes
from exposed_gpu import profiled

from equipoise.accelerator import get_accelerator
from equipoise.bench.hot_experts import HotExperts
from equipoise.bench.results import write_results
from equipoise.distributed.world import World, join_world
from equipoise.errors import RankFailure
from equipoise.moe.synthetic import Workload
from equipoise.train.config import plan_run
from equipoise.train.stop import StopSignals

NATURAL = "natural"
ROUND = 5
"""Steps of a mode's turn."""
PARITY = 2e-2
"""Largest relative difference of loss and gradient norm between on and off, in BF16."""


def modes_of(bench: Bench) -> dict[str, Mode]:
    off, one, forced = bench.modes(1)
    collective = Mode("off, all_to_all", bench.dispatcher("all_to_all", bench.config.model.num_experts, 0), None)
    return {"off": off, "on, 1 slot": one, "on, 2 slots": bench.modes(2)[1], "forced": forced} | {
        collective.name: collective
    }


def parity(bench: Bench, modes: dict[str, Mode], workload: Any) -> dict[str, float]:
    """The largest relative difference of loss and gradient norm from off, by mode.

    Raises:
        RankFailure: more than `PARITY`. On all ranks.
    """
    values: dict[str, tuple[float, float]] = {}
    for name in ("off", "on, 1 slot", "on, 2 slots"):
        bench.switch(modes[name])
        for layer in bench.layers:
            layer.gate.synthetic = None if workload is None else workload.routing(0, bench.rank)
        bench.trainer.timer.start_step()
        sums, counts = bench.trainer.step_runner.forward_backward(bench.batches[0], bench.tokens)
        result, norm = bench.trainer.step_runner.reduce(sums, counts, bench.tokens, stop=False)
        bench.trainer.step_runner.update(result, norm, lr=0.0)
        values[name] = result.loss, result.grad_norm
    found = {name: max(abs(a / b - 1) for a, b in zip(values[name], values["off"])) for name in values if name != "off"}
    if max(found.values()) > PARITY:
        raise RankFailure(f"on and off differ by {found}, more than {PARITY}: nothing is measured")
    return found


def row_of(name: str, turns: list[dict[str, Any]], bench: Bench, mode: Mode) -> dict[str, Any]:
    ms = [value for turn in turns for value in turn["ms"]]
    return {
        "mode": name,
        "step_s": statistics.median(ms) / 1000,
        "steps": len(ms),
        "tokens_per_second": bench.tokens / statistics.median(ms) * 1000,
        "memory_peak_gb": (max(turn["peak"] for turn in turns) + symmetric_bytes(mode)) / 1e9,
        "imbalance_before": turns[-1]["imbalance"],
        "imbalance_after": turns[-1]["planned"],
        "copies_per_step": turns[-1]["copies"],
    }


def study(world: World, stop: StopSignals, options: argparse.Namespace) -> None:
    started = time.monotonic()
    config = benchmark_config(options.recipe, options.layers, real_text=options.routing == NATURAL)
    model, ep = config.model, plan_run(config, world.size).axes.ep
    torch.manual_seed(0)
    bench = Bench(config, world, stop, Path(tempfile.mkdtemp()))
    even = Workload("balanced", 1.0, model.num_experts, model.num_experts_per_tok, ep)
    workload = None
    if options.routing != NATURAL:
        workload = HotExperts(float(options.routing), model.num_experts, model.num_experts_per_tok, ep)
    modes = modes_of(bench)
    summary: dict[str, Any] = {"routing": options.routing, "parity": parity(bench, modes, workload)}
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in modes}
    name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
    hardware = {"device": name, "devices": world.size}
    for _ in range(-(-options.steps // ROUND)):
        # Ranks agree on going on: the slowest one's clock counts.
        used = torch.tensor([time.monotonic() - started], device=world.device)
        torch.distributed.all_reduce(used, torch.distributed.ReduceOp.MAX, group=bench.trainer.meshes.world_group)
        if turns["off"] and float(used) > 0.75 * options.limit_s:
            break
        for mode in modes:
            turns[mode].append(bench.turn(modes[mode], workload, even, ROUND))
        rows = [row_of(mode, turns[mode], bench, modes[mode]) for mode in modes]
        of = {row["mode"]: row["tokens_per_second"] for row in rows}
        summary |= {"of_forced": {mode: rate / of["forced"] for mode, rate in of.items()}}
        if world.rank == 0:
            write_results(options.out, rows, summary, ("torch", "triton"), hardware)
            print(summary, flush=True)
    if world.device.type == "cuda":
        summary["profile"] = profiled(bench, modes["on, 1 slot"], workload, even)["transfers"]
        if world.rank == 0:
            write_results(options.out, rows, summary, ("torch", "triton"), hardware)
    if world.rank == 0:
        for row in rows:
            print(row, flush=True)
    bench.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("routing", help=f"{NATURAL}, or the hot rank's load over the mean")
    parser.add_argument("--recipe", default="h200-ep8")
    parser.add_argument("--layers", type=int, default=0, help="0: the recipe's")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=570.0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with StopSignals() as stop, join_world(get_accelerator(), 120.0) as world:
        study(world, stop, options)


if __name__ == "__main__":
    main()
