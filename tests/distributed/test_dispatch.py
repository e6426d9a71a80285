"""Dispatchers on four ranks at the extremes: everything to one rank, nothing at all; equal to a dense layer."""

from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from distributed.parity import relative
from distributed.rig import Outcomes, initial_weights, run_scenarios
from equipoise.dispatch import LocalDispatcher, build_dispatcher
from equipoise.dispatch.base import Dispatcher
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.moe.experts import Experts

DISPATCHERS = ["all_to_all", "all_gather"]
E, D, K = 16, 12, 4

# Token ids of each rank, [T][K].
ROUTINGS: dict[str, list[list[list[int]]]] = {
    "all to rank 3": [[[12, 13, 14, 15]] * 8] * 4,
    "all to expert 0": [[[0]] * 8] * 4,
    "one rank has tokens": [[], [[0, 5]] * 3 + [[15, 4]] * 2, [], []],
    "1, 3, 7 and 0 tokens": [[[3, 9]], [[9, 3], [0, 15], [7, 8]], [[i, 15 - i] for i in range(7)], []],
    "some dropped": [[[-1, 3], [4, -1]], [[-1, -1]], [[15, 0]] * 3, [[-1, -1]] * 2],
    "nobody has tokens": [[]] * 4,
}


def make_experts() -> Experts:
    experts = Experts(E, D, 10)
    generator = torch.Generator().manual_seed(5)
    for p in experts.parameters():
        nn.init.normal_(p, generator=generator)
    return experts


def run_layer(
    dispatcher: Dispatcher, experts: Experts, by_rank: list[list[list[int]]], rank: int
) -> dict[str, torch.Tensor]:
    """Output and gradients of a layer on random tokens of one rank, and the rows of each local expert."""
    ids = by_rank[rank]
    width = max((len(row) for rows in by_rank for row in rows), default=K)
    ids_TK = torch.tensor(ids, dtype=torch.int32).view(len(ids), width)
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(len(ids), D, generator=generator).requires_grad_()
    weights_TK = torch.rand(len(ids), width, generator=generator).requires_grad_()
    arrived = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    y_TD = dispatcher.combine(experts(arrived.rows_RD, arrived.counts_M), arrived.handle)
    y_TD.backward(torch.randn(y_TD.shape, generator=generator))
    assert x_TD.grad is not None
    assert weights_TK.grad is not None
    return {"y": y_TD.detach(), "x": x_TD.grad, "weights": weights_TK.grad, "arrived": arrived.counts_M}


def against_dense(world: World, meshes: Meshes) -> dict[tuple[str, str], dict[str, Any]]:
    """C18: what differs from all experts in one process, and the rows that came to each local expert."""
    found = {}
    for name in DISPATCHERS:
        dispatcher = build_dispatcher(name, E, meshes.ep_group)  # type: ignore[arg-type]
        for routing, by_rank in ROUTINGS.items():
            dense, mine = make_experts(), make_experts()
            first = world.rank * E // world.size
            for p in mine.parameters():
                p.data = p.data[first : first + E // world.size].clone()
            want = [run_layer(LocalDispatcher(E), dense, by_rank, rank) for rank in range(world.size)][world.rank]
            got = run_layer(dispatcher, mine, by_rank, world.rank)
            differences = {part: relative(got[part], want[part]) for part in ("y", "x", "weights")}
            for (part, p), whole in zip(mine.named_parameters(), dense.parameters()):
                assert p.grad is not None
                assert whole.grad is not None
                differences[part] = relative(p.grad, whole.grad[first : first + E // world.size])
            found[name, routing] = {"differences": differences, "arrived": got["arrived"].tolist()}
    return found


def empty_buffers(world: World, meshes: Meshes) -> dict[str, Any]:
    """C13: ranks 0 and 1 are a group; rank 0 sends [0, 0] and rank 1 [3, 2]. Shapes and dtypes, both ways."""
    pair = world.groups.create("pair", [0, 1])
    found: dict[str, Any] = {}
    if pair is None:
        return found
    for name in DISPATCHERS:
        for dtype in (torch.float32, torch.bfloat16):
            dispatcher = build_dispatcher(name, 2, pair)  # type: ignore[arg-type]
            ids_TK = torch.tensor([[0]] * 3 + [[1]] * 2 if world.rank == 1 else [], dtype=torch.int32).view(-1, 1)
            x_TD = torch.ones(len(ids_TK), D, dtype=dtype, requires_grad=True)
            arrived = dispatcher.dispatch(x_TD, ids_TK, torch.ones(len(ids_TK), 1))
            y_TD = dispatcher.combine(arrived.rows_RD * 2, arrived.handle)
            y_TD.sum().backward()
            assert x_TD.grad is not None
            tensors = {"rows": arrived.rows_RD, "y": y_TD, "gradient": x_TD.grad}
            found[f"{name} {dtype}"] = {what: (list(t.shape), str(t.dtype)) for what, t in tensors.items()}
    return found


def refuses_experts_that_do_not_divide(world: World, meshes: Meshes) -> str:
    try:
        build_dispatcher("all_to_all", 6, meshes.ep_group)
    except ValueError as error:
        return str(error)
    finally:
        dist.barrier()
    return ""


@pytest.fixture(scope="module")
def four() -> Outcomes:
    scenarios = [against_dense, empty_buffers, refuses_experts_that_do_not_divide, initial_weights]
    return Outcomes(run_scenarios, 4, scenarios, ParallelConfig(ep_size=4), E)


def test_every_dispatcher_equals_a_dense_layer(four: Outcomes) -> None:
    for rank in four.of(against_dense):
        for key, found in rank.items():
            assert max(found["differences"].values()) < 1e-5, (key, found)


@pytest.mark.parametrize("dispatcher", DISPATCHERS)
def test_everything_arrives_where_it_is_sent(four: Outcomes, dispatcher: str) -> None:
    ranks = four.of(against_dense)
    arrived = {r: [rank[dispatcher, r]["arrived"] for rank in ranks] for r in ROUTINGS}
    assert arrived["all to rank 3"] == [[0] * 4] * 3 + [[32] * 4]  # 128 rows
    assert arrived["all to expert 0"] == [[32, 0, 0, 0]] + [[0] * 4] * 3
    assert arrived["one rank has tokens"] == [[3, 0, 0, 0], [2, 3, 0, 0], [0] * 4, [0, 0, 0, 2]]
    assert arrived["some dropped"] == [[3, 0, 0, 1], [1, 0, 0, 0], [0] * 4, [0, 0, 0, 3]]
    assert arrived["nobody has tokens"] == [[0] * 4] * 4


def test_empty_buffers_keep_shape_and_dtype_both_ways(four: Outcomes) -> None:
    first, second, *_ = four.of(empty_buffers)
    assert len(first) == 4
    for key, shapes in first.items():
        dtype = key.split()[1]
        assert shapes == {"rows": ([3, D], dtype), "y": ([0, D], dtype), "gradient": ([0, D], dtype)}
    for key, shapes in second.items():
        dtype = key.split()[1]
        assert shapes == {"rows": ([2, D], dtype), "y": ([5, D], dtype), "gradient": ([5, D], dtype)}


def test_experts_that_do_not_divide_are_refused_with_both_numbers(four: Outcomes) -> None:
    assert set(four.of(refuses_experts_that_do_not_divide)) == {"6 experts cannot be split over an EP group of 4 ranks"}


def test_experts_start_different_and_as_in_one_process_at_ep_4(four: Outcomes) -> None:
    """C44; other EP sizes: test_training_cases.py."""
    assert four.of(initial_weights) == [{"differing": {}, "equal": [], "experts": 8}] * 4
