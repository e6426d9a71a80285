"""Extends the table of tile sizes: every candidate is compiled in parallel, then timed in turns."""

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import groupby
from itertools import product as pairs
from multiprocessing import get_context
from typing import NamedTuple

import torch

from equipoise.bench.expert_kernels import (
    LOADS,
    Say,
    Shape,
    geomean,
    make_rows,
    random,
    random_weight,
)
from equipoise.bench.kernel_timing import gpu, interleaved_medians
from equipoise.kernels.grouped_gemm import run_wgrad
from equipoise.kernels.tuning import KERNELS, Block, read_table, table_entry, write_table

WIDE = Block(columns=256)
DEEP = replace(WIDE, stages=4, split=1)
GEMM = (
    WIDE,
    replace(WIDE, flatten=True),
    replace(WIDE, flatten=True, split=1),
    replace(DEEP, flatten=True, group=4),
    replace(DEEP, flatten=True),
    replace(DEEP, flatten=True, group=16),
    replace(DEEP, group=4),
    DEEP,
)
PAIR = Block(depth=32, stages=4, warps=4, split=1, programs=2)
TALL = Block(rows=256, stages=4, split=1)
WGRAD = (
    PAIR,
    replace(PAIR, group=16),
    replace(PAIR, stages=5, snake=True),
    replace(PAIR, depth=64, stages=2),
    replace(PAIR, depth=64, stages=3),
    replace(PAIR, depth=64, stages=3, group=4),
    replace(WIDE, split=1),
    DEEP,
    replace(DEEP, group=4),
    replace(DEEP, group=16, snake=True),
    TALL,
    replace(WIDE, grouped_mm=True),
)
CANDIDATES = {"forward": GEMM, "dgrad": GEMM, "wgrad": WGRAD}


class Job(NamedTuple):
    """One candidate at one shape and load; `N` x `K` as the table has it."""

    kernel: str
    N: int
    K: int
    block: Block
    run: Callable[[], object]


def jobs(shape: Shape, load: str, kernels: Collection[str], num_rows: int | None = None) -> Iterator[Job]:
    """All candidates of `kernels`; `num_rows` cuts the rows, where only compiling is wanted."""
    return (job for job in _all_jobs(shape, load, num_rows) if job.kernel in kernels)


def _all_jobs(shape: Shape, load: str, num_rows: int | None) -> Iterator[Job]:
    from equipoise.kernels import grouped_launch_triton as launch

    M, S = shape.masters, shape.slots
    rows = make_rows(shape if num_rows is None else shape._replace(tokens=num_rows), load)
    R, tiles = rows.total, rows.tiles
    for N, K in shape.products.values():
        x, grad, weight = random(R, K), random(R, N), random_weight(M + S, N, K)
        masters, slots = weight[:M], weight[M:].clone()
        out, grad_rows = torch.empty_like(grad), torch.empty_like(x)
        slot_grads = torch.zeros(S, N, K, device="cuda")
        product = partial(launch.launch_gemm, masters=masters, slots=slots, bias=None, slot_bias=None, tiles=tiles)
        for b in GEMM:
            forward = partial(product, x, out_RO=out, transposed=True, block=b, descriptors=True)
            yield Job("forward", N, K, b, forward)
            dgrad = partial(product, grad, out_RO=grad_rows, transposed=False, block=b, descriptors=True)
            yield Job("dgrad", N, K, b, dgrad)
        tables = tiles.offsets_L1, tiles.order_L
        for b in WGRAD:
            yield Job("wgrad", N, K, b, partial(run_wgrad, grad, x, slot_grads, *tables, M, x.dtype, b, True, True))


def _compile_part(shapes: Sequence[Shape], kernels: Collection[str], part: int, parts: int) -> None:
    """Compiles every `parts`-th candidate into Triton's cache on disk."""
    index = 0
    for shape in shapes:
        for job in jobs(shape, "balanced", kernels, 2):
            index += 1
            if index % parts == part:
                _runs(job)
    gpu().synchronize()


def _runs(job: Job) -> bool:
    """False for a candidate that does not fit this device."""
    try:
        job.run()
    except Exception:  # compilers raise what they like
        return False
    return True


@contextmanager
def _company(others: bool) -> Iterator[None]:
    """Launches divide their work as they do with or without other ranks."""
    from equipoise.kernels import grouped_launch_triton as launch

    usual = launch.beside_others
    launch.beside_others = lambda: others  # type: ignore[assignment]
    try:
        yield
    finally:
        launch.beside_others = usual  # type: ignore[assignment]


def tune(shapes: Sequence[Shape], say: Say, kernels: Collection[str] = KERNELS) -> None:
    """Writes the best of `CANDIDATES` for each shape into the shipped table: by the geometric mean over loads, and over
    the divisions of work alone on the device and beside other ranks."""
    parts = min(os.cpu_count() or 1, 15)
    sizes = list({shape[1:-1]: shape for shape in shapes}.values())
    with ProcessPoolExecutor(parts, mp_context=get_context("spawn")) as pool:
        for future in [pool.submit(_compile_part, sizes, kernels, part, parts) for part in range(parts)]:
            future.result()
    say("compiled")
    table = read_table()
    name, capability = gpu().get_device_name(), list(gpu().get_device_capability())
    device = table.setdefault(name, {"capability": capability})
    for shape in shapes:
        times: dict[tuple[str, int, int], dict[Block, list[float]]] = {}
        for load, has_company in pairs(LOADS, (False, True)):
            with _company(has_company):
                found = [job for job in jobs(shape, load, kernels) if _runs(job)]
                found.sort(key=lambda job: (job.kernel, job.N, job.K))
                for key, group in groupby(found, key=lambda job: (job.kernel, job.N, job.K)):
                    works = {job.block: job.run for job in group}
                    for block, ms in interleaved_medians(works, rounds=6).items():
                        times.setdefault(key, {}).setdefault(block, []).append(ms)
                        entry = table_entry(*key[1:], shape.tokens, block)
                        say(f"  {key} {load}{' beside others' * has_company} {ms:.4f} ms {entry}")
            gpu().empty_cache()
        for (kernel, N, K), blocks in times.items():
            block = min(blocks, key=lambda b: geomean(blocks[b]))
            entry = table_entry(N, K, shape.tokens, block)
            others = [e for e in device.get(kernel, []) if (e["N"], e["K"], e["tokens"]) != (N, K, shape.tokens)]
            device[kernel] = sorted([*others, entry], key=lambda e: (e["N"], e["K"], e["tokens"]))
            say(f"{shape.name} {shape.masters}+{shape.slots} {kernel} {entry}")
        write_table(table)
