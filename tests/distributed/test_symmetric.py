"""Memory that ranks share: the kernels' protocol among processes of this host, in Triton's interpreter. Rows of tokens
have tests of their own, test_symmetric_rows.py.

Everything is compared with the collective forms, bit for bit where both add in the same order.
"""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed.balance_rig import WEIGHTS, D, E, ForeignLayer, few_candidates, make_balancer
from distributed.gpu_layer import balanced, run
from distributed.parity import Case, differences, relative, toy_model, train_in_parallel, train_plainly
from distributed.rig import Outcomes, run_scenarios
from distributed.symmetric_rig import CPU, make_space
from distributed.test_balance_runtime import Layers, compare, run_checkpointed, train
from equipoise.balance import BalanceConfig, Balancer, Placement, PlannerSettings, check_placement, complete_plan
from equipoise.balance.device_planner import ExchangingPlanner
from equipoise.balance.planner_host import plan_load
from equipoise.balance.replicas import Copies, replicas_of
from equipoise.balance.transport.symmetric import SymmetricBuffers, SymmetricTransport
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.dispatch import symmetric as symmetric_dispatch
from equipoise.dispatch.config import DispatchConfig
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.errors import ConfigError, RankFailure
from equipoise.kernels.triton_support import triton_problem
from equipoise.symmetric.space import SymmetricSpace

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing")


# Memory.


def ranks_ask_for_different_memory(world: World, meshes: Meshes) -> tuple[str, int]:
    """The error, and bytes of what they agree on afterwards."""
    space, message = make_space(meshes), ""
    before = space.num_bytes
    try:
        space.allocate((2 + world.rank, 64), torch.float32, "slots")
    except ConfigError as error:
        message = str(error)
    assert space.num_bytes == before
    space.allocate((4, 64), torch.float32, "slots")
    return message, space.num_bytes - before


def a_rank_does_not_come(world: World, meshes: Meshes) -> tuple[str, float]:
    """Rank 1 allocates nothing: the other's message and seconds."""
    space = make_space(meshes, timeout_s=1.5)
    message, started = "", time.monotonic()
    if world.rank == 0:
        try:
            space.allocate((4,), torch.float32, "slots of layer 3")
        except RankFailure as error:
            message = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    return message, seconds


# Plans and transfers.


def loads(num_ranks: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    made = [torch.randint(0, 9, (num_ranks, E), generator=generator) ** 2 for _ in range(2)]
    hot = made[0].clone()
    hot[:, : E // num_ranks] *= 5
    ragged = hot.clone()
    ragged[0] = 0
    return [made[1], torch.zeros_like(hot), ragged]


def exchanged_plans(world: World, meshes: Meshes) -> list[str]:
    """Parts of plans that differ from those of the host, for loads one after the other; of four ranks with replicas
    confined to two domains."""
    chosen = PlannerSettings(2, 0.0, domain_size=2 if world.size == 4 else 0)
    planner = ExchangingPlanner(make_space(meshes), E, chosen)
    differing = []
    for index, load_PE in enumerate(loads(world.size)):
        made = planner(load_PE[world.rank].int().contiguous())
        if chosen.domain_size:
            check_placement(Placement(made.slot_expert, made.quota, world.size, E), load_PE.sum(0), chosen.domain_size)
        placement = plan_load(load_PE.sum(0), world.size, chosen)
        plans = [complete_plan(placement, load_PE, rank) for rank in range(world.size)]
        mine = plans[world.rank]
        before_J = sum((plan.send for plan in plans[: world.rank]), torch.zeros_like(mine.send))
        wanted = {"slot_expert": mine.slot_expert, "quota": mine.quota, "send": mine.send, "recv": mine.recv}
        wanted |= {"before_J": before_J, "load_E": load_PE.sum(0)}
        differing += [f"{index} {name}" for name, x in wanted.items() if not torch.equal(getattr(made, name), x.int())]
    return differing


def transfers(world: World, meshes: Meshes) -> list[str]:
    """Weights in slots and sums of gradients that are not the right bits, over plans one after the other: of experts
    that are made of whole blocks and of others, of few slots and of as many as come in two parts."""
    P, M = world.size, E // world.size
    space, wrong = make_space(meshes), []
    shapes = {"matrix": (5, 7), "bias": (3,), "blocks": (48, 64)}
    for dtype, stacked, R in ((torch.float32, True, 2), (torch.float16, False, 4)):
        buffers = SymmetricBuffers(shapes, R, dtype, space)
        transport = SymmetricTransport(space, buffers, M)
        for name in shapes:
            transport.prepare(name, CPU, True)
        for index, load_PE in enumerate(loads(P)):
            placement = plan_load(load_PE.sum(0), P, PlannerSettings(R, 0.0))
            copies = Copies(placement.slot_expert, ())
            replicas = replicas_of(placement)
            for name, shape in shapes.items():
                make = lambda seed, *sizes: torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))  # noqa: E731
                weights = make(index, E, *shape).to(dtype)
                masters = weights[world.rank * M : (world.rank + 1) * M].clone()
                given = masters if stacked else [w.clone() for w in masters]
                transport.push_weights(name, copies, given, "weights").wait()
                slot_gradients = {r.physical: make(100 + r.physical, *shape) for r in replicas}
                for r in replicas:
                    if r.host == world.rank:
                        expert = r.home * M + r.local
                        if not torch.equal(buffers.weights(name)[r.slot], weights[expert]):
                            wrong.append(f"{name} {dtype} {index}: weights of expert {expert}")
                        buffers.gradients(name)[r.slot].copy_(slot_gradients[r.physical])
                gradients = make(7, M, *shape).to(dtype)
                sums = gradients.float()
                for r in replicas:
                    if r.home == world.rank:
                        sums[r.local] += slot_gradients[r.physical]
                parts = [gradients] if stacked else [g.clone() for g in gradients]
                transport.pull_gradients(name, copies, parts, "gradients").finish(lambda *_: None)
                got = parts[0] if stacked else torch.stack(parts)
                if not torch.equal(got, sums.to(dtype)):
                    wrong.append(f"{name} {dtype} {index}: gradients")
                buffers.gradients(name).fill_(float("nan"))  # all have read them
    return wrong


