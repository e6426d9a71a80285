"""The balancing runtime in a layer of somebody else, on two ranks: equal to plain expert parallelism, whatever the
host does around it. Several hosts share one start of the ranks."""

import gc
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from distributed.balance_rig import BIASES, WEIGHTS, E, ForeignLayer, make_balancer, tokens
from distributed.parity import relative
from distributed.rig import Outcomes, run_scenarios
from equipoise.balance import Balancer
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.errors import ConfigError

Layers = nn.ModuleList


def run_plain(layers: Layers, x_TD: torch.Tensor, microbatch: int) -> torch.Tensor:
    for layer in layers:
        x_TD = layer(x_TD, microbatch)
    return x_TD


def run_checkpointed(reentrant: bool) -> Callable[[Layers, torch.Tensor, int], torch.Tensor]:
    def run(layers: Layers, x_TD: torch.Tensor, microbatch: int) -> torch.Tensor:
        for layer in layers:
            x_TD = checkpoint(layer, x_TD, microbatch, use_reentrant=reentrant)
        return x_TD

    return run


def train(layers: Layers, numbers: list[int], rank: int, run=run_plain, together: str = "one by one") -> list:
    """Outputs, input gradients and parameter gradients over microbatches of so many tokens."""
    dtype = layers[0].attention.dtype
    inputs = [tokens(rank, m, number, dtype).requires_grad_() for m, number in enumerate(numbers)]
    weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(m)) for m, x in enumerate(inputs)]
    outputs: list[torch.Tensor] = []
    losses: list[torch.Tensor] = []
    for m, x in enumerate(inputs):
        outputs.append(run(layers, x, m))
        losses.append((outputs[-1].float() * weights[m]).sum())
        if together == "one by one":
            losses[-1].backward()
    if together == "last first":
        for loss in reversed(losses):
            loss.backward()
    elif together == "first first":
        for loss in losses:
            loss.backward()
    elif together == "one backward":
        sum(losses).backward()
    gradients = [p.grad for p in layers.parameters() if p.requires_grad and p is not None]
    return [*(y.detach() for y in outputs), *(x.grad for x in inputs), *gradients]


def compare(group: dist.ProcessGroup, balancer: Balancer, numbers=(9, 5), **options: Any) -> dict[str, Any]:
    """Largest relative difference between balanced and plain layers, and what the balancer did."""
    rank = dist.get_rank(group)
    run, together = options.pop("run", run_plain), options.pop("together", "one by one")
    frozen = options.pop("frozen", ())
    results = []
    for used in (None, balancer):
        layers = Layers(ForeignLayer(group, used, layer=index, **options) for index in range(3))
        for layer, name in product(layers, frozen):
            layer.weights[name].requires_grad_(False)
        results.append(train(layers, list(numbers), rank, run, together))
    differences = [relative(a.float(), b.float()) for a, b in zip(results[1], results[0])]
    records = balancer.take_records()
    return {
        "difference": max(differences),
        "routed": len(records),
        "copies": sum(r.copies for r in records),
        "before": max(r.before for r in records),
        "after": max(r.after for r in records),
        "missing": sum(x is None for x in results[1]),
    }


HOSTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "without optional calls": {"hooks": False},
    "all_gather": {"dispatcher": "all_gather"},
    "weights one by one": {"stacked": False},
    "weights one by one, without optional calls": {"stacked": False, "hooks": False},
    "grouped_mm": {"kernel": "grouped_mm"},
    "checkpoint": {"run": run_checkpointed(False)},
    "checkpoint, without optional calls": {"run": run_checkpointed(False), "hooks": False},
    "reentrant checkpoint": {"run": run_checkpointed(True)},
    "reentrant checkpoint, without optional calls": {"run": run_checkpointed(True), "hooks": False},
    "two in flight, last first": {"together": "last first"},
    "two in flight, first first": {"together": "first first"},
    "two in flight, one backward": {"together": "one backward"},
    "two in flight, checkpoint": {"together": "first first", "run": run_checkpointed(False)},
    "two in flight, reentrant checkpoint": {"together": "last first", "run": run_checkpointed(True)},
    "frozen experts": {"frozen": ("up", "down")},
    "frozen experts, checkpoint": {"frozen": ("up", "down"), "run": run_checkpointed(False)},
    "one token": {"numbers": (1,)},
    "balanced": {"heat": 0.0},
    "no numbers": {"numbered": False},
    "no numbers, checkpoint": {"numbered": False, "run": run_checkpointed(False)},
    "no numbers, reentrant checkpoint": {"numbered": False, "run": run_checkpointed(True)},
    "no numbers, two in flight, checkpoint": {
        "numbered": False,
        "run": run_checkpointed(False),
        "together": "first first",
    },
    "bias": {"bias": True},
    "bias, grouped_mm": {"bias": True, "kernel": "grouped_mm"},
    "bias, weights one by one": {"bias": True, "stacked": False},
    "bias, DTensors": {"bias": True, "mesh": "ep"},
    "bias, without optional calls": {"bias": True, "hooks": False},
    "bias, checkpoint": {"bias": True, "run": run_checkpointed(False)},
    "bias, two in flight": {"bias": True, "together": "first first", "run": run_checkpointed(False)},
    "bias, rows padded": {"bias": True, "padded": True},
    "bias, rows padded, grouped_mm": {"bias": True, "padded": True, "kernel": "grouped_mm"},
    "frozen bias": {"bias": True, "frozen": tuple(BIASES)},
    "all frozen but a bias": {"bias": True, "frozen": (*WEIGHTS, "up_bias"), "run": run_checkpointed(False)},
    "bias, one token": {"bias": True, "numbers": (1,)},
}


