"""Memory that ranks share: the kernels' protocol among processes of this host, in Triton's interpreter.

Everything is compared with the collective forms, bit for bit where both add in the same order.
"""

import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import fake_deep_ep
from distributed.balance_rig import WEIGHTS, D, E, ForeignLayer, few_candidates, make_balancer
from distributed.gpu_layer import balanced, run
from distributed.parity import Case, differences, relative, toy_model, train_in_parallel, train_plainly
from distributed.rig import Outcomes, run_scenarios
from distributed.test_balance_runtime import Layers, compare, run_checkpointed, train
from distributed.test_dispatch import ROUTINGS
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
CPU = torch.device("cpu")  # its interpreter rounds to BF16 in a way of its own, so FP16 stands for it


def make_space(meshes: Meshes, timeout_s: float = 60.0) -> SymmetricSpace:
    few_candidates()
    return SymmetricSpace(meshes.ep_group, CPU, timeout_s)


# Dispatch.

AWKWARD = ["all to rank 3", "one rank has tokens", "nobody has tokens", "some dropped"]


class ScaleInto(torch.autograd.Function):
    """Elementwise experts that write their outputs, and the gradient of their rows, where the dispatcher wants them."""

    @staticmethod
    def forward(ctx, rows_RD, scale, make_rows):
        ctx.scale, ctx.make_rows = scale, make_rows
        return ScaleInto.write(make_rows, rows_RD, scale)

    @staticmethod
    def backward(ctx, grad_RD):
        return ScaleInto.write(ctx.make_rows, grad_RD, ctx.scale), None, None

    @staticmethod
    def write(make_rows, rows_RD, scale):
        out_RD = make_rows(rows_RD.dtype).fill_(float("nan"))
        torch.mul(rows_RD[: len(scale)], scale, out=out_RD[: len(scale)])
        return out_RD


def run_dispatcher(
    dispatcher: Any, by_rank: list[list[list[int]]], rank: int, dtype: torch.dtype, writes_into: bool = False
) -> dict[str, Any]:
    """A layer of elementwise experts on one rank's tokens: what arrives, the output, gradients. `writes_into`: of
    experts that write into the dispatcher's memory, where it has some."""
    ids = by_rank[rank]
    width = max((len(row) for rows in by_rank for row in rows), default=4)
    ids_TK = torch.tensor(ids, dtype=torch.int32).view(len(ids), width)
    generator = torch.Generator().manual_seed(rank)
    x_TD = torch.randn(len(ids), 12, generator=generator).to(dtype).requires_grad_()
    weights_TK = torch.rand(len(ids), width, generator=generator).requires_grad_()
    arrived = dispatcher.dispatch(x_TD, ids_TK, weights_TK)
    number = int(arrived.counts_M.sum())
    expert_R = torch.arange(len(arrived.counts_M)).repeat_interleave(arrived.counts_M)
    scale = (1 + expert_R[:, None] + 10 * rank).to(dtype)
    weighed = arrived.rows_RD
    if arrived.weights_R is not None:
        weighed = (weighed * arrived.weights_R[:, None]).to(dtype)
    if writes_into and arrived.make_rows is not None:
        rows = ScaleInto.apply(weighed, scale, arrived.make_rows)
    else:
        rows = weighed[:number] * scale
        rows = torch.cat([rows, torch.full_like(arrived.rows_RD[number:], float("nan"))])
    y_TD = dispatcher.combine(rows, arrived.handle)
    y_TD.backward(torch.randn(y_TD.shape, generator=generator).to(dtype))
    return {
        "rows": arrived.rows_RD[:number].detach().clone(),
        "counts": arrived.counts_M,
        "y": y_TD.detach(),
        "x": x_TD.grad,
        "weights": weights_TK.grad,
        "comes with weights": torch.tensor(arrived.weights_R is not None),
    }