# The whole runtime.


def symmetric_balancer(space: SymmetricSpace, meshes: Meshes, slots: int = 1, dtype=torch.float32) -> Balancer:
    plain = make_balancer(meshes.ep_group, slots, dtype)
    return Balancer(meshes.ep_group, E, dict(plain.buffers.shapes), dtype, plain.config, space=space)


HOSTS: dict[str, dict[str, Any]] = {
    "weights one by one, without optional calls": {"stacked": False, "hooks": False, "numbers": (3,)},
    "two in flight, another hot rank each, checkpoint": {
        "together": "first first",
        "moving": True,
        "run": run_checkpointed(False),
    },
    "frozen experts, one token": {"frozen": ("up", "down"), "numbers": (1,)},
}


def balanced_layers(world: World, meshes: Meshes) -> dict[str, dict[str, Any]]:
    """A foreign layer with everything symmetric, against plain expert parallelism over collectives."""
    space = make_space(meshes)
    dispatchers = {
        False: build_dispatcher("all_to_all", E, meshes.ep_group),
        True: SymmetricDispatcher(world.size * (E // world.size + 1), space, 0, max_tokens=16, num_buffers=7),
    }
    balancer = symmetric_balancer(space, meshes)
    return {
        name: compare(meshes.ep_group, balancer, dispatchers=dispatchers, **({"numbers": (4, 3), "depth": 2} | options))  # type: ignore[arg-type]
        for name, options in HOSTS.items()
    }


def as_collective(world: World, meshes: Meshes) -> float:
    """The largest relative difference of outputs and gradients with both transports and dispatchers. (Sums here are not
    fused as those of the plain forms are; on GPUs outputs have the same bits.)"""
    space, group = make_space(meshes), meshes.ep_group
    assert group is not None
    balancers = make_balancer(group, 2), symmetric_balancer(space, meshes, 2)
    symmetric = SymmetricDispatcher(balancers[1].num_physical_experts, space, 0, max_tokens=16, few_bytes=0)
    results = []
    for balancer, dispatcher in zip(balancers, (None, symmetric)):
        options: dict[str, Any] = {} if dispatcher is None else {"dispatchers": {True: dispatcher}}
        layers = Layers(ForeignLayer(group, balancer, layer=i, heat=3.0, moving=True, **options) for i in range(1))
        results.append(train(layers, [4, 2], world.rank))
    difference = max(relative(b, a) for a, b in zip(*results))
    records = [balancer.take_records() for balancer in balancers]
    assert [r.copies for r in records[0]] == [r.copies for r in records[1]]
    assert [(r.key, r.before, r.after) for r in records[0]] == [(r.key, r.before, r.after) for r in records[1]]
    assert sum(r.copies for r in records[0]) > 0
    return difference


def seen(pull_gradients: Callable[..., Any], added_to: list[int]) -> Callable[..., Any]:
    """The same, which also notes the addresses of the masters' gradients."""

    def pull(name: str, copies: Copies, gradients: Any, what: str) -> Any:
        added_to.extend(gradient.data_ptr() for gradient in gradients)
        return pull_gradients(name, copies, gradients, what)

    return pull


def weights_with_rows(world: World, meshes: Meshes) -> dict[str, float]:
    """Balanced SwiGLU experts that get the rows' weights from the symmetric dispatcher, against those of `all_to_all`,
    which multiplies at the tokens' rank: largest relative differences of outputs and all gradients. Those are the
    tensors that replicas' were added to, not copies (the interpreter keeps what kernels got, and so forces one)."""
    space, group, found = make_space(meshes), meshes.ep_group, {}
    assert group is not None
    mine = slice(world.rank * E // 2, (world.rank + 1) * E // 2)
    everybody, generator = torch.Generator().manual_seed(5), torch.Generator().manual_seed(world.rank)
    up, down = (torch.randn(E, *shape, generator=everybody)[mine].clone() for shape in WEIGHTS.values())
    copied: list[int] = []
    copy_rows = symmetric_dispatch.copy_rows

    def counted(*given: Any) -> None:
        copied.append(1)
        copy_rows(*given)

    symmetric_dispatch.copy_rows = counted  # type: ignore[assignment]
    for kernel, slots in (("triton", 4), ("loop", 1)):
        collective, symmetric = make_balancer(group, slots), symmetric_balancer(space, meshes, slots)
        number, added_to = symmetric.num_physical_experts, list[int]()
        symmetric.transport.pull_gradients = seen(symmetric.transport.pull_gradients, added_to)  # type: ignore[method-assign]
        sending = SymmetricDispatcher(number, space, 0, max_tokens=8, few_bytes=0, weighs_rows=True)
        layers = (
            balanced(build_dispatcher("all_to_all", number, group), collective, "loop"),
            balanced(sending, symmetric, kernel),
        )
        for tokens in (5 + world.rank, world.rank):
            scores = torch.rand(tokens, E, generator=generator)
            scores[:, : E // 2] += 1
            x, gradient = (torch.randn(tokens, D, generator=generator) for _ in range(2))
            given = x, scores.topk(2).indices.int(), torch.rand(tokens, 2, generator=generator), gradient
            added_to.clear()
            want, got = (run(layer, given, up, down) for layer in layers)
            assert kernel == "triton" or {g.data_ptr() for g in got[3:]} == set(added_to)
            found[f"{kernel} {tokens}"] = max(relative(b, a) for a, b in zip(want, got))
            assert len(copied) == (0 if kernel == "triton" else 2), (
                "rows and gradients of `triton` are added up in place"
            )
            copied.clear()
    symmetric_dispatch.copy_rows = copy_rows
    return found


def training_with_weights(world: World, meshes: Meshes) -> dict[str, Any]:
    """The same in whole training: what differs from plain training by more than rounding."""
    few_candidates()
    found, combine, dispatch, keeps = {}, SymmetricDispatcher.combine, SymmetricDispatcher.dispatch, set()

    def sending_once(dispatcher: SymmetricDispatcher, *given: Any) -> Any:
        dispatcher.few_bytes = 0  # so that rows are added up before they come back
        return dispatch(dispatcher, *given)

    def watched(dispatcher: SymmetricDispatcher, rows_RD: torch.Tensor, handle: Any) -> torch.Tensor:
        keeps.add(handle.weights_TK is not None)
        return combine(dispatcher, rows_RD, handle)

    SymmetricDispatcher.combine = watched  # type: ignore[method-assign,assignment]
    SymmetricDispatcher.dispatch = sending_once  # type: ignore[method-assign,assignment]
    for recompute, balance in (("full", BalanceConfig(tolerance=0.0)), ("none", None)):
        model = toy_model(num_hidden_layers=1, mlp_only_layers=(), selection_bias=True, bias_update_speed=0.0)
        case = Case(
            model, 2, dispatcher="symmetric", accumulate=2, lengths=(5, 3), balance=balance, selection_bias=0.4,
            hot_experts=4, recompute=recompute, dispatch=DispatchConfig(weighs_rows=True),
        )  # fmt: skip
        trained = train_in_parallel(case, world, 1, meshes)
        plain = train_plainly(case, world.size, 1)
        assert (trained.copies > 0) == (balance is not None)
        found[recompute] = {k: v for k, v in differences(trained, plain).items() if not v <= case.limit}
    SymmetricDispatcher.combine = combine  # type: ignore[method-assign]
    SymmetricDispatcher.dispatch = dispatch  # type: ignore[method-assign]
    assert keeps == {False}, "experts have multiplied by the weights in every combine"
    return found


# Failures.


def a_rank_is_missing(world: World, meshes: Meshes, act: Callable[..., Any] | None = None) -> tuple[str, float]:
    """Rank 1 stays away from a push, then from all that follows: the others' messages and seconds."""
    space = make_space(meshes, timeout_s=1.0)
    buffers = SymmetricBuffers({"w": (4,)}, 1, torch.float32, space)
    transport = SymmetricTransport(space, buffers, E // world.size)
    transport.prepare("w", CPU, True)
    copies = Copies(torch.full((world.size,), -1, dtype=torch.int32), ())
    message, started = "", time.monotonic()
    if world.rank != 1:
        try:
            for _ in range(3):
                transport.push_weights("w", copies, torch.zeros(E // world.size, 4), "weights 'w' of layer 3").wait()
        except RankFailure as error:
            message = str(error)
    seconds = time.monotonic() - started
    dist.barrier()
    return message, seconds


def what_cannot_be(world: World, meshes: Meshes) -> list[str]:
    """Messages of what is refused; on every rank the same."""
    space, messages = make_space(meshes), []
    config = make_balancer(meshes.ep_group, 1, planner="eplb").config  # type: ignore[arg-type]
    try:
        Balancer(meshes.ep_group, E, {"w": (2, 2)}, torch.float32, config, space=space)
    except ConfigError as error:
        messages.append(str(error))
    try:
        build_dispatcher("symmetric", E, meshes.ep_group)
    except ValueError as error:
        messages.append(str(error))
    dispatcher = SymmetricDispatcher(E, space)
    dispatcher.dispatch(torch.ones(2, D), torch.zeros(2, 1, dtype=torch.int32), torch.ones(2, 1))
    try:
        dispatcher.dispatch(torch.ones(3, D), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1))
    except ConfigError as error:
        messages.append(str(error))
    try:
        build_dispatcher("deepep", E, meshes.ep_group)
    except ConfigError as error:
        messages.append(str(error))
    return messages


@pytest.fixture(scope="module")
def two() -> Outcomes:
    scenarios = [
        ranks_ask_for_different_memory,
        exchanged_plans,
        transfers,
        balanced_layers,
        as_collective,
        weights_with_rows,
        training_with_weights,
        a_rank_is_missing,
        what_cannot_be,
        a_rank_does_not_come,
    ]
    return Outcomes(run_scenarios, 2, scenarios, ParallelConfig(ep_size=2), E)


@pytest.fixture(scope="module")
def four() -> Outcomes:
    scenarios = [exchanged_plans, transfers]
    return Outcomes(run_scenarios, 4, scenarios, ParallelConfig(ep_size=4), E)


def test_experts_may_multiply_by_weights_that_come_with_the_rows(two: Outcomes) -> None:
    for found in two.of(weights_with_rows):
        assert len(found) == 4
        assert max(found.values()) < 1e-5, found
    assert two.of(training_with_weights) == [{"full": {}, "none": {}}] * 2


@pytest.mark.slow
def test_plans_and_transfers_of_four_ranks(four: Outcomes) -> None:
    assert [*four.of(exchanged_plans), *four.of(transfers)] == [[]] * 8


def test_deepep_is_asked_for_only_when_chosen(two: Outcomes) -> None:
    assert two.of(what_cannot_be)[0][-1].startswith("dispatcher 'deepep' needs the package deep_ep")


def test_ranks_that_ask_for_different_memory_all_say_so_and_can_go_on(two: Outcomes) -> None:
    for message, num_bytes in two.of(ranks_ask_for_different_memory):
        assert "rank 0: symmetric memory 'slots': float32 [2, 64]" in message
        assert "rank 1: symmetric memory 'slots': float32 [3, 64]" in message
        assert num_bytes == 1024


def test_a_rank_that_does_not_come_to_allocate_is_named(two: Outcomes) -> None:
    (message, seconds), _ = two.of(a_rank_does_not_come)
    assert "'slots of layer 3': float32 [4]: rank 0 waited 1.5 s at setup for rank 1" in message
    assert seconds < 5


def test_exchanged_plans_are_those_of_the_host(two: Outcomes) -> None:
    assert two.of(exchanged_plans) == [[]] * 2


def test_transfers_move_bits_and_add_in_order(two: Outcomes) -> None:
    assert two.of(transfers) == [[]] * 2


@pytest.mark.parametrize("host", HOSTS)
def test_balanced_layers_are_plain_layers(two: Outcomes, host: str) -> None:
    for ranks in two.of(balanced_layers):
        found = ranks[host]
        assert found["difference"] < 1e-5, found
        assert found["copies"] > 0 or "one token" in host, found


def test_symmetric_and_collective_training_are_the_same(two: Outcomes) -> None:
    for difference in two.of(as_collective):
        assert difference < 1e-6


def test_a_missing_rank_is_named_within_the_deadline(two: Outcomes) -> None:
    (message, seconds), _ = two.of(a_rank_is_missing)
    assert "rank 0 waited for rank 1" in message
    assert "weights 'w' of layer 3" in message
    assert 0.3 < seconds < 8


def test_what_cannot_be_is_refused(two: Outcomes) -> None:
    planner, no_space, tokens, _ = two.of(what_cannot_be)[0]
    assert two.of(what_cannot_be)[1][:3] == [planner, no_space, tokens]
    assert "eplb" in planner
    assert "symmetric space" in no_space
    assert "max_tokens" in tokens
