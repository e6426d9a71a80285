"""A layer of experts on GPUs, balanced and not, and what its symmetric form has to do wherever it runs.

Each test builds its own ranks from these and says what they are compared with: test_symmetric_gpu.py (a GPU each, the
collective forms), test_symmetric_one_gpu.py (two processes on one GPU, the layer in one process).
Shapes: T tokens, D features, K experts per token, E experts.
"""

import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from equipoise.balance import Balancer
from equipoise.balance.replicas import Copies
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.dispatch import Dispatcher
from equipoise.dispatch.base import DeviceExchange, Exchange
from equipoise.errors import RankFailure
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.symmetric.space import SymmetricSpace

E, K, D, INNER, T = 32, 4, 1024, 512, 1500
SHAPES = {"up": (2 * INNER, D), "down": (D, INNER)}
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""x, logical ids, weights, and the output's gradient."""
Layer = Callable[..., torch.Tensor]
"""From x, ids, weights, up and down to the output."""


def make_weights(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Up and down of all experts, the same on all ranks."""
    everybody = torch.Generator(device).manual_seed(7)
    up, down = (torch.randn(E, *shape, device=device, generator=everybody) for shape in SHAPES.values())
    return (up / D**0.5).to(dtype), (down / INNER**0.5).to(dtype)


def make_tokens(generator: torch.Generator, number: int, heat: float, dtype: torch.dtype) -> Tokens:
    """The first rank's experts are preferred by `heat`."""
    options: dict[str, Any] = {"device": generator.device, "generator": generator}
    scores = torch.rand(number, E, **options)
    scores[:, : E // 2] += heat
    x, gradient = (torch.randn(number, D, **options).to(dtype) for _ in range(2))
    return x, scores.topk(K).indices.int(), torch.rand(number, K, **options), gradient


def plain(dispatcher: Dispatcher, kernel: str) -> Layer:
    def layer(x, ids, weights, up, down):
        arrived = dispatcher.dispatch(x, ids, weights)
        rows = grouped_mlp(arrived.rows_RD, up, down, arrived.counts_M, kernel, arrived.make_rows, arrived.weights_R)
        return dispatcher.combine(rows, arrived.handle)

    return layer


def balanced(dispatcher: Dispatcher, balancer: Balancer, kernel: str) -> Layer:
    def layer(x, ids, weights, up, down):
        entered = balancer.enter("up", up), balancer.enter("down", down)
        step = balancer.route(ids)
        attached = step.attach("up", entered[0]), step.attach("down", entered[1])
        known = None if step.device_exchange is None else DeviceExchange(*step.device_exchange)
        arrived = dispatcher.dispatch(x, step.physical_ids_TK, weights, known or Exchange(*step.exchange))
        made = arrived.make_rows, arrived.weights_R
        rows = step.grouped_mlp(arrived.rows_RD, arrived.counts_M, *attached, kernel, *made)
        return step.leave(dispatcher.combine(rows, arrived.handle))

    return layer


def run(layer: Layer, tokens: Tokens, up: torch.Tensor, down: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of x, weights, up and down."""
    x, ids, weights, gradient = tokens
    up, down, x, weights = (t.detach().requires_grad_() for t in (up, down, x, weights))
    y = layer(x, ids, weights, up, down)
    y.backward(gradient)
    return [y.detach(), x.grad, weights.grad, up.grad, down.grad]  # type: ignore[list-item]


def synchronizes_nowhere(step: Callable[[], Any]) -> bool:
    """Raises where the host waits for the device, once everything is compiled."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def capture(step: Callable[[], list[torch.Tensor]]) -> tuple[torch.cuda.CUDAGraph, list[torch.Tensor]]:
    """A CUDA graph of `step` on all ranks, and the results that a replay writes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = step()
    return graph, made


def wait_for_a_rank_that_stays_away(space: SymmetricSpace) -> tuple[str, float]:
    """Message and seconds of rank 0, which pushes to rank 1 and waits for it. `space` has a short timeout."""
    transport = SymmetricTransport(space, SymmetricBuffers({"w": (4,)}, 1, torch.float32, space), 1)
    transport.prepare("w", space.device, True)
    message, started = "", time.monotonic()
    if dist.get_rank() == 0:
        slot_expert = torch.tensor([-1, 0], dtype=torch.int32, device=space.device)
        weight = torch.zeros(1, 4, device=space.device)
        try:
            for _ in range(3):
                transport.push_weights("w", Copies(slot_expert, ()), weight, "w").wait()
                torch.cuda.synchronize()
        except RankFailure as error:
            message = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    return message, seconds


def run_scenarios(
    scenarios: Sequence[Callable[[Any], Any]], make_ranks: Callable[[torch.dtype], Any]
) -> dict[str, Any]:
    """What the first returned in FP32 and all in BF16, or a traceback; it ends at the first that fails."""
    found: dict[str, Any] = {}
    for dtype, chosen in ((torch.float32, scenarios[:1]), (torch.bfloat16, scenarios)):
        ranks = make_ranks(dtype)
        for scenario in chosen:
            name, started = f"{scenario.__name__} {dtype}", time.monotonic()
            try:
                found[name] = scenario(ranks)
            except Exception:
                found[name] = traceback.format_exc()
                ranks.space.abandon()
                return found
            print(f"{name}: {found[name]} in {time.monotonic() - started:.1f} s", flush=True)
    return found


def of(ranks: list[dict[str, Any]], name: str, dtype: str = "bfloat16") -> list[Any]:
    """A scenario's results by rank; fails with the traceback where it failed or was not reached."""
    found = [rank.get(f"{name} torch.{dtype}", f"an earlier scenario failed: {rank}") for rank in ranks]
    assert not any(isinstance(value, str) for value in found), found
    return found
