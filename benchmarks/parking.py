"""What parking all process groups gives back, and what it costs: memory, files, threads, seconds.

Every process trains a step, parks, unparks, and so on. Before each measurement garbage is collected and the allocators
of host and device give back what they only keep, so that freed memory is the communicators'. The same steps without
parking come first: their losses must be equal to the bit. With accelerators (one for each process) memory is the
device's as the driver counts it; otherwise it is the resident memory of the process.

Run: python benchmarks/parking.py --name parking-cpu --processes 4   (writes benchmarks/results/parking-cpu.json)
"""

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from equipoise.bench.results import parse_options, results_file, write_results

MODEL = {
    "vocab_size": 512,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
    "router_aux_loss_scope": "global_batch",
}
LENGTH, LR, MIB = 64, 1e-3, 2**20


def resources(accelerator) -> dict[str, float]:
    """Open files, threads, resident memory and, of an accelerator, memory in use on the device (MiB)."""
    from equipoise.accelerator.host_memory import give_back_freed, resident

    gc.collect()
    give_back_freed()  # the C library's free lists, which grow with the threads of each cycle
    accelerator.synchronize()
    accelerator.empty_cache()
    memory = accelerator.memory()
    on_device = accelerator.device_type != "cpu"
    return {
        "files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "resident_mib": resident() / MIB,
        "memory_mib": (memory.total - memory.free if on_device else resident()) / MIB,
    }


class Training:
    """One rank's share of a training over the axes of expert parallelism and FSDP."""

    def __init__(self, world, ep_size: int) -> None:
        from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
        from equipoise.models.config import ModelConfig
        from equipoise.models.parallelize import build_parallel_model
        from equipoise.train.optimizer import OptimizerConfig, build_optimizer
        from equipoise.train.step import TrainStep
        from equipoise.train.timing import PhaseTimer

        config = ModelConfig(**MODEL)
        sizes = derive_axes(ParallelConfig(ep_size=ep_size), world.size, config.num_experts)
        self.world, self.meshes, self.timer = world, build_meshes(sizes, world), PhaseTimer(world.accelerator)
        self.model = build_parallel_model(config, self.meshes, world.device, seed=0)
        optimizer = build_optimizer(self.model, OptimizerConfig(lr=LR))
        self.runner = TrainStep(self.model, optimizer, self.meshes, world.device, self.timer, max_grad_norm=1.0)

    def step(self, index: int) -> float:
        """The loss of one optimizer step."""
        import torch

        from equipoise.data import Batch

        generator = torch.Generator().manual_seed(self.world.size * index + self.world.rank)
        ids = torch.randint(0, MODEL["vocab_size"], (1, LENGTH + 1), generator=generator)
        num_tokens = LENGTH * self.world.size
        self.timer.start_step()
        batch = Batch(ids[:, :-1], ids[:, 1:].contiguous(), None, None, LENGTH, LENGTH)
        sums, counts = self.runner.forward_backward([batch], num_tokens)
        result, norm = self.runner.reduce(sums, counts, num_tokens, stop=False)
        self.runner.update(result, norm, LR)
        self.timer.finish_step()
        return result.loss


def work(ep_size: int, cycles: int) -> dict[str, Any]:
    """Body of one process."""
    import torch
    from torch import distributed as dist

    from equipoise.accelerator import get_accelerator
    from equipoise.distributed import join_world, park, unpark

    torch.use_deterministic_algorithms(True, warn_only=True)
    accelerator = get_accelerator()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, size, rank == 0, timedelta(seconds=120))
    with join_world(accelerator, timeout_s=120, store=store) as world:
        training = Training(world, ep_size)
        plain, memory = [training.step(0)], []
        for cycle in range(1, cycles + 1):
            memory.append(resources(accelerator)["resident_mib"])
            plain.append(training.step(cycle))
    del training, world
    gc.collect()
    rows = []
    with join_world(accelerator, timeout_s=120, store=store) as world:
        training = Training(world, ep_size)
        losses = [training.step(0)]
        for cycle in range(1, cycles + 1):
            live = resources(accelerator)
            dist.barrier(group=world.group)
            start = time.perf_counter()
            park(world, training.model, training.meshes)
            parked_at = time.perf_counter()
            parked = resources(accelerator)
            dist.barrier()
            waited = time.perf_counter()
            unpark(world)
            unparked_at = time.perf_counter()
            losses.append(training.step(cycle))
            accelerator.synchronize()
            row = {"cycle": cycle, "park_s": parked_at - start, "unpark_s": unparked_at - waited}
            row["first_step_s"] = time.perf_counter() - unparked_at
            rows.append(row | {"live": live, "parked": parked})
        groups, device = len(world.groups.names()), accelerator.device_name()
        backend = world.groups.backend
    return {
        "rows": rows,
        "equal": losses == plain,
        "resident_mib_without_parking": memory,
        "groups": groups,
        "backend": backend,
        "device": device,
    }