def hosts(world: World, meshes: Meshes) -> dict[str, Any]:
    """Every host on one balancer of one slot: its buffers are reused by all of them."""
    balancer = make_balancer(meshes.ep_group)
    given = {name: options | ({"mesh": meshes.ep} if "mesh" in options else {}) for name, options in HOSTS.items()}
    return {name: compare(meshes.ep_group, balancer, **options) for name, options in given.items()}


SLOTS = {"two": {"slots": 2}, "as many as masters": {"slots": 4}, "in rounds": {"slots": 3, "reduction_rows": 1}}


def slots(world: World, meshes: Meshes) -> dict[str, Any]:
    return {name: compare(meshes.ep_group, make_balancer(meshes.ep_group, **o)) for name, o in SLOTS.items()}


def uneven_ranks(world: World, meshes: Meshes) -> dict[str, Any]:
    """A rank without any token, and no token at all."""
    balancer = make_balancer(meshes.ep_group)
    return {
        "idle rank 1": compare(meshes.ep_group, balancer, numbers=(6 * (1 - world.rank), 3)),
        "idle rank 0": compare(meshes.ep_group, balancer, numbers=(6 * world.rank,), run=run_checkpointed(False)),
        "no token": compare(meshes.ep_group, balancer, numbers=(0,)),
        "idle rank 1, bias": compare(meshes.ep_group, balancer, numbers=(6 * (1 - world.rank),), bias=True),
        "idle rank 0, bias": compare(
            meshes.ep_group, balancer, numbers=(6 * world.rank,), bias=True, run=run_checkpointed(False)
        ),
        "no token, bias": compare(meshes.ep_group, balancer, numbers=(0,), bias=True),
    }


def bfloat16(world: World, meshes: Meshes) -> dict[str, Any]:
    balancer = make_balancer(meshes.ep_group, dtype=torch.bfloat16)
    return {
        f"{kernel}, {bias}": compare(meshes.ep_group, balancer, dtype=torch.bfloat16, kernel=kernel, bias=bias)
        for kernel, bias in product(("loop", "grouped_mm"), (False, True))
    }


def repeats(world: World, meshes: Meshes) -> list[list[torch.Tensor]]:
    """The same training twice, with other uses of the slots between."""
    balancer = make_balancer(meshes.ep_group, dtype=torch.bfloat16)
    runs = []
    for layer in (0, 3, 0):
        layers = Layers([ForeignLayer(meshes.ep_group, balancer, layer=layer, bias=True, dtype=torch.bfloat16)])
        runs.append(train(layers, [40, 9], world.rank, together="first first"))
    return [runs[0], runs[2]]


def four_ranks(world: World, meshes: Meshes) -> dict[str, Any]:
    balancer = make_balancer(meshes.ep_group)
    return {
        "bias": compare(meshes.ep_group, balancer, bias=True, numbers=(11, 4 * (world.rank % 2))),
        "bias, checkpoint": compare(meshes.ep_group, balancer, bias=True, run=run_checkpointed(False)),
    }


def leaves_nothing_behind(world: World, meshes: Meshes) -> dict[str, Any]:
    balancer = make_balancer(meshes.ep_group)
    layers = Layers(ForeignLayer(meshes.ep_group, balancer, layer=i) for i in range(2))
    plain = Layers(ForeignLayer(meshes.ep_group, None, layer=i) for i in range(2))
    found: dict[str, Any] = {"before use": balancer.num_bytes}
    for _ in range(3):
        train(layers, [5, 6], world.rank, together="first first")
        found.setdefault("bytes", balancer.num_bytes)
    with torch.no_grad():
        run_plain(layers, tokens(world.rank, 0, 5), 0)
    gc.collect()
    found["steps"] = len(balancer._steps)
    found["grew"] = balancer.num_bytes - found["bytes"]
    found["names"] = sorted(set(plain.state_dict()) ^ set(layers.state_dict()))
    found["records"] = len(balancer.take_records())
    return found


