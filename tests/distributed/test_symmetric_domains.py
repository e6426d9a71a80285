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
from distributed.test_symmetric import run_dispatcher
from equipoise.balance import BalanceConfig, Balancer
from equipoise.balance.replicas import Copies
from equipoise.balance.transport.domain import DomainTransport
from equipoise.dispatch import build_dispatcher
from equipoise.dispatch.domains import DomainDispatcher
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.parking import park, unpark
from equipoise.distributed.world import World
from equipoise.errors import ConfigError, PlanError
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


def what_cannot_be(world: World, meshes: Meshes) -> list[str]:
    """Of a balancer, by settings: the error, or its transport; then the error of a plan with a replica elsewhere."""
    space, messages = domain_space(meshes), []
    for config in (BALANCES["replicas anywhere"], BALANCES["replicas within domains"]):
        try:
            balancer = Balancer(meshes.ep_group, E, {"w": (2, 2)}, torch.float32, config, space=space)
            messages.append(type(balancer.transport).__name__)
        except ConfigError as error:
            messages.append(str(error))
    slot_expert = torch.tensor([-1, 5, -1, 2], dtype=torch.int32)  # of rank 3, whose domain has experts 8 to 15
    try:
        balancer.transport.push_weights("w", Copies(slot_expert, ()), torch.zeros(4, 2, 2), "weights")
    except PlanError as error:
        messages.append(str(error))
    return messages


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
    return Outcomes(run_scenarios, 4, [rows_and_sums, what_cannot_be, parked], PARALLEL, E)


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


def test_replicas_that_may_leave_a_domain_are_refused(four: Outcomes) -> None:
    for refused, used, elsewhere in four.of(what_cannot_be):
        assert "domain_size of the balance settings is 0, expected a divisor of 2" in refused
        assert used == DomainTransport.__name__
        assert "replicas outside of their experts' domains of 2 ranks" in elsewhere


def test_domains_come_back_after_parking(four: Outcomes) -> None:
    assert four.of(parked) == [([0, 1], [0, 1], True)] * 2 + [([2, 3], [2, 3], True)] * 2
