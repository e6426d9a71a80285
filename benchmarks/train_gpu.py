"""Training speed on one accelerator: a Qwen3-30B-A3B-shaped model at the depth that fits, ours against transformers'.

All train on the same random tokens with AdamW at BF16 compute, in processes of their own; every variant's figure is its
median step, from the end of one to the end of the next on the device, with no wait in between but the variant's own.
Ours keeps FP32 master weights and moments, as the trainer does. There are two peers, both transformers' own model with
its `grouped_mm` experts and PyTorch's fused attention and AdamW:

* equal numerics: FP32 weights and moments with BF16 compute, through FSDP2 (autocast would leave the products of its
  experts in FP32). It is the same training as ours, and what `over_transformers` compares with.
* pure BF16: weights and moments in BF16. That is less work, and another training: small updates are lost in rounding.
  `over_transformers_bf16` compares with it.

transformers' model is compiled in two ways: as a whole, and layer by layer with the loss apart, so that its causal mask
is made outside of compiled code, where it can be left out. The faster counts. Each variant splits a step's sequences
into the microbatches that fit its memory.

A variant that does not fit is tried again with half the microbatch; one that fails is named in the results file and
takes nothing from the others.

Run: python benchmarks/train_gpu.py [--layers N] [--sequences N] [--steps N]   (writes
benchmarks/results/train-h200.json)
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from equipoise.bench.results import parse_options, results_file, write_results

MODEL = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.001,
}
"""Qwen3-30B-A3B's config.json, but for the depth."""
LENGTH, WARM_UP, LR = 4096, 3, 1e-5
EQUAL_NUMERICS, PURE_BF16 = "FP32 weights", "BF16 weights"
VARIANTS = (
    "equipoise",
    "transformers, layers compiled, FP32 weights",
    "transformers, layers compiled, BF16 weights",
    "transformers, model compiled, BF16 weights",
)


def batch(step: int, sequences: int):
    """Token ids [sequences, LENGTH] and next-token labels of a step, in pinned memory."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, MODEL["vocab_size"], (sequences, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous().pin_memory(), ids[:, 1:].contiguous().pin_memory()


def time_steps(run_step: Callable[[Any, Any], None], sequences: int, steps: int) -> list[float]:
    """Seconds of each step after the warm-up, from the end of one step to the end of the next on the device.

    Nothing waits for the device between the steps but what a step itself waits for, and batches are made before.
    """
    import torch

    batches = [batch(index, sequences) for index in range(WARM_UP + steps)]
    ends = []
    for ids, labels in batches:
        run_step(ids, labels)
        end = torch.Event(device=torch.accelerator.current_accelerator(), enable_timing=True)
        end.record()
        ends.append(end)
        if len(ends) == WARM_UP:
            torch.accelerator.synchronize()
    torch.accelerator.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in pairwise(ends[WARM_UP - 1 :])]


def print_profile(run_step: Callable[[Any, Any], None], sequences: int, num_rows: int) -> None:
    """Where the time of one step goes."""
    import torch
    from torch.profiler import profile

    with profile() as profiler:
        run_step(*batch(99, sequences))
        torch.accelerator.synchronize()
    table = profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=num_rows, max_name_column_width=70)
    print(table)


def run_equipoise(options: argparse.Namespace) -> dict:
    """The trainer's own step."""
    import torch

    from equipoise.accelerator import get_accelerator
    from equipoise.data import Batch
    from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
    from equipoise.distributed.world import join_world
    from equipoise.kernels.grouped_linear import choose_grouped_linear
    from equipoise.models.config import ModelConfig
    from equipoise.models.parallelize import build_parallel_model
    from equipoise.train.optimizer import OptimizerConfig, build_optimizer
    from equipoise.train.step import TrainStep
    from equipoise.train.throughput import flops_per_token
    from equipoise.train.timing import PhaseTimer

    with join_world(get_accelerator(), timeout_s=120) as world:
        config = ModelConfig(**MODEL, num_hidden_layers=options.layers)
        meshes = build_meshes(derive_axes(ParallelConfig(), 1, config.num_experts), world)
        model = build_parallel_model(
            config,
            meshes,
            world.device,
            seed=0,
            compute_dtype=torch.bfloat16,
            expert_kernel=options.kernel,
            compile=True,
            reshard_after_forward=False,
        )
        optimizer = build_optimizer(model, OptimizerConfig(lr=LR))
        timer = PhaseTimer(world.accelerator)
        runner = TrainStep(model, optimizer, meshes, world.device, timer, max_grad_norm=1.0)
        tokens = options.sequences * LENGTH
        losses = []

        def step(ids: torch.Tensor, labels: torch.Tensor) -> None:
            timer.start_step()
            parts = zip(ids.split(options.micro), labels.split(options.micro))
            batches = [Batch(i, k, None, None, i.numel(), i.numel()) for i, k in parts]
            sums, counts = runner.forward_backward(batches, tokens)
            losses.append(runner.finish(sums, counts, tokens, LR).loss)

        seconds = time_steps(step, options.sequences, options.steps)
        if options.profile:
            print_profile(step, options.sequences, 45)
        return {
            "seconds": seconds,
            "losses": losses,
            "memory_bytes": torch.accelerator.max_memory_allocated(),
            "flops_per_token": flops_per_token(config, LENGTH),
            "expert_kernel": choose_grouped_linear(world.device, torch.bfloat16, options.kernel).name,
        }


