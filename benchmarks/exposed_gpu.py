"""Profiles of training steps on two GPUs or more: microseconds per MoE layer of sending weights of replicas to forward
and backward and of bringing gradients home, in all and exposed (while the computing stream runs nothing), and the
kernels' times with balancing off, on, and forced even.

Run: torchrun --nproc-per-node 2 benchmarks/exposed_gpu.py [--layers N]   (writes
benchmarks/results/exposed-h200-ep2.json)
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from balance_gpu import Bench, Mode, benchmark_config
from torch.profiler import ProfilerActivity, profile

from equipoise.accelerator import get_accelerator
from equipoise.bench.exposed import exposures, kernel_times, read_kernels
from equipoise.bench.hot_experts import HotExperts
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import join_world
from equipoise.moe.synthetic import Workload
from equipoise.train.config import plan_run
from equipoise.train.stop import StopSignals

STEPS, MOST, KEPT = 2, 12, 40


def profiled(bench: Bench, mode: Mode, workload: Any, even: Workload) -> dict[str, Any]:
    """Of one mode, per step on this rank; the transfers' per MoE layer too."""
    bench.turn(mode, workload, even, 1)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        bench.turn(mode, workload, even, STEPS, warm_up=0)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        kernels = read_kernels(json.loads(path.read_text()))
    number = STEPS * len(bench.layers)
    found = {name: [x / number for x in exposure] for name, exposure in exposures(kernels).items()}
    times: dict[str, float] = {}
    for kernel, us in kernel_times(kernels).items():
        times[kernel[:90]] = times.get(kernel[:90], 0.0) + us / STEPS
    longest = sorted(times.items(), key=lambda item: -item[1])[:KEPT]
    return {"transfers": found, "kernels": dict(longest)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--recipe", default="h200-ep2")
    parser.add_argument("--imbalance", type=float, default=1.6)
    options = parse_options(parser)
    config = benchmark_config(options.recipe, options.layers)
    rows: list[dict[str, Any]] = []
    with StopSignals() as stop, join_world(get_accelerator(), 120.0) as world:
        model, ep = config.model, plan_run(config, world.size).axes.ep
        torch.manual_seed(0)
        bench = Bench(config, world, stop, Path(tempfile.mkdtemp()))
        even = Workload("balanced", 1.0, model.num_experts, model.num_experts_per_tok, ep)
        hot = HotExperts(options.imbalance, model.num_experts, model.num_experts_per_tok, ep)
        for workload, name in ((hot, f"hot_experts {options.imbalance}"), (None, "natural")):
            for mode in bench.modes(2):
                ranks = gather_json(profiled(bench, mode, workload, even), world)
                row: dict[str, Any] = {"workload": name, "mode": mode.name}
                for key in ranks[0]["transfers"]:
                    total, exposed = (max(rank["transfers"][key][i] for rank in ranks) for i in range(2))
                    row |= {f"{key} us per layer": total, f"{key} exposed us per layer": exposed}
                rows.append(row | {"kernels_us": ranks[0]["kernels"]})
                if world.rank == 0:
                    print(row, flush=True)
                    for kernel, us in list(ranks[0]["kernels"].items())[:MOST]:
                        print(f"    {us:9.0f} {kernel}", flush=True)
        bench.close()
        if world.rank == 0:
            summary = {
                row["workload"]: {k: v for k, v in row.items() if k.endswith("per layer")}
                for row in rows
                if row["mode"] == "on"
            }
            name = torch.cuda.get_device_name() if world.device.type == "cuda" else "cpu"
            out = results_file(options, f"exposed-{device_word(name)}-ep{ep}.json")
            hardware = {"device": name, "devices": world.size}
            print("written to", write_results(out, rows, summary, ("torch", "triton"), hardware), flush=True)


if __name__ == "__main__":
    main()
