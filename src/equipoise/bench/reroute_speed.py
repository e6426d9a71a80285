"""How long the reroute with its permutation, the tile tables, permuting, combining and the router take on one device.

Times are medians of replays of CUDA graphs that hold many launches, so that the host's share is not in them.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch

from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.registry import planner_maker
from equipoise.balance.reroute import count_load
from equipoise.balance.splits import complete_plan
from equipoise.kernels.permute import combine, make_permutation, permute
from equipoise.kernels.reroute import reroute_permutation
from equipoise.kernels.router_weights import router_weights
from equipoise.kernels.select_experts import select_experts
from equipoise.kernels.tiles import make_tiles

REROUTE_CASES = {
    "reroute_us_8k_top8": (8192, 8, 64, 256, 2),
    "reroute_us_8k_top4": (8192, 4, 8, 32, 1),
}
"""Tokens per rank, experts per token, ranks, experts, replica slots per rank."""


def graph_us(fn: Callable[[], Any], launches: int = 20, replays: int = 15) -> float:
    """Median microseconds of one call, from replays of a graph of `launches` calls."""
    gpu = torch.get_device_module()
    stream = gpu.Stream()
    stream.wait_stream(gpu.current_stream())
    with gpu.stream(stream):
        for _ in range(3):
            fn()
    gpu.current_stream().wait_stream(stream)
    graph = gpu.CUDAGraph()
    with gpu.graph(graph):
        for _ in range(launches):
            fn()
    times = []
    for _ in range(replays):
        start, end = gpu.Event(enable_timing=True), gpu.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / launches)
    return statistics.median(times)


def random_ids(T: int, K: int, E: int, generator: torch.Generator) -> torch.Tensor:
    """int32 [T, K]: distinct experts of each token, of log-normal popularity."""
    popularity = (torch.randn(E, generator=generator) * 0.8).exp()
    return torch.multinomial(popularity.expand(T, E), K, generator=generator).int()


def reroute_case(T: int, K: int, P: int, E: int, R: int) -> tuple[torch.Tensor, Any]:
    """Ids of rank 1 and its plan for random loads, on the CPU."""
    generator = torch.Generator().manual_seed(0)
    ids = random_ids(T, K, E, generator)
    load_PE = torch.stack([count_load(random_ids(T, K, E, generator), E) for _ in range(P)])
    load_PE[1] = count_load(ids, E)
    placement = planner_maker("exact_load")()(load_PE, PlannerSettings(R))
    return ids, complete_plan(placement, load_PE, 1)


def _reroute_row(device: torch.device, T: int, K: int, P: int, E: int, R: int) -> dict[str, Any]:
    ids, plan = reroute_case(T, K, P, E, R)
    ids, slots, send = ids.to(device), plan.slot_expert.to(device), plan.send.to(device)
    cases = {
        "us": lambda: reroute_permutation(ids, slots, send, E, P, 1),
        "permutation_alone_us": lambda: make_permutation(ids, E),
        "torch_stable_sort_us": lambda: torch.sort(ids.flatten(), stable=True),
    }
    row = {"what": "reroute + permutation", "tokens": T, "top_k": K, "ranks": P, "experts": E, "slots": R}
    return row | {name: round(graph_us(fn), 2) for name, fn in cases.items()}


def reroute_rows(device: torch.device) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Rows and summary of the reroute with its permutation, beside `make_permutation` and torch's stable sort alone."""
    rows = [_reroute_row(device, *case) for case in REROUTE_CASES.values()]
    return rows, {name: row["us"] for name, row in zip(REROUTE_CASES, rows)}


def _permute_case(device: torch.device, T: int, K: int, D: int, E: int) -> list[dict[str, Any]]:
    permutation = make_permutation(random_ids(T, K, E, torch.Generator().manual_seed(0)).to(device), E)
    x = torch.randn(T, D, device=device, dtype=torch.bfloat16).requires_grad_()
    out = torch.randn(T * K, D, device=device, dtype=torch.bfloat16).requires_grad_()
    weights = torch.rand(T, K, device=device).requires_grad_()
    grad_TD, grad_RD, target = torch.randn_like(x), torch.randn_like(out), torch.empty_like(out)
    copy = 2 * out.nbytes / graph_us(lambda: target.copy_(out.detach()), 5)
    rows_RD, y_TD = permute(x, permutation), combine(out, weights, permutation)
    once, twice = x.nbytes + out.nbytes, x.nbytes + 2 * out.nbytes
    cases = {
        "permute": (once, lambda: permute(x.detach(), permutation)),
        "permute backward": (once, lambda: torch.autograd.grad(rows_RD, x, grad_RD, retain_graph=True)),
        "combine": (once, lambda: combine(out.detach(), weights.detach(), permutation)),
        "combine backward": (twice, lambda: torch.autograd.grad(y_TD, (out, weights), grad_TD, retain_graph=True)),
    }
    rows = []
    for what, (moved, fn) in cases.items():
        us = graph_us(fn, 5)
        row = {"what": what, "tokens": T, "top_k": K, "hidden": D, "us": round(us, 1)}
        row |= {"gb_per_s": round(moved / us / 1e3, 1), "copy_gb_per_s": round(copy / 1e3, 1)}
        rows.append(row | {"share_of_copy": round(moved / us / copy, 3)})
    return rows


def permute_rows(device: torch.device) -> list[dict[str, Any]]:
    """Permute, combine and both backwards: GB/s of what must be moved at least, as share of a copy in the same run."""
    cases = ((8192, 8, 2048, 128), (8192, 8, 4096, 128), (8192, 8, 7168, 256), (16384, 4, 4096, 32))
    return [row for case in cases for row in _permute_case(device, *case)]


def _router_row(device: torch.device, T: int, E: int, K: int) -> dict[str, Any]:
    logits = torch.randn(T, E, device=device).requires_grad_()
    scores = logits.detach().softmax(-1)
    ids, counts = select_experts(scores, None, None, K, 1, 1)
    weights = router_weights(logits, scores, ids, True, True, 1.0)
    grad = torch.randn_like(weights)
    cases = {
        "select_us": lambda: select_experts(scores, None, None, K, 1, 1),
        "torch_topk_us": lambda: scores.topk(K, -1),
        "weights_us": lambda: router_weights(logits.detach(), scores, ids, True, True, 1.0),
        "weights_backward_us": lambda: torch.autograd.grad(weights, logits, grad, retain_graph=True),
        "tiles_us": lambda: make_tiles(counts, E, T * K, 128),
    }
    row = {"what": "router", "tokens": T, "experts": E, "top_k": K}
    return row | {name: round(graph_us(fn), 2) for name, fn in cases.items()}


def router_rows(device: torch.device) -> list[dict[str, Any]]:
    """Selection with counts, combine weights and their backward, and tile tables, in microseconds."""
    return [_router_row(device, *case) for case in ((8192, 128, 8), (8192, 256, 8), (8192, 32, 4))]
