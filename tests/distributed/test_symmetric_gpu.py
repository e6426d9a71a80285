"""Symmetric transport and dispatcher on two GPUs: the bits of the collective forms, no host sync, CUDA graphs, a rank
that stays away, a small batch."""

import statistics
import time
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
from equipoise.accelerator import get_accelerator
from equipoise.balance import BalanceConfig, Balancer
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.dispatch.symmetric import FEW_BYTES
from equipoise.distributed import join_world
from equipoise.symmetric.space import SymmetricSpace

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]


class Ranks:
    """This rank's experts, tokens and both forms of everything."""

    def __init__(self, rank: int, dtype: torch.dtype) -> None:
        self.group, self.device, self.dtype = dist.group.WORLD, torch.device("cuda", rank), dtype
        self.generator = torch.Generator(self.device).manual_seed(rank)
        self.space = SymmetricSpace(self.group, self.device, timeout_s=20.0)
        mine = slice(rank * E // 2, (rank + 1) * E // 2)
        self.up, self.down = (weight[mine].clone() for weight in make_weights(self.device, dtype))
        config = BalanceConfig(num_redundant_experts_per_rank=4, tolerance=0.0)  # in two parts
        symmetric = Balancer(self.group, E, SHAPES, dtype, config, space=self.space)
        collective = Balancer(self.group, E, SHAPES, dtype, config)
        physical = symmetric.num_physical_experts
        kernel = "loop" if dtype == torch.float32 else "auto"
        few = 0 if dtype == torch.float32 else FEW_BYTES
        in_memory = SymmetricDispatcher(physical, self.space, 0, max_tokens=T, few_bytes=few)
        options: dict[str, Any] = {"max_tokens": T, "few_bytes": 0, "weighs_rows": True}
        weighing = self.weighing = SymmetricDispatcher(physical, self.space, 0, **options)
        self.layers: dict[str, Layer] = {
            "symmetric": balanced(in_memory, symmetric, kernel),
            "weighing": balanced(weighing, symmetric, kernel),
            "collective": balanced(build_dispatcher("all_to_all", physical, self.group), collective, kernel),
            "off": plain(build_dispatcher("all_to_all", E, self.group), kernel),
        }

    def tokens(self, number: int = T, heat: float = 0.3) -> Tokens:
        return make_tokens(self.generator, number, heat, self.dtype)

    def run(self, form: str, tokens: Tokens) -> list[torch.Tensor]:
        """Output and all gradients of a layer."""
        return run(self.layers[form], tokens, self.up, self.down)


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
        symmetric, collective = ranks.run("symmetric", tokens), ranks.run("collective", tokens)
        off, weighing = ranks.run("off", tokens), ranks.run("weighing", tokens)
        found["same"] += [torch.equal(symmetric[index], collective[index]) for index in (0, 1, 3, 4)]
        if number:
            differences = [relative(a.float(), b.float()) for ours in (symmetric, weighing) for a, b in zip(ours, off)]
            found["difference"] = max(found["difference"], *differences)
    ranks.space.check()
    assert not ranks.weighing._has_told, "gradients of rows are added up where they lie, not copied"
    return found


def no_host_sync(ranks: Ranks) -> bool:
    tokens = ranks.tokens()
    return all(synchronizes_nowhere(lambda form=form: ranks.run(form, tokens)) for form in ("symmetric", "weighing"))


def graph_with_changing_loads(ranks: Ranks) -> list[bool]:
    tokens = ranks.tokens()
    graph, made = capture(lambda: ranks.run("symmetric", tokens))
    same = []
    for heat in (0.0, 0.5, 2.0):
        tokens[1].copy_(ranks.tokens(T, heat)[1])
        graph.replay()
        torch.cuda.synchronize()
        wanted = ranks.run("collective", tokens)
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
            ranks.run(form, tokens)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        seconds[form] = statistics.median(times[2:])
    return seconds


def a_rank_stays_away(ranks: Ranks) -> tuple[str, float]:
    return wait_for_a_rank_that_stays_away(SymmetricSpace(ranks.group, ranks.device, timeout_s=2.0))


SCENARIOS = (same_bits, no_host_sync, graph_with_changing_loads, small_batches, a_rank_stays_away)


def run_all() -> dict[str, Any]:
    with join_world(get_accelerator(), 60) as world:
        return run_scenarios(SCENARIOS, lambda dtype: Ranks(world.rank, dtype))


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return run_ranks(run_all, 2, deadline_s=280)


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-5), ("bfloat16", 1e-2)])
def test_both_transports_and_dispatchers_have_the_same_bits(two, dtype: str, limit: float) -> None:
    for found in of(two, "same_bits", dtype):
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
