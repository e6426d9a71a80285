"""Symmetric transport and dispatcher on one GPU that two processes share: the compiled kernels against a layer that one
process computes alone. No speed can be seen here, and no link; see test_symmetric_gpu.py for two GPUs."""

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.gpu_layer import (
    SHAPES,
    E,
    Layer,
    T,
    Tokens,
    balanced,
    capture,
    make_tokens,
    make_weights,
    of,
    plain,
    run,
    run_scenarios,
    synchronizes_nowhere,
    wait_for_a_rank_that_stays_away,
)
from distributed.harness import run_ranks
from distributed.parity import relative
from distributed.shared_gpu import share_device_memory
from equipoise.balance import BalanceConfig, Balancer
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.errors import ConfigError, RankFailure
from equipoise.symmetric.space import SymmetricSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SIZES = (T, 128, 31, 1, 0)


class Ranks:
    """Both ranks' experts and tokens, of which this one uses its own; everybody can compute the whole alone."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.rank, self.group, self.dtype = dist.get_rank(), dist.group.WORLD, dtype
        self.device = torch.device("cuda", 0)
        self.space = SymmetricSpace(self.group, self.device, 60.0, share_device_memory)
        self.up, self.down = make_weights(self.device, dtype)
        config = BalanceConfig(num_redundant_experts_per_rank=2, tolerance=0.0)
        balancer = Balancer(self.group, E, SHAPES, dtype, config, space=self.space)
        self.generators = [torch.Generator(self.device).manual_seed(rank) for rank in range(2)]
        kernel = "loop" if dtype == torch.float32 else "triton"
        dispatcher = SymmetricDispatcher(balancer.num_physical_experts, self.space, 0, max_tokens=T)
        self.balanced = balanced(dispatcher, balancer, kernel)
        options: dict[str, Any] = {"max_tokens": T, "few_bytes": 0, "weighs_rows": True}
        self.plain = plain(SymmetricDispatcher(E, self.space, 0, **options), kernel)
        self.whole = plain(build_dispatcher("local", E, None), kernel)

    def tokens(self, number: int = T, heat: float = 0.3) -> list[Tokens]:
        """Of both ranks."""
        return [make_tokens(generator, number, heat, self.dtype) for generator in self.generators]

    def run(self, tokens: list[Tokens], layer: Layer | None = None) -> list[torch.Tensor]:
        """This rank's output and gradients."""
        mine = slice(self.rank * E // 2, (self.rank + 1) * E // 2)
        return run(layer or self.balanced, tokens[self.rank], self.up[mine], self.down[mine])

    def alone(self, tokens: list[Tokens]) -> list[torch.Tensor]:
        """The same, of the whole layer in one process."""
        together: Any = tuple(torch.cat(parts) for parts in zip(*tokens))
        halves = [value.chunk(2) for value in run(self.whole, together, self.up, self.down)]
        return [value[self.rank] if len(value) == 2 else value[0] for value in halves]

    def difference(self, got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
        return max((relative(a.float(), b.float()) for a, b in zip(got, want) if a.numel()), default=0.0)


def as_one_process(ranks: Ranks) -> dict[str, float]:
    """The largest relative differences, by tokens and load, and of the dispatcher without balancing."""
    found = {}
    for number, heat in [(size, 0.3) for size in SIZES] + [(T, 0.0), (T, 2.0)]:
        tokens = ranks.tokens(number, heat)
        found[f"{number} {heat}"] = ranks.difference(ranks.run(tokens), ranks.alone(tokens))
    tokens = ranks.tokens()
    found["not balanced"] = ranks.difference(ranks.run(tokens, ranks.plain), ranks.alone(tokens))
    ranks.space.check()
    return found


def no_host_sync(ranks: Ranks) -> bool:
    tokens = ranks.tokens()
    return synchronizes_nowhere(lambda: ranks.run(tokens))


def graph_with_changing_loads(ranks: Ranks) -> dict[float, float]:
    tokens = ranks.tokens()
    graph, made = capture(lambda: ranks.run(tokens))
    found = {}
    for heat in (0.0, 0.5, 2.0):
        for changed, present in zip(ranks.tokens(T, heat), tokens):
            present[1].copy_(changed[1])
        graph.replay()
        torch.cuda.synchronize()
        found[heat] = ranks.difference(made, ranks.alone(tokens))
    return found


def a_rank_stays_away(ranks: Ranks) -> tuple[str, float]:
    space = SymmetricSpace(ranks.group, ranks.device, 2.0, share_device_memory)
    return wait_for_a_rank_that_stays_away(space)


def a_rank_fails_alone(ranks: Ranks) -> tuple[str, float]:
    """Rank 1 brings more tokens than the buffers hold: both messages, and seconds of a timeout of 60."""
    dispatcher = SymmetricDispatcher(E, ranks.space, capacity_factor=0)
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


SCENARIOS = (as_one_process, no_host_sync, graph_with_changing_loads, a_rank_stays_away, a_rank_fails_alone)


def run_all() -> dict[str, Any]:
    torch.cuda.set_device(0)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = run_scenarios(SCENARIOS, Ranks)
    if not any(isinstance(value, str) for value in found.values()):
        dist.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_s=150)


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
