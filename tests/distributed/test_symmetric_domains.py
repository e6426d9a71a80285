"""EP groups of several domains: four ranks, of which two each share memory. Compared with all-to-all, and with training
in one process."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.balance_rig import few_candidates
from distributed.parity import Case, differences, relative, toy_model, train_in_parallel, train_plainly
from distributed.rig import Outcomes, run_scenarios
from distributed.test_dispatch import ROUTINGS
from distributed.test_symmetric_rows import run_dispatcher
from equipoise.balance import BalanceConfig, Placement
from equipoise.balance.replicas import Copies, replicas_of
from equipoise.balance.transport.domain import DomainBuffers, DomainTransport
from equipoise.dispatch import build_dispatcher
from equipoise.dispatch.domains import DomainDispatcher
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.parking import park, unpark
from equipoise.distributed.world import World
from equipoise.kernels.triton_support import triton_problem
from equipoise.symmetric.space import SymmetricSpace

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing")
CPU, E = torch.device("cpu"), 16
PARALLEL = ParallelConfig(ep_size=4, domain_size=2)
MIXED = {"mixed": [[[(5 * t + 3 * k + r) % E for k in range(3)] for t in range(r + 2)] for r in range(4)]}


def domain_space(meshes: Meshes) -> SymmetricSpace:
    few_candidates()
    return SymmetricSpace(meshes.domain, CPU, 60.0)


def rows_and_sums(world: World, meshes: Meshes) -> dict[str, Any]:
    """What is not as by `all_to_all`, by routing and dtype: rows and counts by their bits, the rest by a difference."""
    space = domain_space(meshes)
    reference = build_dispatcher("all_to_all", E, meshes.ep_group)
    found: dict[str, Any] = {}
    routings = ROUTINGS | MIXED
    names = ["all to rank 3", "one rank has tokens", "some dropped", "nobody has tokens", "mixed"]
    for dtype in (torch.float32, torch.float16):
        dispatcher = build_dispatcher("symmetric", E, meshes.ep_group, space, capacity_factor=0, max_tokens=8)
        assert isinstance(dispatcher, DomainDispatcher)
        for name in names if dtype == torch.float32 else names[-1:]:
            want = run_dispatcher(reference, routings[name], world.rank, dtype)
            got = run_dispatcher(dispatcher, routings[name], world.rank, dtype)
            same = all(torch.equal(got[part], want[part]) for part in ("rows", "counts"))
            found[f"{name} {dtype}"] = same, max(relative(got[p], want[p]) for p in ("y", "x", "weights"))
    return found


BALANCES = {
    "off": None,
    "replicas within domains": BalanceConfig(domain_size=2, tolerance=0.0),
    "replicas anywhere": BalanceConfig(tolerance=0.0),
}


def training(world: World, meshes: Meshes) -> dict[str, dict[str, Any]]:
    """What differs from plain training by more than rounding, and replicas, by way of balancing."""
    few_candidates()
    found = {}
    for name, balance in BALANCES.items():
        model = toy_model(num_hidden_layers=1, mlp_only_layers=(), selection_bias=True, bias_update_speed=0.0)
        case = Case(
            model, 4, dispatcher="symmetric", accumulate=1, lengths=(5, 3), balance=balance, selection_bias=0.4,
            hot_experts=2, recompute="full" if balance is None else "none",
        )  # fmt: skip
        trained = train_in_parallel(case, world, 1, meshes)
        plain = train_plainly(case, world.size, 1)
        off = {k: v for k, v in differences(trained, plain).items() if not v <= case.limit}
        found[name] = {"differing": off, "copies": trained.copies}
    return found


NO = -1
PLANS = {"near and far": [5, 9, 0, NO, 13, 1, 5, 8], "far": [NO, 9, NO, NO, NO, 1, 5, NO], "none here": [5] + 7 * [NO]}
"""Experts of each rank's first and last slot. Experts 0 to 7 are at home in the first domain."""


