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
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from distributed.balance_rig import BIASES, INNER, WEIGHTS, D, E, ForeignLayer, make_balancer, tokens
from distributed.parity import relative
from distributed.rig import Outcomes, run_scenarios
from equipoise.balance import Balancer
from equipoise.dispatch import build_dispatcher
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.errors import ConfigError
from equipoise.kernels.tiles import first_half

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
    depth = options.pop("depth", 3)
    frozen = options.pop("frozen", ())
    results = []
    for used in (None, balancer):
        layers = Layers(ForeignLayer(group, used, layer=index, **options) for index in range(depth))
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
    "triton": {"kernel": "triton", "depth": 2},
    "triton, weights one by one, checkpoint": {
        "kernel": "triton",
        "depth": 1,
        "stacked": False,
        "run": run_checkpointed(False),
    },
    "triton, frozen experts": {"kernel": "triton", "depth": 1, "frozen": ("up", "down")},
    "triton, one token": {"kernel": "triton", "depth": 1, "numbers": (1,)},
    "checkpoint": {"run": run_checkpointed(False)},
    "checkpoint, without optional calls": {"run": run_checkpointed(False), "hooks": False},
    "reentrant checkpoint": {"run": run_checkpointed(True)},
    "reentrant checkpoint, without optional calls": {"run": run_checkpointed(True), "hooks": False},
    "two in flight, last first": {"together": "last first"},
    "two in flight, first first": {"together": "first first"},
    "two in flight, one backward": {"together": "one backward"},
    "two in flight, checkpoint": {"together": "first first", "run": run_checkpointed(False)},
    "two in flight, reentrant checkpoint": {"together": "last first", "run": run_checkpointed(True)},
    "two in flight, another hot rank each": {"together": "first first", "moving": True},
    "two in flight, another hot rank each, checkpoint": {
        "together": "last first",
        "moving": True,
        "run": run_checkpointed(False),
    },
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
    "bias, rows padded, triton": {"bias": True, "padded": True, "kernel": "triton", "depth": 1},
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


def late(balancer: Balancer, parts: int = 1) -> Balancer:
    """Weights of replicas arrive when they, or the first half of them, are waited for; until then slots hold NaN."""
    transport, buffers = balancer.transport, balancer.buffers
    push = transport.push_weights

    class Late:
        num_parts = parts

        def __init__(self, name: str) -> None:
            self.name, self.arrived = name, buffers.weights(name).clone()
            buffers.weights(name).fill_(float("nan"))

        def wait(self, part: int = -1) -> None:
            end = first_half(balancer.num_slots) if part == 0 else balancer.num_slots
            buffers.weights(self.name)[:end].copy_(self.arrived[:end])

    def push_late(name, copies, masters, what) -> Late:
        push(name, copies, masters, what).wait()
        return Late(name)

    transport.push_weights = push_late  # type: ignore[method-assign, assignment]
    return balancer


