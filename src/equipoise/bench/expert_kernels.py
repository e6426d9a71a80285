"""Grouped products and SwiGLU experts, masters and replicas, against PyTorch's `grouped_mm`: shapes, peers, tuning.

Shapes: M masters and S slots on a rank, N x K one expert's weight, D model features, I inner features.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from equipoise.bench.kernel_timing import gpu, interleaved_medians
from equipoise.kernels.grouped_gemm import (
    dual_dgrad,
    dual_forward,
    dual_swiglu_backward,
    dual_swiglu_forward,
    dual_wgrad,
    triton_grouped_mlp,
)
from equipoise.kernels.grouped_linear import grouped_mm_linear
from equipoise.kernels.grouped_mlp import plain_grouped_mlp
from equipoise.kernels.tiles import Tiles, plain_tiles
from equipoise.kernels.tuning import BLOCK_ROWS

LOADS = ("balanced", "zipf")
Say = Callable[[str], object]


class Shape(NamedTuple):
    """One rank's experts: D = `features`, I = `inner`; `tokens` is the mean of an expert."""

    name: str
    masters: int
    slots: int
    features: int
    inner: int
    tokens: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """N, K of each product."""
        return {"gate_up": (2 * self.inner, self.features), "down": (self.features, self.inner)}


SHAPES = (
    Shape("square", 4, 1, 4096, 4096, 8192),
    Shape("qwen3-30b-a3b", 16, 2, 2048, 768, 1024),
    Shape("qwen3-30b-a3b", 16, 2, 2048, 768, 16384),
    Shape("qwen3-30b-a3b", 32, 2, 2048, 768, 2048),
    Shape("qwen3-30b-a3b", 128, 2, 2048, 768, 128),
    Shape("qwen3-30b-a3b", 128, 2, 2048, 768, 512),
    Shape("qwen3-235b-a22b", 16, 2, 4096, 1536, 512),
    Shape("qwen3-235b-a22b", 16, 2, 4096, 1536, 4096),
    Shape("deepseek-v3", 8, 1, 7168, 2048, 1024),
    Shape("deepseek-v3", 8, 1, 7168, 2048, 4096),
    Shape("32-experts", 32, 2, 4096, 2048, 128),
    Shape("32-experts", 32, 2, 4096, 2048, 2048),
)
QUICK_SHAPES = (SHAPES[1], SHAPES[4], SHAPES[7])


class Rows(NamedTuple):
    """A load: rows of each expert, as tables and as `grouped_mm` takes them."""

    tiles: Tiles
    ends_L: torch.Tensor
    counts_L: torch.Tensor
    total: int


def make_rows(shape: Shape, load: str) -> Rows:
    """Rows drawn for masters and slots alike, evenly or by a Zipf law."""
    L = shape.masters + shape.slots
    chances = torch.ones(L) if load == "balanced" else 1 / torch.arange(1, L + 1)
    total = L * shape.tokens
    generator = torch.Generator().manual_seed(0)
    draws = torch.multinomial(chances, total, replacement=True, generator=generator)
    counts_L = draws.bincount(minlength=L).to("cuda")
    tiles = plain_tiles(counts_L, shape.masters, total, BLOCK_ROWS)
    return Rows(tiles, tiles.offsets_L1[1:].clone(), counts_L, total)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda", dtype=torch.bfloat16)


def random_weight(L: int, N: int, K: int) -> torch.Tensor:
    return random(L, N, K).mul_(K**-0.5)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    difference = torch.linalg.vector_norm(value.float() - reference.float())
    return float(difference / torch.linalg.vector_norm(reference.float()))


def dense_tflops() -> float:
    """Rate of a dense product of 8192 x 8192 matrices."""
    a, b = random(8192, 8192), random(8192, 8192)
    return 2 * 8192**3 / interleaved_medians({"dense": lambda: a @ b})["dense"] / 1e9


def product_rows(shape: Shape, load: str, dense: float) -> Iterator[dict[str, Any]]:
    """Forward, gradient of rows and gradient of weights of both products."""
    M, S = shape.masters, shape.slots
    rows = make_rows(shape, load)
    for product, (N, K) in shape.products.items():
        x, grad, weight = random(rows.total, K), random(rows.total, N), random_weight(M + S, N, K)
        masters, slots = weight[:M], weight[M:].clone()
        slot_grads = torch.zeros(S, N, K, device="cuda")
        ours: dict[str, Callable[[], torch.Tensor]] = {
            "forward": partial(dual_forward, x, masters, slots, rows.tiles),
            "dgrad": partial(dual_dgrad, grad, masters, slots, rows.tiles),
            "wgrad": partial(dual_wgrad, grad, x, rows.tiles, M, out_slots=slot_grads, add=True),
        }
        peers: dict[str, Callable[[], torch.Tensor]] = {
            "forward": partial(F.grouped_mm, x, weight.transpose(1, 2), offs=rows.ends_L),
            "dgrad": partial(F.grouped_mm, grad, weight, offs=rows.ends_L),
            "wgrad": partial(F.grouped_mm, grad.t(), x, offs=rows.ends_L),
        }
        for kind in ours:
            ours_out, peer_out = ours[kind](), peers[kind]()
            error = relative_error(ours_out, peer_out[: ours_out.shape[0]])
            del ours_out, peer_out
            ms = interleaved_medians({"ours": ours[kind], "grouped_mm": peers[kind]})
            flops = 2 * rows.total * N * K
            yield {
                "kind": kind, "shape": shape.name, "product": product, "masters": M, "slots": S, "N": N, "K": K,
                "tokens_per_expert": shape.tokens, "load": load, "ms": round(ms["ours"], 4),
                "grouped_mm_ms": round(ms["grouped_mm"], 4), "ratio": round(ms["grouped_mm"] / ms["ours"], 4),
                "tflops": round(flops / ms["ours"] / 1e9, 1),
                "share_of_dense": round(flops / ms["ours"] / 1e9 / dense, 3),
                "relative_difference": float(f"{error:.1e}"),
            }  # fmt: skip