def dispatch_as_all_to_all(world: World, meshes: Meshes) -> dict[str, list[str]]:
    """What differs from the dispatcher `all_to_all`, by routing and dtype, one after the other in the same buffers."""
    space, experts = make_space(meshes), 16
    reference = build_dispatcher("all_to_all", experts, meshes.ep_group)
    found = {}
    once, everywhere = 0, 2**20  # a token to each rank, or to each of its places
    for dtype, few_bytes, routings, weighs_rows in (
        (torch.float32, once, AWKWARD, False),
        (torch.float16, once, AWKWARD[-1:], False),
        (torch.float32, everywhere, AWKWARD[::3], False),
        (torch.float32, once, AWKWARD, True),
        (torch.float16, once, AWKWARD[-1:], True),
        (torch.float32, everywhere, AWKWARD[::3], True),
    ):
        # Any routing fits. The largest number of tokens is known beforehand, the first routing is not the largest.
        options: dict[str, Any] = {"max_tokens": 8, "few_bytes": few_bytes, "weighs_rows": weighs_rows}
        dispatcher = SymmetricDispatcher(experts, space, 0, **options)
        for name in routings:
            by_rank = ROUTINGS[name]
            want = run_dispatcher(reference, by_rank, world.rank, dtype)
            ways = (False, True) if name in AWKWARD[2:] else (True,)
            for writes_into in ways:
                got = run_dispatcher(dispatcher, by_rank, world.rank, dtype, writes_into)
                exactly = ("rows", "counts") if weighs_rows else ("rows", "counts", "x")
                differing = [part for part in exactly if not torch.equal(got[part], want[part])]
                assert bool(got["comes with weights"]) == weighs_rows
                # Sums that the plain form makes with fused additions, or in another order; a rank's part of one is
                # rounded once more where it is added up there.
                exact = 1e-6 if dtype == torch.float32 else 1e-3
                largest = max(float(want[part].abs().max()) if want[part].numel() else 0.0 for part in ("x", "y"))
                for part in ("x", "y"):
                    if not torch.allclose(got[part], want[part], rtol=exact, atol=exact * max(largest, 1.0)):
                        differing.append(part)
                loose = 1e-5 if dtype == torch.float32 or not weighs_rows else 1e-2  # products of rounded gradients
                if not torch.allclose(got["weights"], want["weights"], rtol=loose, atol=loose):
                    differing.append("weights")
                found[f"{name} {dtype} {few_bytes} {writes_into} {weighs_rows}"] = differing
        gc.collect()  # the interpreter has cycles of references to what it was given
        memory = dispatcher._memory
        assert memory is not None
        assert memory.pieces.num_free == 6, "everything lent has come back"
    return found


class ExpInto(torch.autograd.Function):
    """Experts that write into the dispatcher's memory and keep what they wrote."""

    @staticmethod
    def forward(ctx, rows_RD, make_rows):
        out_RD = torch.exp(rows_RD, out=make_rows(rows_RD.dtype))
        ctx.save_for_backward(out_RD)
        return out_RD

    @staticmethod
    def backward(ctx, grad_RD):
        return grad_RD * ctx.saved_tensors[0], None


