"""Training speed on two CPU cores: EP 2 against one process, and one process against transformers.

Every variant trains the same model on the same token stream with AdamW, FP32, one thread per process, each process
pinned to a core of its own. All variants are started and warmed up, then they take turns step by step while the others
sleep, every other turn in reverse order, so that a change of the machine's speed meets all of them. A ratio is the
median over turns of the ratio of two steps of the same turn: speeds of shared machines drift by more than what is
measured, and steps of one turn are seconds apart.

Our variants train with the aux-loss-free selection bias on, and its first steps are warm-up; sequences are short and
many, because the tokens of one sequence are routed alike. An untrained router sends up to 30 % more tokens to one rank
than to the other, and the figure is meant to be that of expert parallelism, not of uneven load. The imbalance that
remained is in the results.

Run: python benchmarks/train_cpu.py [--steps N]   (writes benchmarks/results/train-cpu.json)
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from equipoise.bench.results import parse_options, results_file, write_results

MODEL = {
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "moe_intermediate_size": 1024,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.0,
}
SEQUENCES, LENGTH, WARM_UP, LR = 32, 64, 12, 1e-4
TOKENS = SEQUENCES * LENGTH
VARIANTS = {"ep2": 2, "one process": 1, "transformers grouped_mm": 1, "transformers eager": 1}
"""Processes of each variant; those that are compared stand side by side."""


def batch(step: int):
    """Token ids [SEQUENCES, LENGTH] and next-token labels of a step."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, MODEL["vocab_size"], (SEQUENCES, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def take_turns(run_step: Callable[[int], None], steps: int) -> list[float]:
    """Seconds of each step after the warm-up. Every step waits for its turn: a line on the standard input."""
    seconds = []
    for step in range(WARM_UP + steps):
        sys.stdin.readline()
        start = time.perf_counter()
        run_step(step)
        seconds.append(time.perf_counter() - start)
        print("done", flush=True)
    sys.stdin.readline()  # sleeps until all variants have finished
    return seconds[WARM_UP:]


def run_equipoise(steps: int) -> dict:
    """This rank's share of the training, by the trainer's own step; adds where the time of two steps goes."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from equipoise.accelerator import get_accelerator
    from equipoise.data import Batch
    from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
    from equipoise.distributed.world import join_world
    from equipoise.models.config import ModelConfig
    from equipoise.models.parallelize import build_parallel_model
    from equipoise.train.optimizer import OptimizerConfig, build_optimizer
    from equipoise.train.step import TrainStep
    from equipoise.train.timing import PhaseTimer

    with join_world(get_accelerator(), timeout_s=120) as world:
        config = ModelConfig(**MODEL, selection_bias=True, bias_update_speed=1e-3)
        meshes = build_meshes(derive_axes(ParallelConfig(ep_size=world.size), world.size, config.num_experts), world)
        model = build_parallel_model(config, meshes, world.device, seed=0, reshard_after_forward=False)
        optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
        timer = PhaseTimer(world.accelerator)
        runner = TrainStep(model, optimizer, meshes, world.device, timer, max_grad_norm=1.0)
        share = SEQUENCES // world.size
        mine = slice(world.rank * share, (world.rank + 1) * share)
        imbalances = []

        def step(index: int) -> None:
            ids, labels = (x[mine] for x in batch(index))
            timer.start_step()
            sums, counts = runner.forward_backward([Batch(ids, labels, None, None, ids.numel(), ids.numel())], TOKENS)
            result, norm = runner.reduce(sums, counts, TOKENS, stop=False)
            runner.update(result, norm, LR)
            imbalances.append(float(result.rank_imbalance_L.mean()))

        seconds = take_turns(step, steps)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for index in range(2):
                step(index)
        return {
            "seconds": seconds,
            "imbalance": statistics.mean(imbalances[WARM_UP:]),
            "time_shares": time_shares(profiler.key_averages()),
            "torch_threads": torch.get_num_threads(),
        }


def time_shares(events) -> dict[str, float]:
    """Shares of the profiled time: dispatch and combine with their backward, and of that the wait for all-to-alls."""
    total = sum(e.self_cpu_time_total for e in events)
    moving = {"moe.dispatch", "moe.combine"}
    backward = {"_PermuteBackward", "_CombineBackward", "_ReorderBackward", "_AllToAllRowsBackward"}
    dispatch = sum(e.cpu_time_total for e in events if e.key in moving | backward)
    waiting = sum(e.cpu_time_total for e in events if e.key == "gloo:all_to_all" or "alltoall" in e.key)
    return {"dispatch": dispatch / total, "all_to_all": waiting / total}


def run_transformers(steps: int, experts: str) -> dict:
    """The same model as transformers builds it, in a plain training loop."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from equipoise.models.config import ModelConfig
    from equipoise.models.initialize import initialize_model
    from equipoise.models.model import MoEForCausalLM

    ours = MoEForCausalLM(ModelConfig(**MODEL))
    initialize_model(ours, seed=0)
    config = Qwen3MoeConfig(**MODEL, intermediate_size=512, use_cache=False, attn_implementation="sdpa")
    config._experts_implementation = experts
    model = Qwen3MoeForCausalLM(config)
    model.load_state_dict(ours.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step(index: int) -> None:
        ids, labels = batch(index)
        logits = model(input_ids=ids).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"seconds": take_turns(step, steps), "torch_threads": torch.get_num_threads()}


