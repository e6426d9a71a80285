"""Rows of tokens through memory that ranks share, in Triton's interpreter: where they go, how they come back, and what
becomes of buffers that they do not fit.

Everything is compared with the dispatcher `all_to_all`, bit for bit where both add in the same order.
"""

import gc
import sys
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distributed import fake_deep_ep
from distributed.balance_rig import D, E
from distributed.parity import relative
from distributed.rig import Outcomes, run_scenarios
from distributed.symmetric_rig import make_space
from distributed.test_dispatch import ROUTINGS
from equipoise.dispatch import SymmetricDispatcher, build_dispatcher
from equipoise.distributed.mesh import Meshes, ParallelConfig
from equipoise.distributed.world import World
from equipoise.errors import ConfigError, RankFailure
from equipoise.kernels.triton_support import triton_problem

pytestmark = pytest.mark.skipif(triton_problem("cpu") is not None, reason="Triton's interpreter is off or missing")

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
    ]
    return Outcomes(run_scenarios, 2, scenarios, ParallelConfig(ep_size=2), E)


def test_rows_are_those_of_all_to_all(two: Outcomes) -> None:
    check_rows(two)


@pytest.mark.slow
def test_rows_of_four_ranks() -> None:
    check_rows(Outcomes(run_scenarios, 4, [dispatch_as_all_to_all], ParallelConfig(ep_size=4), E))


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