def run_transformers(options: argparse.Namespace, by_layer: bool, masters: bool) -> dict:
    """The same model as transformers builds it, compiled, in a plain training loop. `masters`: FP32 weights."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **MODEL,
        num_hidden_layers=options.layers,
        intermediate_size=6144,
        max_position_embeddings=LENGTH,
        use_cache=False,
        attn_implementation="sdpa",
    )
    config._experts_implementation = "grouped_mm"
    torch.set_default_dtype(torch.float32 if masters else torch.bfloat16)
    with torch.device(torch.accelerator.current_accelerator()):
        model = Qwen3MoeForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    device = next(model.parameters()).device
    if masters:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        torch.distributed.init_process_group(device_id=torch.device(device.type, 0))
        mesh = torch.distributed.init_device_mesh(device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    losses = []

    def head_loss(hidden, weight, labels):
        logits = torch.nn.functional.linear(hidden, weight).float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def forward(ids, labels):
        return head_loss(model.model(input_ids=ids).last_hidden_state, model.lm_head.weight, labels)

    if by_layer:
        for layer in model.model.layers:
            layer.compile()
        head_loss = torch.compile(head_loss)
        if masters:  # FSDP gathers the head for a forward of the whole model
            model.forward = forward
            forward = model
    else:
        whole = torch.compile(model)

    def step(ids: torch.Tensor, labels: torch.Tensor) -> None:
        ids, labels = ids.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        total = torch.zeros((), device=device)
        for i, k in zip(ids.split(options.micro), labels.split(options.micro)):
            loss = forward(i, k) if by_layer else whole(input_ids=i, labels=k, shift_labels=k).loss
            loss = loss * len(i) / len(ids)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)  # read at the end: it is not in this loop's way

    seconds = time_steps(step, options.sequences, options.steps)
    if options.profile:
        print_profile(step, options.sequences, 30)
    losses = [float(loss) for loss in losses]
    return {"seconds": seconds, "losses": losses, "memory_bytes": torch.accelerator.max_memory_allocated()}


def start(variant: str, options: argparse.Namespace) -> dict | str:
    """Runs one variant in a process of its own, with a smaller microbatch where memory does not suffice. Its output is
    kept in `options.logs`. Returns its result, or why there is none."""
    micro = options.micro if variant == "equipoise" else options.transformers_micro
    if EQUAL_NUMERICS in variant:
        micro = options.transformers_fp32_micro
    env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
    options.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, __file__, "--work", variant, "--result", str(out), "--kernel", options.kernel]
        for name in ("layers", "sequences", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        command += ["--profile"] * options.profile
        while True:
            path = options.logs / f"{variant.replace(',', '').replace(' ', '-')}-{micro}.log"
            with path.open("w") as log:
                done = subprocess.run([*command, "--micro", str(micro)], env=env, stdout=log, stderr=subprocess.STDOUT)
            if done.returncode == 0:
                return json.loads(out.read_text()) | {"micro": micro}
            if "OutOfMemoryError" not in path.read_text():
                return f"exit code {done.returncode}, see {path.name}"
            print(f"{variant}: out of memory with microbatches of {micro}", flush=True)
            if micro == 1:
                return "out of memory with microbatches of one sequence"
            micro //= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--sequences", type=int, default=16, help=f"sequences of {LENGTH} tokens in a step")
    parser.add_argument("--micro", type=int, default=16, help="sequences of a microbatch of ours")
    parser.add_argument("--transformers-micro", type=int, default=16, help="sequences of a microbatch of transformers")
    parser.add_argument("--transformers-fp32-micro", type=int, default=8, help="the same with FP32 weights")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant")
    parser.add_argument("--kernel", default="auto", help="our expert kernel")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument(
        "--logs", type=Path, default=Path(tempfile.gettempdir(), "train-gpu"), help="folder of the logs"
    )
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parse_options(parser)
    if options.work:
        is_ours = options.work == "equipoise"
        kind = "layers" in options.work, EQUAL_NUMERICS in options.work
        result = run_equipoise(options) if is_ours else run_transformers(options, *kind)
        options.result.write_text(json.dumps(result))
        return
    out = results_file(options, "train-h200.json")
    rows: list[dict] = []
    failed: dict[str, str] = {}
    tokens = options.sequences * LENGTH
    for variant in options.variants:
        result = start(variant, options)
        if isinstance(result, str):
            failed[variant] = result
            print(f"{variant}: {result}", flush=True)
            continue
        seconds = statistics.median(result["seconds"])
        row = {"variant": variant, "tokens_per_second": tokens / seconds, "step_s_median": seconds}
        rows.append(row | {"microbatch_sequences": result.pop("micro")} | result)
        memory, loss = result["memory_bytes"] / 2**30, result["losses"][-1]
        print(f"{variant:43} {tokens / seconds:9.0f} tokens/s, {memory:.1f} GiB, loss {loss:.3f}", flush=True)
        write(rows, failed, options, out)  # each time: whatever stops a later variant takes nothing from this one
    if failed:
        sys.exit(1)


def write(rows: list[dict], failed: dict[str, str], options: argparse.Namespace, out: Path) -> None:
    """Puts the rows there are and what follows from them into the results file."""
    import torch

    from equipoise.accelerator.peak_flops import peak_flops

    rates = {row["variant"]: row["tokens_per_second"] for row in rows}
    ours = next((row for row in rows if row["variant"] == "equipoise"), None)
    name = torch.get_device_module().get_device_name()
    peak = peak_flops(name, torch.bfloat16)

    def over(kind: str) -> float | None:
        """Our rate over the fastest peer of a kind."""
        peers = [rate for variant, rate in rates.items() if kind in variant]
        return rates["equipoise"] / max(peers) if peers and ours else None

    summary = {
        "over_transformers": over(EQUAL_NUMERICS),
        "over_transformers_peer": "equal numerics: FP32 weights, moments; BF16 compute by FSDP2; compiled, grouped_mm",
        "over_transformers_bf16": over(PURE_BF16),
        "over_transformers_bf16_peer": "pure BF16: weights and moments too, compiled, grouped_mm; another training",
        "mfu": rates["equipoise"] * ours["flops_per_token"] / peak if peak and ours else None,
        "model": MODEL | {"num_hidden_layers": options.layers},
        "tokens_per_step": options.sequences * LENGTH,
        "sequence_length": LENGTH,
        "not_measured": failed,
    }
    path = write_results(
        out,
        rows,
        summary,
        ["torch", "triton", "transformers", "equipoise"],
        {"accelerator": name},
    )
    print(json.dumps(summary, indent=1), f"\nwritten to {path}", flush=True)


if __name__ == "__main__":
    main()