def work(variant: str, steps: int, out: Path) -> None:
    """Body of one pinned process."""
    is_ours = not variant.startswith("transformers")
    result = run_equipoise(steps) if is_ours else run_transformers(steps, variant.split()[1])
    out.write_text(json.dumps(result))


class Variant:
    """The pinned processes of one variant, which do nothing until it is their turn."""

    def __init__(self, name: str, steps: int, folder: Path) -> None:
        self.name = name
        self.outputs = [folder / f"{name}-{rank}" for rank in range(VARIANTS[name])]
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        self.processes = []
        for rank, out in enumerate(self.outputs):
            env = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(len(self.outputs)),
                "LOCAL_WORLD_SIZE": str(len(self.outputs)),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
            }
            command = [sys.executable, __file__, "--work", name, "--steps", str(steps), "--result", str(out)]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            pin = partial(os.sched_setaffinity, 0, {rank})
            self.processes.append(subprocess.Popen(command, env=env, preexec_fn=pin, **pipes))

    def go(self) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def take_turn(self) -> float:
        """One step of every process; seconds until the last of them was done."""
        start = time.perf_counter()
        self.go()
        for process in self.processes:
            assert process.stdout is not None
            while (line := process.stdout.readline()) != "done\n":
                if not line:
                    raise SystemExit(f"variant {self.name!r} failed")
        return time.perf_counter() - start

    def finish(self) -> dict:
        """The first process's result; of each step the slowest process's time."""
        self.go()
        if {p.wait(timeout=600) for p in self.processes} != {0}:
            raise SystemExit(f"variant {self.name!r} failed")
        ranks = [json.loads(out.read_text()) for out in self.outputs]
        return ranks[0] | {"seconds": [max(step) for step in zip(*(r["seconds"] for r in ranks))]}


def run_all(steps: int) -> dict[str, dict]:
    """Results of all variants, which took turns."""
    with tempfile.TemporaryDirectory() as folder:
        variants = [Variant(name, steps, Path(folder)) for name in VARIANTS]
        try:
            for step in range(WARM_UP + steps):
                turn = variants if step % 2 else variants[::-1]
                times = [f"{v.name} {v.take_turn():.2f} s" for v in turn]
                print(f"step {step + 1}/{WARM_UP + steps}: " + ", ".join(times), flush=True)
            return {v.name: v.finish() for v in variants}
        finally:
            for process in (p for v in variants for p in v.processes):
                process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="measured steps of each variant")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parse_options(parser)
    if options.work:
        work(options.work, options.steps, options.result)
        return
    if len(os.sched_getaffinity(0)) < 2:
        raise SystemExit("this benchmark pins two processes: it needs two cores")
    runs = run_all(options.steps)
    rows = []
    for variant, result in runs.items():
        seconds = result["seconds"]
        row = {
            "variant": variant,
            "processes": VARIANTS[variant],
            "tokens_per_second": TOKENS / statistics.median(seconds),
            "step_s_median": statistics.median(seconds),
            "step_s_min": min(seconds),
            "step_s_max": max(seconds),
            "steps": len(seconds),
        }
        for key in ("imbalance", "time_shares"):
            if key in result:
                row[key] = result[key]
        rows.append(row)

    def ratio(slow: str, fast: str) -> float:
        """How many times as fast `fast` is."""
        return statistics.median(a / b for a, b in zip(runs[slow]["seconds"], runs[fast]["seconds"], strict=True))

    summary = {
        "ep2_speedup": ratio("one process", "ep2"),
        "over_transformers": min(ratio(name, "one process") for name in VARIANTS if name.startswith("transformers")),
        "dispatch_share_ep2": rows[0]["time_shares"]["dispatch"],
        "imbalance_ep2": rows[0]["imbalance"],
        "model": MODEL,
        "tokens_per_step": TOKENS,
    }
    out = results_file(options, "train-cpu.json")
    path = write_results(out, rows, summary, ["torch", "transformers", "equipoise"])
    print(json.dumps(summary, indent=1), f"\nwritten to {path}")


if __name__ == "__main__":
    main()
