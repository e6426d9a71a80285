"""Symmetric transport and dispatcher on two GPUs: the bits of the collective forms, no host sync, CUDA graphs, a rank
that stays away, a small batch."""

import statistics
import time
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.harness import run_ranks
from distributed.parity import relative
from equipoise.accelerator import get_accelerator
from equipoise.balance import BalanceConfig, Balancer
from equipoise.balance.replicas import Copies
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.dispatch import Dispatcher, SymmetricDispatcher, build_dispatcher
from equipoise.dispatch.base import DeviceExchange, Exchange
from equipoise.dispatch.symmetric import FEW_BYTES
from equipoise.distributed import join_world
from equipoise.errors import RankFailure
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.symmetric.space import SymmetricSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]
E, K, D, INNER, T = 32, 4, 1024, 512, 1500
SHAPES = {"up": (2 * INNER, D), "down": (D, INNER)}
Result = tuple[torch.Tensor, ...]


class Ranks:
    """This rank's experts, tokens and both forms of everything."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.group, self.device, self.dtype = dist.group.WORLD, torch.device("cuda", rank), dtype
        self.generator = torch.Generator(self.device).manual_seed(rank)
        self.space = SymmetricSpace(self.group, self.device, timeout_s=20.0)
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        everybody = torch.Generator(self.device).manual_seed(7)
        make = lambda *shape: torch.randn(E, *shape, device=self.device, generator=everybody)  # noqa: E731
        self.up = (make(*SHAPES["up"]) / D**0.5)[mine].to(dtype).clone()
        self.down = (make(*SHAPES["down"]) / INNER**0.5)[mine].to(dtype).clone()
        config = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
        self.symmetric = Balancer(self.group, E, SHAPES, dtype, config, space=self.space)
        self.collective = Balancer(self.group, E, SHAPES, dtype, config)
        physical = self.symmetric.num_physical_experts
        self.dispatchers: dict[str, Dispatcher] = {
            "symmetric": SymmetricDispatcher(
                *(physical, self.space, 0), max_tokens=T, few_bytes=0 if dtype == torch.float32 else FEW_BYTES
            ),
            "collective": build_dispatcher("all_to_all", physical, self.group),
            "off": build_dispatcher("all_to_all", E, self.group),
        }
        self.kernel = "loop" if dtype == torch.float32 else "auto"

    def tokens(self, number: int = T, heat: float = 0.3) -> Result:
        """x, logical ids, weights, and the output's gradient."""
        scores = torch.rand(number, E, device=self.device, generator=self.generator)
        scores[:, : E // 2] += heat
        x, gradient = (
            torch.randn(number, D, device=self.device, generator=self.generator).to(self.dtype) for _ in range(2)
        )
        return x, scores.topk(K).indices.int(), torch.rand_like(scores[:, :K]), gradient

    def run(
        self, form: str, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor
    ) -> Result:
        """Output and all gradients of a layer."""
        up, down, x, weights = (t.detach().requires_grad_() for t in (self.up, self.down, x, weights))
        dispatcher = self.dispatchers[form]
        if form == "off":
            arrived = dispatcher.dispatch(x, ids, weights)
            rows = grouped_mlp(arrived.rows_RD, up, down, arrived.counts_M, self.kernel)
            y = dispatcher.combine(rows, arrived.handle)
        else:
            balancer = self.symmetric if form == "symmetric" else self.collective
            entered = balancer.enter("up", up), balancer.enter("down", down)
            step = balancer.route(ids)
            attached = step.attach("up", entered[0]), step.attach("down", entered[1])
            known = None if step.device_exchange is None else DeviceExchange(*step.device_exchange)
            exchange = known or Exchange(*step.exchange)  # type: ignore[misc]
            arrived = dispatcher.dispatch(x, step.physical_ids_TK, weights, exchange)
            rows = step.grouped_mlp(arrived.rows_RD, arrived.counts_M, *attached, self.kernel, arrived.make_rows)
            y = step.leave(dispatcher.combine(rows, arrived.handle))
        y.backward(gradient)
        assert x.grad is not None
        return y.detach(), x.grad, weights.grad, up.grad, down.grad  # type: ignore[return-value]


def same_bits(ranks: Ranks) -> dict[str, Any]:
    """For several loads and numbers of tokens: whether both forms have the same bits, and how far off is."""
    found: dict[str, Any] = {"same": [], "difference": 0.0}
    side = torch.cuda.Stream()
    other = dist.new_group(backend="nccl")
    noise, gathered = torch.ones(1 << 20, device=ranks.device), torch.empty(2 << 20, device=ranks.device)
    for number, heat in ((T, 0.3), (T, 2.0), (T, 0.0), (128, 0.5), (31, 1.0), (1, 0.0), (0, 0.0)):
        tokens = ranks.tokens(number, heat)
        with torch.cuda.stream(side):  # a collective beside all that
            dist.all_gather_into_tensor(gathered, noise, group=other)
        symmetric, collective = ranks.run("symmetric", *tokens), ranks.run("collective", *tokens)
        off = ranks.run("off", *tokens)
        found["same"] += [
            torch.equal(a, b) for index in (0, 1, 3, 4) for a, b in [(symmetric[index], collective[index])]
        ]
        if number:
            differences = [relative(a.float(), b.float()) for a, b in zip(symmetric, off)]
            found["difference"] = max(found["difference"], *differences)
    ranks.space.check()
    return found


def no_host_sync(ranks: Ranks) -> bool:
    tokens = ranks.tokens()
    ranks.run("symmetric", *tokens)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            ranks.run("symmetric", *tokens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return True


def graph_with_changing_loads(ranks: Ranks) -> list[bool]:
    tokens = ranks.tokens()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            ranks.run("symmetric", *tokens)
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        made = ranks.run("symmetric", *tokens)
    same = []
    for heat in (0.0, 0.5, 2.0):
        tokens[1].copy_(ranks.tokens(T, heat)[1])
        graph.replay()
        torch.cuda.synchronize()
        wanted = ranks.run("collective", *tokens)
        same += [torch.equal(made[index], wanted[index]) for index in (0, 1, 3, 4)]
    return same


def small_batches(ranks: Ranks) -> dict[str, float]:
    """Seconds of a layer of 16 tokens, off and on: buffers for many tokens cost a small batch nothing."""
    tokens = ranks.tokens(16)
    seconds = {}
    for form in ("off", "symmetric"):
        times = []
        for _ in range(12):
            torch.cuda.synchronize()
            dist.barrier()
            start = time.perf_counter()
            ranks.run(form, *tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds[form] = statistics.median(times[2:])
    return seconds


def a_rank_stays_away(ranks: Ranks) -> tuple[str, float]:
    """Message and seconds of rank 0, which waits for rank 1."""
    space = SymmetricSpace(ranks.group, ranks.device, timeout_s=2.0)
    transport = SymmetricTransport(space, SymmetricBuffers({"w": (4,)}, 1, torch.float32, space), 1)
    transport.prepare("w", ranks.device, True)
    message, started = "", time.monotonic()
    if dist.get_rank() == 0:
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


SCENARIOS: tuple[Callable[[Ranks], Any], ...] = (
    same_bits,
    no_host_sync,
    graph_with_changing_loads,
    small_batches,
    a_rank_stays_away,
)


def run_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    with join_world(get_accelerator(), 60) as world:
        for dtype in (torch.float32, torch.bfloat16):
            ranks = Ranks(world.rank, dtype)
            for scenario in SCENARIOS if dtype == torch.bfloat16 else SCENARIOS[:1]:
                try:
                    found[f"{scenario.__name__} {dtype}"] = scenario(ranks)
                except Exception:
                    found[f"{scenario.__name__} {dtype}"] = traceback.format_exc()
                    return found
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_s=280)


def of(ranks: list[dict[str, Any]], name: str) -> list[Any]:
    found = [rank.get(f"{name} torch.bfloat16", f"an earlier scenario failed: {rank}") for rank in ranks]
    assert not any(isinstance(value, str) for value in found), found
    return found


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_both_transports_and_dispatchers_have_the_same_bits(two, dtype: str, limit: float) -> None:
    for rank in two:
        found = rank[f"same_bits torch.{dtype}"]
        assert not isinstance(found, str), found
        assert all(found["same"])
        assert found["difference"] < limit


def test_nothing_waits_for_the_device(two) -> None:
    assert of(two, "no_host_sync") == [True, True]


def test_a_captured_layer_follows_the_load(two) -> None:
    assert all(map(all, of(two, "graph_with_changing_loads")))


def test_small_batches_are_as_fast_balanced_as_not(two) -> None:
    for seconds in of(two, "small_batches"):
        assert seconds["symmetric"] < 1.5 * seconds["off"], seconds


def test_a_missing_rank_is_named_within_the_deadline(two) -> None:
    message, seconds = of(two, "a_rank_stays_away")[0]
    assert "rank 0 waited for rank 1" in message
    assert 1 < seconds < 20