def fused_experts(group: dist.ProcessGroup, balancer: Balancer, kernel: str, hooks: bool) -> list[torch.Tensor]:
    """Output and all gradients of SwiGLU experts in one piece, most tokens going to rank 0. Before the backward another
    step takes the slots, so that the weights come twice."""
    rank, generator = dist.get_rank(group), torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    mine = slice(rank * E // 2, (rank + 1) * E // 2)
    masters = {name: make(E, *shape)[mine].clone().requires_grad_() for name, shape in WEIGHTS.items()}
    x_TD, weights_TK = make(5 + rank, D).requires_grad_(), torch.rand(5 + rank, 2, generator=generator)
    ids_TK = torch.tensor([[0, 1], [0, 2], [1, 7], [0, 3], [2, 0], [1, 0]])[: 5 + rank]
    step = balancer.route(ids_TK, (0, 0))
    attached = {name: step.attach(name, weight) for name, weight in masters.items()}
    dispatcher = build_dispatcher("all_to_all", balancer.num_physical_experts, group)
    arrived = dispatcher.dispatch(x_TD, step.physical_ids_TK, weights_TK)
    rows_RD = step.grouped_mlp(arrived.rows_RD, arrived.counts_M, attached["up"], attached["down"], kernel)
    y_TD = dispatcher.combine(rows_RD, arrived.handle)
    y_TD = step.leave(y_TD) if hooks else y_TD
    other = balancer.route((ids_TK + 1) % E, (1, 0))
    for name, weight in masters.items():
        other.attach(name, -weight.detach())
    y_TD.backward(make(*y_TD.shape))
    assert x_TD.grad is not None
    return [y_TD.detach(), x_TD.grad, *(weight.grad for weight in masters.values())]  # type: ignore[list-item]


def late_weights(world: World, meshes: Meshes) -> dict[str, float]:
    """Largest relative differences from weights that are there in time."""
    group = meshes.ep_group
    assert group is not None
    found = {"product by product": compare(group, late(make_balancer(group)), numbers=(5,))["difference"]}
    for kernel, hooks, parts in (("loop", True, 1), ("triton", True, 1), ("triton", False, 1), ("triton", True, 2)):
        balancer = late(make_balancer(group, slots=2 * parts), parts)
        pairs = zip(
            fused_experts(group, balancer, kernel, hooks), fused_experts(group, make_balancer(group), "loop", hooks)
        )
        found[f"{kernel} {hooks} {parts}"] = max(relative(a, b) for a, b in pairs)
        assert balancer.take_records()[0].copies > 0
    return found


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


def whole_numbers(world: World, meshes: Meshes) -> list[list[bool]]:
    """Row 25: a layer of small whole numbers, whose sums FP32 holds exactly in any order: what is equal to plain."""
    group, rank = meshes.ep_group, world.rank
    generator = torch.Generator().manual_seed(5)

    def whole(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 3, shape, generator=generator).float()

    mine = slice(rank * E // 2, (rank + 1) * E // 2)
    up_MND, down_MDN = whole(E, 2 * INNER, D)[mine], whole(E, D, INNER)[mine]
    x_TD, grad_TD = whole(2, 11, D)[rank], whole(2, 11, D)[rank]
    ids_TK = torch.tensor([[0, 1], [1, 2], [0, 5]]).repeat(4, 1)[:11]
    results: list[list[torch.Tensor]] = []
    for balancer in (None, make_balancer(group), make_balancer(group, slots=3)):
        inputs = [t.clone().requires_grad_() for t in (x_TD, up_MND, down_MDN)]
        x, up, down = inputs
        number = E if balancer is None else balancer.num_physical_experts
        dispatcher = build_dispatcher("all_to_all", number, group)  # type: ignore[arg-type]
        if balancer is None:
            arrived = dispatcher.dispatch(x, ids_TK, torch.ones(11, 2))
            parts = arrived.rows_RD.split(arrived.counts_M.tolist())
            gate, value = torch.cat([part @ w.T for part, w in zip(parts, up)]).chunk(2, -1)
            parts = (gate.relu() * value).split(arrived.counts_M.tolist())
            out = torch.cat([part @ w.T for part, w in zip(parts, down)])
        else:
            step = balancer.route(ids_TK, (0, 0))
            assert step.replicas
            attached_up, attached_down = step.attach("up", up), step.attach("down", down)
            arrived = dispatcher.dispatch(x, step.physical_ids_TK, torch.ones(11, 2))
            rows = step.grouped_linear(arrived.rows_RD, arrived.counts_M, attached_up, kernel="loop")
            gate, value = rows.chunk(2, -1)
            out = step.grouped_linear(gate.relu() * value, arrived.counts_M, attached_down, kernel="loop")
        y = dispatcher.combine(out, arrived.handle)
        y.backward(grad_TD)
        results.append([y.detach(), *(t.grad for t in inputs)])  # type: ignore[misc]
    assert all(bool(t.abs().max() > 0) and bool(t.abs().max() < 2**24) for t in results[0])
    return [[torch.equal(a, b) for a, b in zip(result, results[0])] for result in results[1:]]


def noise_floor(world: World, meshes: Meshes) -> dict[str, float]:
    """Row 25: how far FP32 is from FP64, largest over outputs and gradients, without balancing and with it."""
    runs = {"exact": (None, torch.float64), "off": (None, torch.float32)}
    balancer = make_balancer(meshes.ep_group)
    runs |= {"on": (balancer, torch.float32)}  # type: ignore[dict-item]
    results = {}
    for name, (used, dtype) in runs.items():
        layers = Layers(ForeignLayer(meshes.ep_group, used, layer=index, dtype=dtype) for index in range(2))
        results[name] = [t.double() for t in train(layers, [9, 5], world.rank)]
    assert balancer.take_records()[0].copies
    return {name: max(relative(a, b) for a, b in zip(results[name], results["exact"])) for name in ("off", "on")}


def replicas_are_copies(world: World, meshes: Meshes) -> dict[str, list[bool]]:
    """Row 11: each replica here against the bytes of its master, of which every rank knows all."""
    found: dict[str, list[bool]] = {}
    for dtype in (torch.float32, torch.bfloat16):
        balancer = make_balancer(meshes.ep_group, slots=2, dtype=dtype)
        step = balancer.route(torch.tensor([[0, 1], [0, 2], [1, 2]]), (0, 0))
        for name, shape in {"up": (2 * INNER, D), "down": (D, INNER)}.items():
            weight_ENK = torch.randn(E, *shape, generator=torch.Generator().manual_seed(3)).to(dtype)
            step.attach(name, weight_ENK.view(2, E // 2, *shape)[world.rank])
            slots = step.slots(name)
            assert slots is not None
            here = [replica for replica in step.replicas if replica.host == world.rank]
            found[f"{name} {dtype}"] = [
                torch.equal(slots[r.slot].view(torch.uint8), weight_ENK[r.home * E // 2 + r.local].view(torch.uint8))
                for r in here
            ]
    return found


def recomputed_rows(world: World, meshes: Meshes) -> dict[str, list[Any]]:
    """Row 2: rows and counts that a layer receives in its forward and in its recompute."""
    found = {}
    for dispatcher in ("all_to_all", "all_gather"):
        layer = ForeignLayer(meshes.ep_group, make_balancer(meshes.ep_group), dispatcher=dispatcher)
        received: list[tuple[list[int], torch.Tensor]] = []

        def dispatch(*args: Any, inner=layer.dispatcher.dispatch, received=received) -> Any:
            arrived = inner(*args)
            received.append((arrived.counts_M.tolist(), arrived.rows_RD.detach().clone()))
            return arrived

        layer.dispatcher.dispatch = dispatch  # type: ignore[method-assign]
        x_TD = tokens(world.rank, 0, 9).requires_grad_()
        checkpoint(layer, x_TD, 0, use_reentrant=False).sum().backward()
        (counts, rows), (counts_again, rows_again) = received
        found[dispatcher] = [counts == counts_again, torch.equal(rows, rows_again), sum(counts[E // 2 :])]
    return found


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
    halves = DTensor.from_local(torch.zeros(E // 2, INNER, D), meshes.ep, [Shard(1)])
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
        "tensor parallel": attempt(lambda: step.attach("up", halves)),
        "tensor parallel, entered": attempt(lambda: balancer.enter("up", halves.requires_grad_())),
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
    balancer.pull_gradients = lambda step, name, gradients: (  # type: ignore
        order.append(f"send {name}") or inner(step, name, gradients)
    )
    layer.attention.register_hook(lambda g: order.append("attention"))
    layer.weights["up"][0].register_hook(lambda g: order.append("masters of up"))
    x = Note.apply(tokens(world.rank, 0, 7).requires_grad_(), "start of the layer")
    layer(x).sum().backward()
    return order


@pytest.fixture(scope="module")
def two() -> Outcomes:
    scenarios = [
        *(
            hosts,
            slots,
            late_weights,
            uneven_ranks,
            bfloat16,
            whole_numbers,
            noise_floor,
            replicas_are_copies,
            recomputed_rows,
        ),
        *(repeats, leaves_nothing_behind, runs_behind_attention, refusals),
    ]
    return Outcomes(run_scenarios, 2, scenarios, ParallelConfig(ep_size=2), E)


@pytest.mark.parametrize("name", HOSTS)
def test_a_foreign_layer_is_the_same_as_without_balancing(two: Outcomes, name: str) -> None:
    for rank in two.of(hosts):
        found = rank[name]
        assert found["difference"] < 1e-5
        assert found["missing"] == 0
        calls = HOSTS[name].get("depth", 3) * len(HOSTS[name].get("numbers", (9, 5)))
        assert found["routed"] == calls, "a recompute decides and counts nothing"
        if name != "balanced":
            assert found["copies"] > 0
            assert found["after"] < found["before"]


@pytest.mark.parametrize("name", SLOTS)
def test_more_slots(two: Outcomes, name: str) -> None:
    for rank in two.of(slots):
        assert rank[name]["difference"] < 1e-5
        assert rank[name]["copies"] > 0


def test_weights_are_not_read_before_they_are_waited_for(two: Outcomes) -> None:
    for found in two.of(late_weights):
        assert len(found) == 5
        assert max(found.values()) < 1e-5, found


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


def test_numbers_that_fp32_adds_exactly_come_out_bit_for_bit(two: Outcomes) -> None:
    assert two.of(whole_numbers) == [[[True] * 4] * 2] * 2


def test_balancing_is_no_further_from_fp64_than_its_absence(two: Outcomes) -> None:
    for found in two.of(noise_floor):
        assert 0 < found["off"] < 1e-5
        assert found["on"] <= 1.5 * found["off"]


def test_a_replica_has_the_bytes_of_its_master(two: Outcomes) -> None:
    ranks = two.of(replicas_are_copies)
    assert all(all(equal) for found in ranks for equal in found.values())
    for name in ranks[0]:
        assert sum(len(found[name]) for found in ranks) > 0, name


def test_a_recomputed_layer_receives_the_same_rows_in_the_same_order(two: Outcomes) -> None:
    for rank, found in enumerate(two.of(recomputed_rows)):
        for dispatcher, (same_counts, same_rows, of_replicas) in found.items():
            assert same_counts, dispatcher
            assert same_rows, dispatcher
            assert of_replicas > 0 or rank == 0


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
        for way in ("tensor parallel", "tensor parallel, entered"):
            assert "'up' is split within each expert (Shard(1)" in found[way]
            assert "cannot be combined with expert tensor parallelism" in found[way]
        assert "4 masters of shape (48, 16)" in found["shape"]
        assert "7 experts" in found["experts"]
        assert "exact_load" in found["planner"]
        assert "chose other experts" in found["choice"]