def rows_that_others_hold(world: World, meshes: Meshes) -> dict[str, Any]:
    """Ranks add up rows where they lie. What is then of gradients that a hook or another tensor's backward gets too: is
    it what it was? And of outputs that experts keep: the error."""
    found: dict[str, Any] = {}
    space = make_space(meshes)
    ids_TK = torch.tensor([[0, 1, 4, 6], [4, 5, 6, 7]] if world.rank == 0 else [[0, 1, 2, 3], [7, 0, 6, 1]])

    def arrive(slots: int, **options: Any) -> tuple[SymmetricDispatcher, torch.Tensor, Any, int]:
        dispatcher = SymmetricDispatcher(E, space, 0, **({"few_bytes": 0, "weighs_rows": True} | options))
        x_TD = torch.randn(2, D, generator=torch.Generator().manual_seed(world.rank)).requires_grad_()
        arrived = dispatcher.dispatch(x_TD, ids_TK[:, :slots], torch.ones(2, slots))
        return dispatcher, x_TD, arrived, int(arrived.counts_M.sum())

    kept: list[torch.Tensor] = []
    dispatcher, x_TD, arrived, number = arrive(4)
    rows_RD = arrived.rows_RD
    rows_RD.register_hook(lambda grad: kept.extend([grad, grad.clone()]))
    scale = torch.full((number, 1), 2.0)
    dispatcher.combine(ScaleInto.apply(rows_RD, scale, arrived.make_rows), arrived.handle).sum().backward()
    found["hook"] = torch.equal(kept[0][:number], kept[1][:number])
    found["gradient"] = x_TD.grad is not None and torch.equal(x_TD.grad, torch.full((2, D), 8.0))
    kept.clear()

    earlier_RD = torch.zeros(len(rows_RD), D, requires_grad=True) * 1.0  # its backward comes after the dispatch's
    earlier_RD.register_hook(lambda grad: kept.append(grad[:number].clone()))
    dispatcher, x_TD, arrived, number = arrive(4)
    both_RD = ScaleInto.apply(arrived.rows_RD + earlier_RD, scale[:number], arrived.make_rows)
    dispatcher.combine(both_RD, arrived.handle).sum().backward()
    found["shared"] = torch.equal(kept[0], torch.full((number, D), 2.0))

    for slots in (1, 4):
        dispatcher, x_TD, arrived, _ = arrive(slots)
        arrived.rows_RD.detach()[int(arrived.counts_M.sum()) :] = 0
        try:
            dispatcher.combine(ExpInto.apply(arrived.rows_RD, arrived.make_rows), arrived.handle).sum().backward()
            found[f"kept outputs, top {slots}"] = ""
        except RuntimeError as error:
            found[f"kept outputs, top {slots}"] = str(error)
    return found


def evaluation_first(world: World, meshes: Meshes) -> list[bool]:
    """Whether gradients are right behind a forward without, in each of torch's modes."""
    space, right = make_space(meshes), []
    for mode in (torch.no_grad, torch.inference_mode):
        dispatcher = SymmetricDispatcher(E, space, 0, few_bytes=0, weighs_rows=True)
        for context in (mode(), torch.enable_grad()):
            with context:
                x_TD = torch.ones(2, D, requires_grad=True)
                weights_TK = torch.ones(2, 4, requires_grad=True)
                arrived = dispatcher.dispatch(x_TD, torch.arange(8).view(2, 4), weights_TK)
                number = int(arrived.counts_M.sum())
                assert arrived.weights_R is not None
                rows_RD = arrived.rows_RD * arrived.weights_R[:, None]
                scaled_RD = ScaleInto.apply(rows_RD, torch.full((number, 1), 2.0), arrived.make_rows)
                y_TD = dispatcher.combine(scaled_RD, arrived.handle)
                right.append(torch.equal(y_TD, torch.full((2, D), 8.0)))
        y_TD.sum().backward()
        assert x_TD.grad is not None
        assert weights_TK.grad is not None
        right += [torch.equal(x_TD.grad, y_TD), torch.equal(weights_TK.grad, torch.full((2, 4), 2.0 * D))]
    return right


def wider_rows(world: World, meshes: Meshes) -> tuple[str, float]:
    """Experts return FP32 rows of FP16 tokens: the message, and seconds of a timeout of 60."""
    dispatcher = SymmetricDispatcher(E, make_space(meshes), 0, weighs_rows=True)
    ids_TK, started = torch.arange(8).view(2, 4), time.monotonic()
    arrived = dispatcher.dispatch(torch.ones(2, D, dtype=torch.float16), ids_TK, torch.ones(2, 4))
    assert arrived.weights_R is not None
    try:
        dispatcher.combine(arrived.rows_RD * arrived.weights_R[:, None], arrived.handle)
    except ConfigError as error:
        return str(error), time.monotonic() - started
    return "", 0.0