def start(processes: int, cycles: int, ep_size: int) -> list[dict[str, Any]]:
    """Runs the body in processes of its own; what each of them found."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    shared = {"WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    with tempfile.TemporaryDirectory() as folder:
        started = []
        for rank in range(processes):
            variables = shared | {"RANK": rank, "LOCAL_RANK": rank, "OMP_NUM_THREADS": 1}
            env = os.environ | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} | {k: str(v) for k, v in variables.items()}
            command = [sys.executable, __file__, "--cycles", str(cycles), "--ep-size", str(ep_size)]
            started.append(subprocess.Popen([*command, "--work", str(Path(folder) / str(rank))], env=env))
        codes = [process.wait(timeout=580) for process in started]
        if any(codes):
            raise SystemExit(f"ranks ended with exit codes {codes}")
        return [json.loads((Path(folder) / str(rank)).read_text()) for rank in range(processes)]


def summarize(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over cycles, of the rank that is worst; the first cycle is warm-up.

    Growth is over the second half of the cycles, as the allocator of the host needs some to settle; that of the same
    steps without parking stands beside it.
    """

    half = len(ranks[0]["rows"]) // 2
    without = [rank["resident_mib_without_parking"] for rank in ranks]

    def worst(value) -> float:
        return max(statistics.median(value(row) for row in rank["rows"][1:]) for rank in ranks)

    def growth(state: str, key: str) -> float:
        return max(rank["rows"][-1][state][key] - rank["rows"][half][state][key] for rank in ranks)

    medians = {key: worst(lambda row, key=key: row[key]) for key in ("park_s", "unpark_s", "first_step_s")}
    freed = {
        key: min(statistics.median(r["live"][key] - r["parked"][key] for r in rank["rows"][1:]) for rank in ranks)
        for key in ("memory_mib", "files", "threads")
    }
    return {
        "freed_mib": freed["memory_mib"],
        **medians,
        "freed_files": freed["files"],
        "freed_threads": freed["threads"],
        "growth_resident_mib_without_parking": max(memory[-1] - memory[half] for memory in without),
        "growth": {
            f"{state}_{key}": growth(state, key)
            for state in ("live", "parked")
            for key in ("files", "threads", "resident_mib", "memory_mib")
        },
        "equal_to_training_without_parking": all(rank["equal"] for rank in ranks),
        "processes": len(ranks),
        "cycles": len(ranks[0]["rows"]),
        "groups": ranks[0]["groups"] + 1,
        "backend": ranks[0]["backend"],
        "memory_of": "device" if ranks[0]["backend"] != "gloo" else "process",
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="parking-cpu", help="name of the results file")
    parser.add_argument("--processes", type=int, default=4, help="ranks; at most one for each accelerator")
    parser.add_argument("--ep-size", type=int, default=2, help="ranks that share one set of experts")
    parser.add_argument("--cycles", type=int, default=20)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parse_options(parser)
    if options.work:
        options.work.write_text(json.dumps(work(options.ep_size, options.cycles)))
        return
    ranks = start(options.processes, options.cycles, options.ep_size)
    summary = summarize(ranks)
    rows = [{"rank": rank, **row} for rank, found in enumerate(ranks) for row in found["rows"]]
    on_device = summary["memory_of"] == "device"
    hardware = {"device": ranks[0]["device"], "devices": options.processes} if on_device else {}
    out = results_file(options, f"{options.name}.json")
    path = write_results(out, rows, summary, ["torch", "equipoise"], hardware)
    print(json.dumps(summary, indent=1), f"\nwritten to {path}")
    if not summary["equal_to_training_without_parking"]:
        raise SystemExit("training through parking differs from training without it")


if __name__ == "__main__":
    main()
