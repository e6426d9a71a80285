"""All kernels of one GPU under NVIDIA's compute-sanitizer: memory accesses, barriers, and races in shared memory.

Every kernel runs at small awkward sizes, grouped products in each form that the tuning table picks and by pointers,
with an allocation of its own for every tensor, so that an access past one is seen. First a planted access past a tensor
must be found. Kernels that work in other GPUs' memory are not there. Races are looked for where shared memory is
written by threads: what the copy engine and the tensor cores do in it is beyond the tool.

Run: python benchmarks/sanitize_gpu.py [--out FILE]   (writes benchmarks/results/sanitizer-h200.json; minutes)
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from equipoise.balance.device_planner import DevicePlanner
from equipoise.balance.protocol import PlannerSettings
from equipoise.bench.reroute_speed import reroute_case
from equipoise.bench.results import device_word, parse_options, results_file, write_results
from equipoise.kernels import grouped_launch_triton
from equipoise.kernels.adamw_triton import adamw
from equipoise.kernels.checksum import copy_with_checksum, new_totals
from equipoise.kernels.cross_entropy_triton import loss_and_gradient
from equipoise.kernels.elementwise_triton import scaled, sum_of_squares
from equipoise.kernels.grouped_gemm import (
    dual_dgrad,
    dual_forward,
    dual_swiglu_backward,
    dual_swiglu_forward,
    dual_wgrad,
    run_wgrad,
    weighted_swiglu_backward,
)
from equipoise.kernels.permute import combine, make_permutation, permute
from equipoise.kernels.reroute import reroute_permutation
from equipoise.kernels.rotary_norm import rotary_norm
from equipoise.kernels.router_weights import router_weights
from equipoise.kernels.rows import RowLayout, copy_rows, fold_rows, row_launch, spread_rows
from equipoise.kernels.select_experts import select_experts
from equipoise.kernels.tiles import make_tiles
from equipoise.kernels.tuning import BLOCK_ROWS, Block, read_table
from equipoise.models.cross_entropy import IGNORED_LABEL

DEVICE = torch.device("cuda")
COUNTS = (([0, 5, 130, 0, 64, 3], 4), ([257, 0, 1, 40], 3), ([0, 0], 1))
"""Rows of each expert, and how many experts are masters."""
WIDTHS = ((96, 64), (256, 136), (12, 17))
"""N and K of a weight; the last cannot be described to the copy engine."""


def normal(*size: int) -> torch.Tensor:
    return torch.randn(*size, device=DEVICE, dtype=torch.bfloat16)


def products() -> None:
    for counts, M in COUNTS:
        for N, K in WIDTHS:
            rows, L = sum(counts) + 7, len(counts)
            tiles = make_tiles(torch.tensor(counts, device=DEVICE), M, rows, BLOCK_ROWS)
            masters, slots, bias = normal(M, N, K), normal(L - M, N, K), normal(L, N)
            dual_forward(normal(rows, K), masters, slots, tiles, bias[:M], bias[M:].clone())
            dual_dgrad(normal(rows, N), masters, slots, tiles)
            dual_wgrad(normal(rows, N), normal(rows, K), tiles, M)


def table_blocks() -> list[Block]:
    """The weight gradients' forms of the tuning table, and masters' by `grouped_mm`."""
    names = {field.name for field in fields(Block)}
    entries = [entry for device in read_table().values() for entry in device.get("wgrad", [])]
    blocks = [Block(**{k: v for k, v in entry.items() if k in names}) for entry in entries]
    return list(dict.fromkeys([*blocks, Block(columns=256, grouped_mm=True)]))


def weight_gradients(block: Block, is_first: bool) -> None:
    for counts, M in COUNTS:
        for N, K in WIDTHS[1:] if is_first else WIDTHS[1:2]:
            rows, L = sum(counts) + 7, len(counts)
            tiles = make_tiles(torch.tensor(counts, device=DEVICE), M, rows, BLOCK_ROWS)
            tables, slots = (tiles.offsets_L1, tiles.order_L), torch.zeros(L - M, N, K, device=DEVICE)
            for add in (True, False) if is_first else (True,):
                run_wgrad(normal(rows, N), normal(rows, K), slots, *tables, M, torch.bfloat16, block, add, K % 8 == 0)


def swiglu() -> None:
    for counts, M in COUNTS:
        for D, inner in ((64, 48), (136, 256), (12, 17)):
            rows, L = sum(counts) + 7, len(counts)
            tiles = make_tiles(torch.tensor(counts, device=DEVICE), M, rows, BLOCK_ROWS)
            up, down = normal(L, 2 * inner, D), normal(L, D, inner)
            _, hidden = dual_swiglu_forward(normal(rows, D), up[:M], up[M:].clone(), tiles)
            dual_swiglu_backward(normal(rows, D), down[:M], down[M:].clone(), hidden, tiles)
            weights = torch.rand(rows, device=DEVICE)
            dual_swiglu_forward(normal(rows, D), up[:M], up[M:].clone(), tiles, weights_R=weights)
            weighted_swiglu_backward(normal(rows, D), down[:M], down[M:].clone(), hidden, weights, tiles)


def beside_transfers() -> None:
    """Products and weight gradients in levels of programs, and behind replicas that arrive in two parts."""
    grouped_launch_triton.divide = lambda *launch: grouped_launch_triton.Division(7, 4, 3)
    products()
    for block in table_blocks()[:2]:
        weight_gradients(block, False)
    arrivals = [lambda: None] * 2
    for counts, M in COUNTS:
        D, inner, rows, L = 136, 256, sum(counts) + 7, len(counts)
        tiles = make_tiles(torch.tensor(counts, device=DEVICE), M, rows, BLOCK_ROWS)
        up, down = normal(L, 2 * inner, D), normal(L, D, inner)
        _, hidden = dual_swiglu_forward(normal(rows, D), up[:M], up[M:].clone(), tiles, arrivals)
        dual_swiglu_backward(normal(rows, D), down[:M], down[M:].clone(), hidden, tiles, arrivals)


def rows() -> None:
    for T, K, P, E, R in ((0, 2, 2, 4, 1), (37, 2, 4, 12, 2), (300, 4, 8, 32, 1), (65, 8, 64, 256, 2)):
        ids, plan = reroute_case(max(T, 1), K, P, E, R)
        ids = ids[:T].to(DEVICE)
        reroute_permutation(ids, plan.slot_expert.to(DEVICE), plan.send.to(DEVICE), E, P, 1)
        permutation = make_permutation(ids, E)
        for D in (64, 7):
            x, weights = normal(T, D).requires_grad_(), torch.rand(T, K, device=DEVICE, requires_grad=True)
            combine(permute(x, permutation), weights, permutation).float().sum().backward()


def rows_of_others() -> None:
    """What becomes of rows where they have arrived: heads and followers in chains of up to K, buffers not full."""
    grid = row_launch(DEVICE)
    for L, K, D, chains in ((1, 2, 64, 0), (3, 2, 7, 1), (18, 4, 4096, 700), (5, 8, 1000, 33)):
        length = [1 + chain % K for chain in range(chains)]
        total, record, head = sum(length), [], 0
        for count in length:
            for step in range(1, count + 1):
                record.append((head + step + 1 if step < count else 0) + (2**30 if step > 1 else 0))
            head += count
        record_C = torch.tensor(record + [total + 5] * 3, dtype=torch.int32, device=DEVICE)
        layout = RowLayout.empty(4, L, DEVICE)
        layout.table.zero_()[L] = total
        rows_CD, weights_C = normal(total + 3, D), torch.rand(total + 3, device=DEVICE)
        spread_rows(rows_CD, record_C, layout, K, grid)
        spread_rows(rows_CD, record_C, layout, K, grid, weights_C)
        fold_rows(rows_CD, record_C, layout, K, grid)
        copy_rows(rows_CD, torch.empty_like(rows_CD), layout, grid)


def plan() -> None:
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for P, E, R in ((4, 12, 2), (8, 32, 1), (64, 256, 2)):
        load_PE = torch.randint(0, 50, (P, E), dtype=torch.int32, device=DEVICE, generator=generator)
        load_PE[:, :2] *= 9
        DevicePlanner()(load_PE, 1, PlannerSettings(R))


def router() -> None:
    for T, E, k in ((1, 4, 2), (9, 6, 3), (130, 20, 8), (5, 256, 8)):
        logits = torch.randn(T, E, device=DEVICE, requires_grad=True)
        scores = logits.softmax(-1)
        ids, _ = select_experts(scores.detach(), None, None, k, 1, 1)
        router_weights(logits, scores, ids, True, True, 1.0).sum().backward()


@triton.jit
def past_the_end(out):
    tl.store(out + 16 + tl.arange(0, 16), 1.0)


def training() -> None:
    for T, V in ((1, 1), (5, 64), (3, 5000)):
        labels = torch.arange(T, device=DEVICE) % V
        labels[-1] = IGNORED_LABEL
        loss_and_gradient(normal(T, V), labels, IGNORED_LABEL)
    corrections, scale = torch.tensor([0.1, 0.03], device=DEVICE), torch.tensor(0.5, device=DEVICE)
    for size in (1, 33, 4099):
        weight, first, second = (torch.rand(size, device=DEVICE) for _ in range(3))
        for copy, factor in ((None, None), (normal(size), scale)):
            adamw(
                weight, normal(size), first, second, copy, corrections, factor, lr=1e-3, betas=(0.9, 0.95), eps=1e-8,
                weight_decay=0.1,
            )  # fmt: skip
    scaled(torch.rand(4099, device=DEVICE), scale, torch.bfloat16)
    sum_of_squares([torch.rand(size, device=DEVICE) for size in (1, 33, 4099)])
    for B, S, N, H in ((1, 1, 1, 16), (2, 37, 6, 64)):
        x, tables = normal(B, S, N, H).requires_grad_(), normal(1, 1, S, H)
        rotary_norm(x, normal(H).requires_grad_(), tables, tables, 1e-6).float().sum().backward()


def checksums() -> None:
    (total,) = new_totals(1, DEVICE)
    for size in (1, 4, 17, 40_003):
        source = torch.arange(size, device=DEVICE) % 251
        copy_with_checksum(source.to(torch.uint8), torch.empty(size, device=DEVICE, dtype=torch.uint8), 32, total)
        copy_with_checksum(source.float(), torch.empty(size, device=DEVICE, dtype=torch.bfloat16), 0, total)


def planted() -> None:
    past_the_end[(1,)](torch.zeros(16, device=DEVICE))


PARTS: dict[str, Callable[[], None]] = {
    "products": products,
    **{f"weight_gradients_{i}": partial(weight_gradients, b, i == 0) for i, b in enumerate(table_blocks())},
    "swiglu": swiglu,
    "beside_transfers": beside_transfers,
    "rows": rows,
    "rows_of_others": rows_of_others,
    "plan": plan,
    "router": router,
    "training": training,
    "checksums": checksums,
}
CHECKS = [
    *(("memcheck", part) for part in PARTS),
    *(("synccheck", part) for part in PARTS),
    *(("racecheck", part) for part in ("rows", "rows_of_others", "plan", "router", "training", "checksums")),
]


def sanitizer() -> str:
    home = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda"))
    path = os.pathsep.join([os.environ.get("PATH", ""), str(home / "bin"), str(home / "compute-sanitizer")])
    found = shutil.which("compute-sanitizer", path=path)
    if found is None:
        sys.exit("compute-sanitizer is neither on the PATH nor in CUDA_HOME: it comes with NVIDIA's CUDA toolkit")
    return found


def run_part(part: str, tool: str | None, timeout_s: int) -> tuple[int | None, str]:
    """Errors that the tool reports (None: it did not get to its summary), and the end of what it printed."""
    command = [sys.executable, __file__, "--part", part]
    if tool is not None:
        command = [sanitizer(), "--tool", tool, *command]
    env = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return None, f"no end within {timeout_s} s"
    text = done.stdout + done.stderr
    if tool is None:
        return (0 if done.returncode == 0 else None), text[-2000:]
    summary = re.search(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)", text)
    if summary is None or f"{part} ran" not in text:
        return (int(summary.group(1)) or None) if summary else None, text[-2000:]
    return int(summary.group(1)), text[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=[*PARTS, "planted"], help="run these kernels alone, without the tool")
    parser.add_argument("--timeout", type=int, default=300, metavar="S", help="of one part under one tool")
    options = parse_options(parser)
    if options.part is not None:
        (PARTS | {"planted": planted})[options.part]()
        torch.cuda.synchronize()
        print(f"{options.part} ran", flush=True)
        return
    sanitizer()
    with ThreadPoolExecutor(min(os.cpu_count() or 1, 12)) as pool:
        plain = dict(zip(PARTS, pool.map(lambda part: run_part(part, None, options.timeout), PARTS)))
        for part, (errors, text) in plain.items():  # also compiles the kernels
            if errors is None:
                sys.exit(f"{part} fails without the tool: {text}")
        errors, text = run_part("planted", "memcheck", options.timeout)
        if not errors:
            sys.exit(f"the planted access past a tensor was not found: the tool sees nothing here. {text}")
        print(f"planted: {errors} errors found, as it should be", flush=True)
        found = pool.map(lambda check: run_part(check[1], check[0], options.timeout), CHECKS)
        results: list[dict[str, Any]] = []
        for (tool, part), (errors, text) in zip(CHECKS, found):
            results.append({"tool": tool, "part": part, "errors": errors})
            print(f"{tool:10} {part:20} {'no summary' if errors is None else f'{errors} errors'}", flush=True)
            if errors != 0:
                print(text)
    name = torch.cuda.get_device_name()
    summary = {
        "checks": len(results),
        "checks_without_errors": sum(row["errors"] == 0 for row in results),
        "errors": sum(row["errors"] or 0 for row in results),
    }
    out = results_file(options, f"sanitizer-{device_word(name)}.json")
    print(summary, "written to", write_results(out, results, summary, ["torch", "triton"], {"accelerator": name}))
    if summary["checks_without_errors"] != summary["checks"]:
        sys.exit(1)


if __name__ == "__main__":
    main()