def deepep_as_all_to_all(world: World, meshes: Meshes) -> dict[str, dict[str, float]]:
    """Relative differences from the dispatcher `all_to_all`, which sums a token's rows in another order."""
    sys.modules["deep_ep"] = fake_deep_ep
    experts = 16
    adapter = build_dispatcher("deepep", experts, meshes.ep_group)
    del sys.modules["deep_ep"]
    reference = build_dispatcher("all_to_all", experts, meshes.ep_group)
    found = {}
    for name in AWKWARD:
        got = run_dispatcher(adapter, ROUTINGS[name], world.rank, torch.float32)
        want = run_dispatcher(reference, ROUTINGS[name], world.rank, torch.float32)
        found[name] = {part: relative(got[part], want[part]) for part in ("rows", "y", "x", "weights")}
    return found


def results_that_outlive_the_buffers(world: World, meshes: Meshes) -> list[bool]:
    """More results are kept than there are buffers: the last ones are copies, none is overwritten."""
    dispatcher = SymmetricDispatcher(4, make_space(meshes), 0, num_buffers=2)
    kept = []
    for number in range(5):
        x_TD = torch.full((3, 8), float(number + 10 * world.rank))
        ids_TK = torch.tensor([[0, 2], [1, 3], [2, 1]])
        arrived = dispatcher.dispatch(x_TD, ids_TK, torch.ones(3, 2))
        kept.append((arrived.rows_RD[: int(arrived.counts_M.sum())], arrived.counts_M, arrived.handle))
    right = []
    for number, (rows, _, _) in enumerate(kept):
        right.append(sorted({float(v) for v in rows.flatten()}) == [number, number + 10])
    return right


def overflow(world: World, meshes: Meshes) -> str:
    """All tokens go to rank 0, whose buffers hold half of them."""
    space = make_space(meshes)
    dispatcher = SymmetricDispatcher(2, space, 1.0)
    ids_TK = torch.zeros(16, 1, dtype=torch.int32)
    x_TD = torch.ones(16, 4)
    try:
        arrived = dispatcher.dispatch(x_TD, ids_TK, torch.ones(16, 1))
        assert int(arrived.counts_M.sum()) <= len(arrived.rows_RD)
        dispatcher.combine(arrived.rows_RD, arrived.handle)
        dispatcher.dispatch(x_TD, ids_TK, torch.ones(16, 1))
    except ConfigError as error:
        return str(error)
    return ""


def sizes_of_ranks_differ(world: World, meshes: Meshes) -> tuple[int, int, str, float]:
    """Rank 1 brings the most tokens to the first dispatch: slots that the buffers are made for. Then it alone brings
    more than they hold: errors of this rank, and the seconds that the last took."""
    space = make_space(meshes, timeout_s=120.0)
    dispatcher = SymmetricDispatcher(E, space)
    sizes = (3, 8), (3, 8), (8, 3), (2, 9)
    messages, seconds = [], 0.0
    for tokens in (size[world.rank] for size in sizes):
        started = time.monotonic()
        try:
            ids_TK = torch.arange(tokens, dtype=torch.int32)[:, None] % E
            arrived = dispatcher.dispatch(torch.ones(tokens, D), ids_TK, torch.ones(tokens, 1))
            dispatcher.combine(arrived.rows_RD, arrived.handle)
            space.check()
        except (ConfigError, RankFailure) as error:
            messages.append(type(error).__name__ + " " + str(error))
            seconds = time.monotonic() - started
    assert dispatcher._memory is not None
    dist.barrier()
    return dispatcher._memory.num_slots, len(messages), "".join(messages), seconds


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
    """Weights in slots and sums of gradients that are not the right bits, over plans one after the other."""
    P, R, M = world.size, 2, E // world.size
    space, wrong = make_space(meshes), []
    shapes = {"matrix": (5, 7), "bias": (3,)}
    for dtype, stacked in ((torch.float32, True), (torch.float16, False)):
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
    for kernel, slots in (("triton", 2), ("loop", 1)):
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
        dispatch_as_all_to_all,
        rows_that_others_hold,
        evaluation_first,
        wider_rows,
        deepep_as_all_to_all,
        results_that_outlive_the_buffers,
        overflow,
        sizes_of_ranks_differ,
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
    scenarios = [dispatch_as_all_to_all, exchanged_plans, transfers]
    return Outcomes(run_scenarios, 4, scenarios, ParallelConfig(ep_size=4), E)