def refusals(world: World, meshes: Meshes) -> dict[str, str]:
    balancer = make_balancer(meshes.ep_group)
    ids_TK = torch.zeros(4, 1, dtype=torch.int64)

    def attempt(what: Callable[[], Any]) -> str:
        try:
            what()
        except (ConfigError, RuntimeError) as error:
            return str(error)
        return "nothing"

    step = balancer.route(ids_TK, (0, 0))
    wrong = torch.zeros(4, 16, 24, dtype=torch.bfloat16)

    def another_choice() -> None:
        """A router that chooses again in the recompute, and not the same."""
        calls, kept = iter([0, 1]), []

        def forward(x: torch.Tensor) -> torch.Tensor:
            kept.append(balancer.route(torch.full((4, 1), next(calls)), (1, 0)))
            return (x * x).exp()

        checkpoint(forward, torch.ones(2, requires_grad=True), use_reentrant=False).sum().backward()

    found = {
        "name": attempt(lambda: step.attach("gate", wrong)),
        "dtype": attempt(lambda: step.attach("down", wrong)),
        "shape": attempt(lambda: step.attach("up", wrong.float())),
        "bias": attempt(lambda: step.attach("up_bias", torch.zeros(4, 16))),
        "experts": attempt(lambda: Balancer(meshes.ep_group, 7, {"up": (2, 2)}, torch.float32)),
        "planner": attempt(lambda: make_balancer(meshes.ep_group, planner="best")),
    }
    found["choice"] = attempt(another_choice)
    return found


def runs_behind_attention(world: World, meshes: Meshes) -> list[str]:
    """Order of one layer's backward: experts, attention, join, what FSDP would do at the layer's start."""
    balancer = make_balancer(meshes.ep_group)
    layer = ForeignLayer(meshes.ep_group, balancer)
    order: list[str] = []

    class Note(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, name):
            ctx.name = name
            return x.view_as(x)

        @staticmethod
        def backward(ctx, grad):
            order.append(ctx.name)
            return grad, None

    inner = balancer.pull_gradients
    balancer.pull_gradients = lambda step, name: order.append(f"send {name}") or inner(step, name)  # type: ignore
    layer.attention.register_hook(lambda g: order.append("attention"))
    layer.weights["up"][0].register_hook(lambda g: order.append("masters of up"))
    x = Note.apply(tokens(world.rank, 0, 7).requires_grad_(), "start of the layer")
    layer(x).sum().backward()
    return order


@pytest.fixture(scope="module")
def two() -> Outcomes:
    scenarios = [hosts, slots, uneven_ranks, bfloat16, repeats, leaves_nothing_behind, runs_behind_attention, refusals]
    return Outcomes(run_scenarios, 2, scenarios, ParallelConfig(ep_size=2), E)


@pytest.mark.parametrize("name", HOSTS)
def test_a_foreign_layer_is_the_same_as_without_balancing(two: Outcomes, name: str) -> None:
    for rank in two.of(hosts):
        found = rank[name]
        assert found["difference"] < 1e-5
        assert found["missing"] == 0
        assert found["routed"] == 3 * len(HOSTS[name].get("numbers", (9, 5))), "a recompute decides and counts nothing"
        if name != "balanced":
            assert found["copies"] > 0
            assert found["after"] < found["before"]


@pytest.mark.parametrize("name", SLOTS)
def test_more_slots(two: Outcomes, name: str) -> None:
    for rank in two.of(slots):
        assert rank[name]["difference"] < 1e-5
        assert rank[name]["copies"] > 0


def test_idle_ranks(two: Outcomes) -> None:
    for rank in two.of(uneven_ranks):
        assert max(found["difference"] for found in rank.values()) < 1e-5
        assert rank["idle rank 1"]["copies"] > 0
        assert rank["idle rank 1, bias"]["copies"] > 0
        assert rank["idle rank 0, bias"]["copies"] > 0
        assert rank["no token"]["copies"] == 0
        assert rank["no token"]["after"] == 1.0


def test_bias_on_four_ranks_some_of_them_idle() -> None:
    for rank in Outcomes(run_scenarios, 4, [four_ranks], ParallelConfig(ep_size=4), E).of(four_ranks):
        for found in rank.values():
            assert found["difference"] < 1e-5
            assert found["copies"] > 0


def test_the_same_training_gives_the_same_bits(two: Outcomes) -> None:
    for first, second in two.of(repeats):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bfloat16_within_its_precision(two: Outcomes) -> None:
    for rank in two.of(bfloat16):
        for found in rank.values():
            assert found["copies"] > 0
            assert found["difference"] < 2e-2


def test_the_runtime_leaves_nothing_in_the_model_and_keeps_nothing(two: Outcomes) -> None:
    for found in two.of(leaves_nothing_behind):
        assert found["before use"] == 0
        assert found["bytes"] > 0
        assert found["grew"] == 0
        assert found["names"] == []
        assert found["steps"] <= 2  # those of the forward without gradients
        assert found["records"] == 3 * 2 * 2 + 2


def test_gradients_come_home_behind_attention(two: Outcomes) -> None:
    for order in two.of(runs_behind_attention):
        assert order == ["send down", "send up", "attention", "masters of up", "start of the layer"]


def test_refusals_say_what_was_given_and_what_to_do(two: Outcomes) -> None:
    for found in two.of(refusals):
        assert "made for up, down" in found["name"]
        assert "4 masters of shape (48,)" in found["bias"]
        assert "torch.bfloat16" in found["dtype"]
        assert "torch.float32" in found["dtype"]
        assert "4 masters of shape (48, 16)" in found["shape"]
        assert "7 experts" in found["experts"]
        assert "exact_load" in found["planner"]
        assert "chose other experts" in found["choice"]
