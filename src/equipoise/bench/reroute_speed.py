"""How long the reroute with its permutation, the tile tables, permuting, combining and the router take on one device.

Times are medians of replays of CUDA graphs that hold many launches, so that the host's share is not in them.
"""

from typing import Any

import torch

from equipoise.balance.protocol import PlannerSettings
from equipoise.balance.registry import planner_maker
from equipoise.balance.reroute import count_load
from equipoise.balance.splits import complete_plan
from equipoise.bench.kernel_timing import graph_us
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
    # Backwards by their operators: autograd would run them on the stream of the forward, outside of the capture.
    from equipoise.kernels.permute_triton import combine_backward, gather_sum

    permutation = make_permutation(random_ids(T, K, E, torch.Generator().manual_seed(0)).to(device), E)
    row_TK, valid_TK = permutation.row_TK, permutation.valid_TK
    x_TD, grad_TD = (torch.randn(T, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    rows_RD, grad_RD = (torch.randn(T * K, D, device=device, dtype=torch.bfloat16) for _ in range(2))
    weights_TK, target = torch.rand(T, K, device=device), torch.empty_like(rows_RD)
    copy = 2 * rows_RD.nbytes / graph_us(lambda: target.copy_(rows_RD), 5)
    once, twice = x_TD.nbytes + rows_RD.nbytes, x_TD.nbytes + 2 * rows_RD.nbytes
    cases = {
        "permute": (once, lambda: permute(x_TD, permutation)),
        "permute backward": (once, lambda: gather_sum(grad_RD, row_TK, valid_TK, None, x_TD.dtype)),
        "combine": (once, lambda: combine(rows_RD, weights_TK, permutation)),
        "combine backward": (
            twice,
            lambda: combine_backward(grad_TD, rows_RD, row_TK, valid_TK, weights_TK, True),
        ),
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
    from equipoise.kernels.router_weights import router_weights_backward

    logits_TE = torch.randn(T, E, device=device)
    scores_TE = logits_TE.softmax(-1)
    ids_TK, counts_E = select_experts(scores_TE, None, None, K, 1, 1)
    grad_TK = torch.randn(T, K, device=device)
    cases = {
        "select_us": lambda: select_experts(scores_TE, None, None, K, 1, 1),
        "torch_topk_us": lambda: scores_TE.topk(K, -1),
        "weights_us": lambda: router_weights(logits_TE, scores_TE, ids_TK, True, True, 1.0),
        "weights_backward_us": lambda: router_weights_backward(grad_TK, logits_TE, ids_TK, True, True, 1.0),
        "tiles_us": lambda: make_tiles(counts_E, E, T * K, 128),
    }
    row = {"what": "router", "tokens": T, "experts": E, "top_k": K}
    return row | {name: round(graph_us(fn), 2) for name, fn in cases.items()}


def router_rows(device: torch.device) -> list[dict[str, Any]]:
    """Selection with counts, combine weights and their backward, and tile tables, in microseconds."""
    return [_router_row(device, *case) for case in ((8192, 128, 8), (8192, 256, 8), (8192, 32, 4))]
