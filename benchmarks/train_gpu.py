"""Training speed on one accelerator: a Qwen3-30B-A3B-shaped model at the depth that fits, ours against transformers'.

All train on the same random tokens with AdamW at BF16 compute, a step at a time, in processes of their own; every
variant's figure is its median step. Ours keeps FP32 master weights and moments, as the trainer does. There are two
peers, both transformers' own model with its `grouped_mm` experts and PyTorch's fused attention and AdamW:

* equal numerics: FP32 weights and moments with BF16 compute, through FSDP2 (autocast would leave the products of its
  experts in FP32). It is the same training as ours, and what `over_transformers` compares with.
* pure BF16: weights and moments in BF16. That is less work, and another training: small updates are lost in rounding.
  `over_transformers_bf16` compares with it.

transformers' model is compiled in two ways: as a whole, and layer by layer with the loss apart, so that its causal mask
is made outside of compiled code, where it can be left out. The faster counts. Each variant splits a step's sequences
into the microbatches that fit its memory.

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
import time
from collections.abc import Callable
from pathlib import Path

from equipoise.bench.results import results_folder, write_results

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


def batch(step: int, sequences: int, device):
    """Token ids [sequences, LENGTH] and next-token labels of a step."""
    import torch

    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(0, MODEL["vocab_size"], (sequences, LENGTH + 1), generator=generator)
    return ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device)


def time_steps(run_step: Callable[[int], None], steps: int) -> list[float]:
    """Seconds of each step after the warm-up."""
    import torch

    seconds = []
    for step in range(WARM_UP + steps):
        torch.accelerator.synchronize()
        start = time.perf_counter()
        run_step(step)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    return seconds[WARM_UP:]


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

        def step(index: int) -> None:
            ids, labels = batch(index, options.sequences, "cpu")
            timer.start_step()
            parts = zip(ids.split(options.micro), labels.split(options.micro))
            batches = [Batch(i, k, None, None, i.numel(), i.numel()) for i, k in parts]
            sums, counts = runner.forward_backward(batches, tokens)
            result, norm = runner.reduce(sums, counts, tokens, stop=False)
            runner.update(result, norm, LR)
            losses.append(result.loss)

        seconds = time_steps(step, options.steps)
        if options.profile:
            from torch.profiler import profile

            with profile() as profiler:
                step(99)
                torch.accelerator.synchronize()
            print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=45, max_name_column_width=70))
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

    def step(index: int) -> None:
        ids, labels = batch(index, options.sequences, device)
        total = 0.0
        for i, k in zip(ids.split(options.micro), labels.split(options.micro)):
            loss = forward(i, k) if by_layer else whole(input_ids=i, labels=k, shift_labels=k).loss
            loss = loss * len(i) / len(ids)
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total))

    seconds = time_steps(step, options.steps)
    if options.profile:
        from torch.profiler import profile

        with profile() as profiler:
            step(99)
            torch.accelerator.synchronize()
        print(profiler.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70))
    return {"seconds": seconds, "losses": losses, "memory_bytes": torch.accelerator.max_memory_allocated()}


def start(variant: str, options: argparse.Namespace) -> dict:
    """Runs one variant in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        env = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29533"}
        command = [sys.executable, __file__, "--work", variant, "--out", str(out), "--kernel", options.kernel]
        micro = options.micro if variant == "equipoise" else options.transformers_micro
        if EQUAL_NUMERICS in variant:
            micro = options.transformers_fp32_micro
        command += ["--micro", str(micro)]
        for name in ("layers", "sequences", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        subprocess.run(command + ["--profile"] * options.profile, env=env, check=True)
        return json.loads(out.read_text()) | {"micro": micro}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--sequences", type=int, default=16, help=f"sequences of {LENGTH} tokens in a step")
    parser.add_argument("--micro", type=int, default=16, help="sequences of a microbatch of ours")
    parser.add_argument("--transformers-micro", type=int, default=16, help="sequences of a microbatch of transformers")
    parser.add_argument("--transformers-fp32-micro", type=int, default=8, help="the same with FP32 weights")
    parser.add_argument("--steps", type=int, default=8, help="measured steps of each variant")
    parser.add_argument("--kernel", default="auto", help="our expert kernel")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--profile", action="store_true", help="print where the time of one step goes")
    parser.add_argument("--work", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        is_ours = options.work == "equipoise"
        kind = "layers" in options.work, EQUAL_NUMERICS in options.work
        result = run_equipoise(options) if is_ours else run_transformers(options, *kind)
        options.out.write_text(json.dumps(result))
        return
    import torch

    from equipoise.accelerator.peak_flops import peak_flops

    rows = []
    tokens = options.sequences * LENGTH
    for variant in options.variants:
        result = start(variant, options)
        rate = tokens / statistics.median(result["seconds"])
        row = {"variant": variant, "tokens_per_second": rate, "step_s_median": statistics.median(result["seconds"])}
        row["microbatch_sequences"] = result.pop("micro")
        rows.append(row | result)
        memory = result["memory_bytes"] / 2**30
        print(f"{variant:26} {rate:9.0f} tokens/s, {memory:.1f} GiB, loss {result['losses'][-1]:.3f}", flush=True)
    rates = {row["variant"]: row["tokens_per_second"] for row in rows}
    if "equipoise" not in rates or len(rates) < 2:
        return
    name = torch.get_device_module().get_device_name()
    peak = peak_flops(name, torch.bfloat16)

    def over(kind: str) -> float | None:
        """Our rate over the fastest peer of a kind."""
        peers = [rate for variant, rate in rates.items() if kind in variant]
        return rates["equipoise"] / max(peers) if peers else None

    summary = {
        "over_transformers": over(EQUAL_NUMERICS),
        "over_transformers_peer": "equal numerics: FP32 weights, moments; BF16 compute by FSDP2; compiled, grouped_mm",
        "over_transformers_bf16": over(PURE_BF16),
        "over_transformers_bf16_peer": "pure BF16: weights and moments too, compiled, grouped_mm; another training",
        "mfu": rates["equipoise"] * rows[0]["flops_per_token"] / peak if peak else None,
        "model": MODEL | {"num_hidden_layers": options.layers},
        "tokens_per_step": tokens,
        "sequence_length": LENGTH,
    }
    path = write_results(
        results_folder() / "train-h200.json",
        rows,
        summary,
        ["torch", "triton", "transformers", "equipoise"],
        {"accelerator": name},
    )
    print(json.dumps(summary, indent=1), f"\nwritten to {path}")


if __name__ == "__main__":
    main()