def transfers(world: World, meshes: Meshes) -> list[str]:
    """Weights in slots and sums of gradients that are not the right bits, over plans one after the other: of two
    slots, and of as many as the domain's memory fills in two parts."""
    M, shapes, wrong = E // 4, {"matrix": (5, 7), "bias": (3,)}, []
    make = lambda seed, *sizes: torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))  # noqa: E731
    space = domain_space(meshes)
    for dtype, stacked, R in ((torch.float32, True, 2), (torch.float16, False, 4)):
        buffers = DomainBuffers(shapes, R, dtype, space, reduction_rows=1)
        transport = DomainTransport(space, meshes.ep, buffers, M, world.rank // 2 * 2)
        for name in shapes:
            transport.prepare(name, CPU, True)
        for plan, slots in PLANS.items():
            slots_PR = torch.full((4, R), NO, dtype=torch.int32)
            slots_PR[:, 0], slots_PR[:, -1] = torch.tensor(slots).view(4, 2).unbind(1)
            placement = Placement(slots_PR.flatten(), torch.zeros(4 * (M + R)).int(), 4, E)
            replicas = replicas_of(placement)
            copies = Copies(placement.slot_expert, replicas)
            for name, shape in shapes.items():
                weights = make(1, E, *shape).to(dtype)
                masters = weights[world.rank * M : (world.rank + 1) * M].clone()
                transport.push_weights(name, copies, masters if stacked else list(masters), "weights").wait()
                slot_gradients = {r.physical: make(100 + r.physical, *shape) for r in replicas}
                for r in replicas:
                    if r.host == world.rank:
                        if not torch.equal(buffers.weights(name)[r.slot], weights[r.home * M + r.local]):
                            wrong.append(f"{plan} {name} {dtype}: weights of replica {r}")
                        buffers.gradients(name)[r.slot].copy_(slot_gradients[r.physical])
                gradients = make(7, M, *shape).to(dtype)
                want = gradients.clone()
                for is_far in (False, True):  # of a domain first; rounded once for either kind
                    sums = want.float()
                    for r in replicas:
                        if r.home == world.rank and (r.host // 2 != r.home // 2) == is_far:
                            sums[r.local] += slot_gradients[r.physical]
                    want = sums.to(dtype)
                parts = [gradients] if stacked else [g.clone() for g in gradients]
                pull = transport.pull_gradients(name, copies, parts, "gradients")
                if plan == "near and far":
                    pull.force()
                rounded: dict[int, torch.Tensor] = {}
                rows = list(parts[0]) if stacked else parts
                pull.finish(lambda local, g, rounded=rounded, rows=rows: add(rounded, rows, local, g))
                for local, total in rounded.items():
                    rows[local].copy_(total)
                if not torch.equal(torch.stack(rows), want):
                    wrong.append(f"{plan} {name} {dtype}: gradients")
                buffers.gradients(name).fill_(float("nan"))  # all have read them
                dist.barrier(meshes.ep_group)
    return wrong


def add(rounded: dict[int, torch.Tensor], rows: list[torch.Tensor], local: int, gradient: torch.Tensor) -> None:
    """As a step adds, after all that the transport has added itself."""
    if local not in rounded:
        rounded[local] = rows[local].float()
    rounded[local] += gradient


def parked(world: World, meshes: Meshes) -> tuple[list[int], list[int], bool]:
    """The domain's ranks before and after parking, and whether a dispatcher that was used before still works."""
    dispatcher = build_dispatcher("symmetric", E, meshes.ep, domain_space(meshes), capacity_factor=0, max_tokens=8)
    ranks = lambda: dist.get_process_group_ranks(meshes.domain.get_group())  # noqa: E731
    before, first = ranks(), run_dispatcher(dispatcher, MIXED["mixed"], world.rank, torch.float32)
    park(world, meshes)
    unpark(world)
    second = run_dispatcher(dispatcher, MIXED["mixed"], world.rank, torch.float32)
    return before, ranks(), all(torch.equal(first[part], second[part]) for part in first)


@pytest.fixture(scope="module")
def four() -> Outcomes:
    return Outcomes(run_scenarios, 4, [rows_and_sums, transfers, parked], PARALLEL, E)


@pytest.fixture(scope="module")
def trained() -> Outcomes:
    return Outcomes(run_scenarios, 4, [training], PARALLEL, E)


def test_rows_arrive_as_by_all_to_all(four: Outcomes) -> None:
    for found in four.of(rows_and_sums):
        assert len(found) == 6
        for name, (same, difference) in found.items():
            assert same, name
            assert difference < (2e-3 if "float16" in name else 1e-6), name


@pytest.mark.slow
@pytest.mark.parametrize("balance", BALANCES)
def test_training_is_that_of_one_process(trained: Outcomes, balance: str) -> None:
    for rank in trained.of(training):
        assert rank[balance]["differing"] == {}
        assert (rank[balance]["copies"] > 0) == (balance != "off")


def test_weights_and_gradients_go_by_memory_or_as_messages(four: Outcomes) -> None:
    assert four.of(transfers) == [[]] * 4


def test_domains_come_back_after_parking(four: Outcomes) -> None:
    assert four.of(parked) == [([0, 1], [0, 1], True)] * 2 + [([2, 3], [2, 3], True)] * 2