def test_rows_are_those_of_all_to_all(two: Outcomes) -> None:
    check_rows(two)


def test_experts_may_multiply_by_weights_that_come_with_the_rows(two: Outcomes) -> None:
    for found in two.of(weights_with_rows):
        assert len(found) == 4
        assert max(found.values()) < 1e-5, found
    assert two.of(training_with_weights) == [{"full": {}, "none": {}}] * 2


@pytest.mark.slow
def test_rows_plans_and_transfers_of_four_ranks(four: Outcomes) -> None:
    check_rows(four)
    assert [*four.of(exchanged_plans), *four.of(transfers)] == [[]] * 8


def check_rows(ranks: Outcomes) -> None:
    for found in ranks.of(dispatch_as_all_to_all):
        assert len(found) == 22
        assert {name: differing for name, differing in found.items() if differing} == {}


def test_gradients_that_others_hold_stay_as_they_are(two: Outcomes) -> None:
    for found in two.of(rows_that_others_hold):
        assert found["hook"]
        assert found["gradient"]
        assert found["shared"]


def test_experts_that_keep_outputs_which_are_added_up_are_told(two: Outcomes) -> None:
    for found in two.of(rows_that_others_hold):
        assert found["kept outputs, top 1"] == "", "nothing is added up"
        assert "modified by an inplace operation" in found["kept outputs, top 4"]


def test_a_first_forward_for_inference_leaves_training_as_it_is(two: Outcomes) -> None:
    assert two.of(evaluation_first) == [[True] * 8] * 2


def test_rows_that_do_not_fit_into_the_buffers_are_refused(two: Outcomes) -> None:
    for message, seconds in two.of(wider_rows):
        assert "float32" in message
        assert "2 bytes" in message
        assert seconds < 30


def test_the_adapter_of_deepep_keeps_its_contract(two: Outcomes) -> None:
    """Against a stand-in for the package with its interface; the package itself needs GPUs."""
    for found in two.of(deepep_as_all_to_all):
        assert len(found) == len(AWKWARD)
        for by_part in found.values():
            assert max(by_part.values()) < 1e-5, found


def test_deepep_is_asked_for_only_when_chosen(two: Outcomes) -> None:
    assert two.of(what_cannot_be)[0][-1].startswith("dispatcher 'deepep' needs the package deep_ep")


def test_results_outlive_the_buffers(two: Outcomes) -> None:
    assert two.of(results_that_outlive_the_buffers) == [[True] * 5] * 2


def test_too_many_rows_for_the_buffers_is_an_error_on_all_ranks(two: Outcomes) -> None:
    for message in two.of(overflow):
        assert "32 rows" in message
        assert "dispatch.capacity_factor" in message


def test_buffers_are_made_for_the_rank_with_the_most_tokens(two: Outcomes) -> None:
    for slots, errors, _, _ in two.of(sizes_of_ranks_differ):
        assert slots == 8
        assert errors == 1, "the first three dispatches fit"


def test_a_rank_that_outgrows_the_buffers_says_so_and_the_others_do_not_wait_for_it(two: Outcomes) -> None:
    (*_, other, waited), (*_, mine, _) = two.of(sizes_of_ranks_differ)
    assert "ConfigError a dispatch of 9 x 1 slots" in mine
    assert "max_tokens" in mine
    assert "RankFailure" in other
    assert "rank 0 waited for rank 1 on the device, which has failed" in other
    assert waited < 30, "of a timeout of 120 s"


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
