"""Symmetric transport and dispatcher on one GPU that two processes share: the compiled kernels against a layer that one
process computes alone. No speed can be seen here, and no link; see test_symmetric_gpu.py for two GPUs."""

import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.harness import run_ranks
from distributed.parity import relative
from distributed.shared_gpu import share_device_memory
from equipoise.balance import BalanceConfig, Balancer
from equipoise.balance.replicas import Copies
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.dispatch.base import DeviceExchange
from equipoise.errors import ConfigError, RankFailure
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.symmetric.space import SymmetricSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
E, K, D, INNER, T = 32, 4, 1024, 512, 1500
SHAPES = {"up": (2 * INNER, D), "down": (D, INNER)}
SIZES = (T, 128, 31, 1, 0)
Tokens = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class Ranks:
    """Both ranks' experts and tokens, of which this one uses its own; everybody can compute the whole alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rank, self.group, self.device, self.dtype = (
            dist.get_rank(),
            dist.group.WORLD,
            torch.device("cuda", 0),
            dtype,
        )
        self.space = SymmetricSpace(self.group, self.device, 60.0, share_device_memory)
        everybody = torch.Generator(self.device).manual_seed(7)
        make = lambda *shape: torch.randn(E, *shape, device=self.device, generator=everybody)  # noqa: E731
        self.up = (make(*SHAPES["up"]) / D**0.5).to(dtype)
        self.down = (make(*SHAPES["down"]) / INNER**0.5).to(dtype)
        config = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
        self.balancer = Balancer(self.group, E, SHAPES, dtype, config, space=self.space)
        self.dispatcher = SymmetricDispatcher(self.balancer.num_physical_experts, self.space, 0, max_tokens=T)
        self.plain = SymmetricDispatcher(E, self.space, 0, max_tokens=T)
        self.generators = [torch.Generator(self.device).manual_seed(rank) for rank in range(2)]
        self.kernel = "loop" if dtype == torch.float32 else "triton"

    def tokens(self, number: int = T, heat: float = 0.3) -> list[Tokens]:
        """x, logical ids, weights and the output's gradient, of both ranks."""
        made = []
        for generator in self.generators:
            scores = torch.rand(number, E, device=self.device, generator=generator)
            scores[:, : E // 2] += heat
            x, gradient = (
                torch.randn(number, D, device=self.device, generator=generator).to(self.dtype) for _ in range(2)
            )
            weights = torch.rand(number, K, device=self.device, generator=generator)
            made.append((x, scores.topk(K).indices.int(), weights, gradient))
        return made

    def run(self, tokens: list[Tokens], balanced: bool = True) -> list[torch.Tensor]:
        """This rank's output and gradients."""
        x, ids, weights, gradient = tokens[self.rank]
        mine = slice(self.rank * E // 2, (self.rank + 1) * E // 2)
        up, down, x, weights = (t.detach().requires_grad_() for t in (self.up[mine], self.down[mine], x, weights))
        if balanced:
            entered = self.balancer.enter("up", up), self.balancer.enter("down", down)
            step = self.balancer.route(ids)
            attached = step.attach("up", entered[0]), step.attach("down", entered[1])
            assert step.device_exchange is not None
            exchange = DeviceExchange(*step.device_exchange)
            arrived = self.dispatcher.dispatch(x, step.physical_ids_TK, weights, exchange)
            rows = step.grouped_mlp(arrived.rows_RD, arrived.counts_M, *attached, self.kernel, arrived.make_rows)
            y = step.leave(self.dispatcher.combine(rows, arrived.handle))
        else:
            arrived = self.plain.dispatch(x, ids, weights)
            rows = grouped_mlp(arrived.rows_RD, up, down, arrived.counts_M, self.kernel, arrived.make_rows)
            y = self.plain.combine(rows, arrived.handle)
        y.backward(gradient)
        return [y.detach(), x.grad, weights.grad, up.grad, down.grad]  # type: ignore[list-item]

    def alone(self, tokens: list[Tokens]) -> list[torch.Tensor]:
        """The same, of the whole layer in one process."""
        x, ids, weights, gradient = (torch.cat(parts) for parts in zip(*tokens))
        up, down, x, weights = (t.detach().requires_grad_() for t in (self.up, self.down, x, weights))
        dispatcher = build_dispatcher("local", E, None)
        arrived = dispatcher.dispatch(x, ids, weights)
        rows = grouped_mlp(arrived.rows_RD, up, down, arrived.counts_M, self.kernel)
        y = dispatcher.combine(rows, arrived.handle)
        y.backward(gradient)
        here, number = slice(self.rank * E // 2, (self.rank + 1) * E // 2), len(tokens[0][0])
        own = slice(self.rank * number, (self.rank + 1) * number)
        grads = x.grad, weights.grad, up.grad, down.grad
        return [y.detach()[own], grads[0][own], grads[1][own], grads[2][here], grads[3][here]]  # type: ignore[index]

    def difference(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
        return max((relative(a.float(), b.float()) for a, b in zip(got, want) if a.numel()), default=0.0)


def as_one_process(ranks: Ranks) -> dict[str, float]:
    """The largest relative differences, by tokens and load, and of the dispatcher without balancing."""
    found = {}
    for number, heat in [(size, 0.3) for size in SIZES] + [(T, 0.0), (T, 2.0)]:
        tokens = ranks.tokens(number, heat)
        found[f"{number} {heat}"] = ranks.difference(ranks.run(tokens), ranks.alone(tokens))
    tokens = ranks.tokens()
    found["not balanced"] = ranks.difference(ranks.run(tokens, balanced=False), ranks.alone(tokens))
    ranks.space.check()
    return found


def no_host_sync(ranks: Ranks) -> bool:
    tokens = ranks.tokens()
    ranks.run(tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            ranks.run(tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def graph_with_changing_loads(ranks: Ranks) -> dict[float, float]:
    tokens = ranks.tokens()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            ranks.run(tokens)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = ranks.run(tokens)
    found = {}
    for heat in (0.0, 0.5, 2.0):
        for changed, present in zip(ranks.tokens(T, heat), tokens):
            present[1].copy_(changed[1])
        graph.replay()
        torch.cuda.synchronize()
        found[heat] = ranks.difference(made, ranks.alone(tokens))
    return found


def a_rank_stays_away(ranks: Ranks) -> tuple[str, float]:
    """Message and seconds of rank 0, which waits for rank 1 in a push."""
    space = SymmetricSpace(ranks.group, ranks.device, 2.0, share_device_memory)
    transport = SymmetricTransport(space, SymmetricBuffers({"w": (4,)}, 1, torch.float32, space), 1)
    transport.prepare("w", ranks.device, True)
    message, started = "", time.monotonic()
    if ranks.rank == 0:
        slot_expert = torch.tensor([-1, 0], dtype=torch.int32, device=ranks.device)
        try:
            for _ in range(3):
                transport.push_weights("w", Copies(slot_expert, ()), torch.zeros(1, 4, device=ranks.device), "w").wait()
                torch.cuda.synchronize()
        except RankFailure as error:
            message = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    return message, seconds


def a_rank_fails_alone(ranks: Ranks) -> tuple[str, float]:
    """Rank 1 brings more tokens than the buffers hold: both messages, and seconds of a timeout of 60."""
    dispatcher = SymmetricDispatcher(E, ranks.space)
    started, message = time.monotonic(), ""
    for number in (8, 8 + ranks.rank):
        x, ids, weights, _ = ranks.tokens(number)[0]
        try:
            arrived = dispatcher.dispatch(x, ids, weights)
            dispatcher.combine(arrived.rows_RD, arrived.handle)
            torch.cuda.synchronize()
            ranks.space.check()
        except (ConfigError, RankFailure) as error:
            message = str(error)
    dist.barrier()
    return message, time.monotonic() - started


SCENARIOS: tuple[Callable[[Ranks], Any], ...] = (
    as_one_process,
    no_host_sync,
    graph_with_changing_loads,
    a_rank_stays_away,
    a_rank_fails_alone,
)


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    for dtype in (torch.float32, torch.bfloat16):
        ranks = Ranks(dtype)
        for scenario in SCENARIOS if dtype == torch.bfloat16 else SCENARIOS[:1]:
            name, started = f"{scenario.__name__} {dtype}", time.monotonic()
            try:
                found[name] = scenario(ranks)
            except Exception:
                found[name] = traceback.format_exc()
                ranks.space.abandon()
                return found
            print(f"{name}: {found[name]} in {time.monotonic() - started:.1f} s", flush=True)
    dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_s=150)


def of(ranks: list[dict[str, Any]], name: str, dtype: str = "bfloat16") -> list[Any]:
    found = [rank.get(f"{name} torch.{dtype}", f"an earlier scenario failed: {rank}") for rank in ranks]
    assert not any(isinstance(value, str) for value in found), found
    return found


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_two_ranks_are_one_process(two, dtype: str, limit: float) -> None:
    for found in of(two, "as_one_process", dtype):
        assert len(found) == len(SIZES) + 3
        assert max(found.values()) < limit, found


def test_nothing_waits_for_the_device(two) -> None:
    assert of(two, "no_host_sync") == [True, True]


def test_a_captured_layer_follows_the_load(two) -> None:
    for found in of(two, "graph_with_changing_loads"):
        assert max(found.values()) < 2e-2, found


def test_a_missing_rank_is_named_within_the_deadline(two) -> None:
    message, seconds = of(two, "a_rank_stays_away")[0]
    assert "rank 0 waited for rank 1" in message
    assert 1 < seconds < 30


def test_a_rank_that_fails_alone_keeps_nobody_waiting(two) -> None:
    (other, seconds), (mine, _) = of(two, "a_rank_fails_alone")
    assert "max_tokens" in mine
    assert "which has failed" in other
    assert seconds < 20