def mlp_row(shape: Shape, load: str, dense: float) -> dict[str, Any]:
    """SwiGLU experts, forward and backward with all gradients; ours adds the replicas' in FP32."""
    (M, S, D, inner), rows = (shape.masters, shape.slots, shape.features, shape.inner), make_rows(shape, load)
    x, grad = random(rows.total, D).requires_grad_(), random(rows.total, D)
    gate_up = random_weight(M + S, 2 * inner, D).requires_grad_()
    down = random_weight(M + S, D, inner).requires_grad_()
    up_masters, up_slots = gate_up.detach()[:M], gate_up.detach()[M:].clone()
    down_masters, down_slots = down.detach()[:M], down.detach()[M:].clone()
    up_grads = torch.zeros(S, 2 * inner, D, device="cuda")
    down_grads = torch.zeros(S, D, inner, device="cuda")
    plain_x = x.detach()

    def ours() -> tuple[torch.Tensor, ...]:
        act, hidden = dual_swiglu_forward(plain_x, up_masters, up_slots, rows.tiles)
        out = dual_forward(act, down_masters, down_slots, rows.tiles)
        del act
        grad_hidden, act = dual_swiglu_backward(grad, down_masters, down_slots, hidden, rows.tiles)
        grad_down = dual_wgrad(grad, act, rows.tiles, M, out_slots=down_grads, add=True)
        grad_up = dual_wgrad(grad_hidden, plain_x, rows.tiles, M, out_slots=up_grads, add=True)
        return out, dual_dgrad(grad_hidden, up_masters, up_slots, rows.tiles), grad_up, grad_down

    def unfused() -> tuple[torch.Tensor, ...]:
        out = plain_grouped_mlp(x, gate_up, down, rows.counts_L, grouped_mm_linear)
        return out, *torch.autograd.grad(out, (x, gate_up, down), grad)

    error = max(
        relative_error(value, reference[: value.shape[0]]) for value, reference in zip(ours(), unfused(), strict=True)
    )
    ms = interleaved_medians({"ours": ours, "unfused": unfused})
    flops = 18 * rows.total * D * inner
    saved = {
        "ours": saved_bytes(lambda: triton_grouped_mlp(x, gate_up, down, rows.counts_L), (gate_up, down)),
        "unfused": saved_bytes(
            lambda: plain_grouped_mlp(x, gate_up, down, rows.counts_L, grouped_mm_linear), (gate_up, down)
        ),
    }
    return {
        "kind": "mlp", "shape": shape.name, "masters": M, "slots": S, "D": D, "I": inner,
        "tokens_per_expert": shape.tokens, "load": load, "ms": round(ms["ours"], 4),
        "unfused_ms": round(ms["unfused"], 4), "ratio": round(ms["unfused"] / ms["ours"], 4),
        "tflops": round(flops / ms["ours"] / 1e9, 1), "share_of_dense": round(flops / ms["ours"] / 1e9 / dense, 3),
        "saved_bytes": saved["ours"], "unfused_saved_bytes": saved["unfused"],
        "relative_difference": float(f"{error:.1e}"),
    }  # fmt: skip


def saved_bytes(forward: Callable[[], torch.Tensor], parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of the storages that the forward keeps for its backward, parameters left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in parameters}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = forward()
    del out
    return sum(kept.values())


def geomean(values: Sequence[float]) -> float:
    return math.exp(sum(math.log(value) for value in values) / len(values))


def study(shapes: Sequence[Shape], say: Say) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of every shape and load, and their summary."""
    dense = dense_tflops()
    say(f"dense product: {dense:.0f} TFLOP/s")
    found = []
    for shape in shapes:
        for load in LOADS:
            for row in (*product_rows(shape, load, dense), mlp_row(shape, load, dense)):
                found.append(row)
                say(
                    f"{row['shape']:16} {row['masters']:3}+{row['slots']} {row['tokens_per_expert']:5} tokens "
                    f"{load:8} {row.get('product', 'experts'):8} {row['kind']:8} {row['tflops']:6.0f} TFLOP/s, "
                    f"{row['ratio']:.3f} x grouped_mm, {row['share_of_dense']:.0%} of dense"
                )
            gpu().empty_cache()
    ratios = {
        kind: [row["ratio"] for row in found if row["kind"] == kind] for kind in ("forward", "dgrad", "wgrad", "mlp")
    }
    saved = [row["saved_bytes"] / row["unfused_saved_bytes"] for row in found if row["kind"] == "mlp"]
    return found, {
        "forward_geomean": geomean(ratios["forward"]),
        "dgrad_geomean": geomean(ratios["dgrad"]),
        "wgrad_geomean": geomean(ratios["wgrad"]),
        "worst": min(ratio for kind in ("forward", "dgrad", "wgrad") for ratio in ratios[kind]),
        "mlp_speedup": geomean(ratios["mlp"]),
        "saved_activation_ratio": max(saved),
        "dense_tflops": dense,
    }
