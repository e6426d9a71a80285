"""Grouped products over masters and replicas, and SwiGLU experts, against FP64 on values and every gradient.

Interpreted in FP32 where there is no GPU, compiled in BF16 where there is one.
"""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from equipoise.errors import ConfigError
from equipoise.kernels import grouped_gemm, tuning
from equipoise.kernels.grouped_gemm import (
    dual_dgrad,
    dual_forward,
    dual_swiglu_backward,
    dual_swiglu_forward,
    dual_wgrad,
    run_wgrad,
    triton_grouped_linear,
    triton_grouped_mlp,
    weighted_swiglu_backward,
)
from equipoise.kernels.grouped_linear import choose_grouped_linear
from equipoise.kernels.grouped_mlp import grouped_mlp, plain_grouped_mlp
from equipoise.kernels.tiles import Tiles, plain_tiles
from equipoise.kernels.triton_support import triton_problem

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 1e-2 if torch.bfloat16 == DTYPE else 2e-6
NAN = float("nan")

pytestmark = pytest.mark.skipif(triton_problem(DEVICE.type) is not None, reason=str(triton_problem(DEVICE.type)))

COUNTS = [
    [0, 0, 0],
    [1, 0, 0],
    [0, 33, 0],
    [0, 0, 8],
    [0, 7, 1],
    [17, 0, 9],
    [15, 129, 0],
    [127, 8, 3],
]
"""Rows of two masters and one replica; with 16-row tiles (and 128-row ones) full, cut and empty."""


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def close(value: torch.Tensor, reference: torch.Tensor) -> bool:
    difference = (value.double() - reference.double()).norm()
    return bool(difference <= TOLERANCE * reference.double().norm())


def make_tiles(counts: list[int], num_masters: int, num_rows: int) -> Tiles:
    return plain_tiles(torch.tensor(counts, device=DEVICE), num_masters, num_rows, tuning.block_rows(DEVICE))


def poisoned(total: int, tail: int, width: int, seed: int) -> torch.Tensor:
    rows = normal(total + tail, width, seed=seed)
    rows[total:] = NAN
    return rows


@pytest.fixture(autouse=True)
def dirty_memory() -> None:
    """Freed blocks full of NaN, so that what is never written shows."""
    for size in (16 * 24, 2 * 32 * 24, 48 * 24):
        torch.full((size,), NAN, device=DEVICE, dtype=DTYPE)


@pytest.fixture(params=["descriptors", "pointers"])
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    from equipoise.kernels import grouped_launch_triton

    if request.param == "pointers":
        monkeypatch.setattr(grouped_launch_triton, "can_describe", lambda *tensors: False)
    elif not grouped_launch_triton.has_descriptors(DEVICE):
        pytest.skip("no descriptors on this device")
    return request.param


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_products_and_gradients_of_masters_and_replicas(form: str, counts: list[int]) -> None:
    """cases.md C11; rows past the counted ones are NaN and reach nothing; replicas' gradients add to what is there."""
    N, K, M, total, tail = 40, 24, 2, sum(counts), 3
    rows, grad = poisoned(total, tail, K, 1), poisoned(total, tail, N, 2)
    masters, slots = normal(M, N, K, seed=3), normal(1, N, K, seed=4)
    tiles = make_tiles(counts, M, total + tail)
    held = torch.full((1, N, K), 2.0, device=DEVICE)
    out, grad_rows = dual_forward(rows, masters, slots, tiles), dual_dgrad(grad, masters, slots, tiles)
    for _ in range(2):  # a second backward, whose unowned rows hold what the first one left
        grad_masters = dual_wgrad(grad, rows, tiles, M, torch.float32, held, add=True)
    first = 0
    for expert, (count, weight) in enumerate(zip(counts, torch.cat([masters, slots]).double())):
        x, g = rows[first : first + count].double(), grad[first : first + count].double()
        assert close(out[first : first + count], x @ weight.T)
        assert close(grad_rows[first : first + count], g @ weight)
        wanted = g.T @ x
        if expert < M:
            assert close(grad_masters[expert], wanted)
        else:
            assert close(held[expert - M], 2 + 2 * wanted)
        if count == 0 and expert < M:
            assert (grad_masters[expert] == 0).all()
        first += count


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_swiglu_experts_of_masters_and_replicas(form: str, counts: list[int]) -> None:
    D, inner, M, total, tail = 24, 16, 2, sum(counts), 3
    rows, grad = poisoned(total, tail, D, 1), poisoned(total, tail, D, 2)
    gate_up, down = normal(3, 2 * inner, D, seed=3), normal(3, D, inner, seed=4)
    tiles = make_tiles(counts, M, total + tail)
    act, hidden = dual_swiglu_forward(rows, gate_up[:M], gate_up[M:].clone(), tiles)
    grad_hidden, act_again = dual_swiglu_backward(grad, down[:M], down[M:].clone(), hidden, tiles)
    first = 0
    for count, up_weight, down_weight in zip(counts, gate_up.double(), down.double()):
        part = slice(first, first + count)
        expected = (rows[part].double() @ up_weight.T).requires_grad_()
        gate, up = expected.chunk(2, dim=-1)
        value = F.silu(gate) * up
        value.backward(grad[part].double() @ down_weight)
        assert close(hidden[part], expected.detach())
        assert close(act[part], value.detach())
        assert close(act_again[part], value.detach())
        assert close(grad_hidden[part], expected.grad)
        first += count


@pytest.mark.parametrize("counts", [*COUNTS[1:5], COUNTS[6]], ids=str)
def test_replicas_that_arrive_behind_the_masters_product_give_the_same_bits(form: str, counts: list[int]) -> None:
    inner, M, total = 16, 2, sum(counts)
    rows, weights = poisoned(total, 3, 24, 1), normal(3, 2 * inner, 24, seed=3)
    tiles, slots, calls = make_tiles(counts, M, total + 3), torch.full_like(weights[M:], NAN), []

    def arrive() -> None:
        slots.copy_(weights[M:])
        calls.append(1)

    whole = dual_swiglu_forward(rows, weights[:M], weights[M:].clone(), tiles)
    parts = dual_swiglu_forward(rows, weights[:M], slots, tiles, [arrive])
    assert calls == [1]
    for of_parts, of_whole in zip(parts, whole):
        assert torch.equal(of_parts[:total], of_whole[:total])


@pytest.mark.parametrize("counts", [[5, 40, 17, 0, 33], [0, 0, 1, 0, 0], [3, 2, 0, 21, 0], [0, 9, 0, 0, 64]], ids=str)
def test_replicas_that_arrive_in_two_parts_give_the_same_bits(form: str, counts: list[int]) -> None:
    """Forward and backward, with two masters and three slots: two and one. What has not arrived is NaN."""
    inner, M, total = 16, 2, sum(counts)
    rows, gate_up, down = poisoned(total, 3, 24, 1), normal(5, 2 * inner, 24, seed=3), normal(5, 24, inner, seed=4)
    tiles, grad, weights_R = make_tiles(counts, M, total + 3), poisoned(total, 3, 24, 5), normal(total + 3).float()

    def arriving(weights: torch.Tensor) -> tuple[torch.Tensor, list]:
        slots = torch.full_like(weights[M:], NAN)
        copy = lambda part: slots[part].copy_(weights[M:][part])  # noqa: E731
        return slots, [lambda: copy(slice(0, 2)), lambda: copy(slice(2, 3))]

    def same(parts: tuple[torch.Tensor, ...], whole: tuple[torch.Tensor, ...]) -> bool:
        return all(torch.equal(a[:total], b[:total]) for a, b in zip(parts, whole, strict=True))

    whole = dual_swiglu_forward(rows, gate_up[:M], gate_up[M:].clone(), tiles)
    slots, arrivals = arriving(gate_up)
    assert same(dual_swiglu_forward(rows, gate_up[:M], slots, tiles, arrivals), whole)
    for given, backward in (((), dual_swiglu_backward), ((weights_R,), weighted_swiglu_backward)):
        slots, arrivals = arriving(down)
        before = whole[1].clone(), *given, tiles
        parts = backward(grad, down[:M], slots, *before, arrivals)
        assert same(parts, backward(grad, down[:M], down[M:].clone(), *before))


def test_slots_are_waited_for_without_rows_too() -> None:
    calls = []
    weights = normal(2, 32, 24)
    dual_swiglu_forward(normal(0, 24), weights[:1], weights[1:], make_tiles([0, 0], 1, 0), [lambda: calls.append(1)])
    assert calls == [1]


@pytest.mark.parametrize("add", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("num_rows", [0, 9])
def test_replica_gradients_add_or_replace(add: bool, dtype: torch.dtype, num_rows: int) -> None:
    rows, grad = normal(num_rows, 24), normal(num_rows, 16)
    held = torch.full((2, 16, 24), 3.0, device=DEVICE)
    tiles = make_tiles([0, 0, num_rows], 1, num_rows)
    masters = dual_wgrad(grad, rows, tiles, 1, dtype, held, add)
    assert masters.dtype == dtype
    assert (masters == 0).all()
    assert (held[0] == (3 if add else 0)).all()
    assert close(held[1], (3 if add else 0) + grad.double().T @ rows.double())


@pytest.mark.parametrize("form", ["", "snake", "grouped_mm"])
@pytest.mark.parametrize("counts", [[0, 0, 0, 0], [17, 0, 9, 0], [0, 8, 3, 50], [33, 70, 16, 1]], ids=str)
@pytest.mark.parametrize("descriptors", [True, False])
def test_weight_gradients_in_every_form_of_the_table(form: str, counts: list[int], descriptors: bool) -> None:
    """Slots' tiles between masters', or masters by `grouped_mm`."""
    N, K, total, M = 40, 24, sum(counts), 2
    rows, grad = poisoned(total, 3, K, 1), poisoned(total, 3, N, 2)
    tiles, held = make_tiles(counts, M, total + 3), torch.full((2, N, K), 2.0, device=DEVICE)
    block = tuning.INTERPRETED if DEVICE.type == "cpu" else tuning.Block()
    block = replace(block, **dict.fromkeys(form.split(), True))
    tables = tiles.offsets_L1, tiles.order_L
    masters = run_wgrad(grad, rows, held, *tables, M, DTYPE, block, True, descriptors)
    alone = run_wgrad(
        grad, rows, None, tiles.offsets_L1[: M + 1], tiles.order_L[:M], M, DTYPE, block, True, descriptors
    )
    assert torch.equal(masters, alone)
    for expert, (g, x) in enumerate(zip(grad[:total].double().split(counts), rows[:total].double().split(counts))):
        assert close(masters[expert] if expert < M else held[expert - M] - 2, g.T @ x)
        if expert < M and counts[expert] == 0:
            assert (masters[expert] == 0).all()


def test_every_tile_is_dealt_once_and_slots_evenly(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many programs there are: a slot's tile that is dealt twice, or any that never is, makes a wrong sum."""
    from equipoise.kernels import grouped_launch_triton

    counts, N, K = [5, 2, 0, 7, 1, 3], 40, 24
    rows, grad, weight = normal(18, K), normal(18, N, seed=1), normal(6, N, K, seed=2)
    products = torch.cat([x @ w.T for x, w in zip(rows.double().split(counts), weight.double())])
    for lanes, levels, slices in ((1, 1, 2), (5, 1, 2), (13, 1, 2), (1, 4, 1), (2, 9, 3), (5, 3, 2)):
        dealt = grouped_launch_triton.Division(lanes, levels, slices)
        monkeypatch.setattr(grouped_launch_triton, "divide", lambda *launch, dealt=dealt: dealt)
        for M in (1, 4):
            tiles, held = make_tiles(counts, M, 18), torch.zeros(6 - M, N, K, device=DEVICE)
            made = [*dual_wgrad(grad, rows, tiles, M, torch.float32, held, add=True), *held]
            for value, g, x in zip(made, grad.double().split(counts), rows.double().split(counts)):
                assert close(value, g.T @ x), (lanes, levels, slices, M)
            out = dual_forward(rows, weight[:M], weight[M:].clone(), tiles)
            assert close(out, products), (lanes, levels, slices, M)


def test_work_is_divided_where_other_ranks_may_be_at_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    from equipoise.kernels import grouped_launch_triton
    from equipoise.kernels.tuning import Block

    block, launched = Block(), []
    monkeypatch.setattr(grouped_launch_triton, "num_multiprocessors", lambda device: 132)
    divide = lambda tiles, has_slots=True: grouped_launch_triton.divide(DEVICE, block, tiles, has_slots)  # noqa: E731
    assert divide(10_000) == (132, 1, 1), "no other ranks"
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
    turns = (0, 1, 3, 8, 31, 62, 10_000)
    assert [divide(132 * n)[1:] for n in turns] == [(1, 1), (1, 1), (2, 1), (5, 4), (9, 8), (10, 8), (12, 8)]
    assert divide(10_000, has_slots=False) == (132, 1, 1)
    monkeypatch.setattr(grouped_launch_triton, "num_multiprocessors", lambda device: 1)
    real = grouped_launch_triton.divide
    monkeypatch.setattr(grouped_launch_triton, "divide", lambda *given: launched.append(real(*given)) or launched[-1])
    counts, N, K = [40, 2, 0, 37], 40, 24
    rows, weight = normal(79, K), normal(4, N, K, seed=1)
    grad, held = normal(79, N, seed=2), torch.zeros(1, N, K, device=DEVICE)
    tiles = make_tiles(counts, 3, 79)
    out = dual_forward(rows, weight[:3], weight[3:].clone(), tiles)
    assert close(out, torch.cat([x @ w.T for x, w in zip(rows.double().split(counts), weight.double())]))
    made = [*dual_wgrad(grad, rows, tiles, 3, torch.float32, held, add=True), *held]
    for value, g, x in zip(made, grad.double().split(counts), rows.double().split(counts)):
        assert close(value, g.T @ x)
    assert min(division.levels for division in launched) > 1, launched


def test_slots_without_gradients_are_left_out() -> None:
    """Tables cover the slots, nobody gave a buffer for them: only masters' gradients are made."""
    rows, grad = normal(20, 24), normal(20, 16)
    tiles = make_tiles([3, 0, 17], 2, 20)
    masters = dual_wgrad(grad, rows, tiles, 2)
    assert close(masters[0], grad[:3].double().T @ rows[:3].double())
    assert (masters[1] == 0).all()


def test_bias_of_masters_and_replicas(form: str) -> None:
    rows, weight, bias = normal(20, 24), normal(3, 40, 24, seed=1), normal(3, 40, seed=2)
    counts = [3, 0, 17]
    out = dual_forward(rows, weight[:2], weight[2:].clone(), make_tiles(counts, 2, 20), bias[:2], bias[2:].clone())
    expert_R = torch.repeat_interleave(torch.arange(3), torch.tensor(counts)).to(DEVICE)
    products = torch.einsum("rk,rnk->rn", rows.double(), weight[expert_R].double())
    assert close(out, products + bias[expert_R].double())


def test_slots_may_lie_apart(form: str) -> None:
    """Slots are parts of a buffer that holds other weights between them."""
    rows, weight = normal(20, 24), normal(1, 16, 24, seed=1)
    buffer = torch.full((2, 16 * 24 + 64), NAN, device=DEVICE, dtype=DTYPE)
    slots = buffer[:, : 16 * 24].unflatten(1, (16, 24))
    slots.copy_(normal(2, 16, 24, seed=2))
    out = dual_forward(rows, weight, slots, make_tiles([3, 8, 9], 1, 20))
    assert close(out[3:11], rows[3:11].double() @ slots[0].double().T)
    assert close(out[11:], rows[11:].double() @ slots[1].double().T)


@pytest.mark.parametrize(("N", "K"), [(12, 17), (7, 24), (24, 7), (1, 1)])
def test_widths_that_descriptors_cannot_hold(N: int, K: int) -> None:
    rows, weight = normal(9, K).requires_grad_(), normal(2, N, K, seed=1).requires_grad_()
    grad = normal(9, N, seed=2)
    out = triton_grouped_linear(rows, weight, torch.tensor([8, 1], device=DEVICE))
    out.backward(grad)
    assert close(out[:8], rows[:8].double() @ weight[0].double().T)
    assert close(weight.grad[1], grad[8:].double().T @ rows[8:].double())
    assert close(rows.grad[8:], grad[8:].double() @ weight[1].double())


@pytest.mark.parametrize("kind", ["expanded", "transposed"])
def test_gradients_that_are_not_contiguous(kind: str) -> None:
    counts = torch.tensor([4, 0, 5], device=DEVICE)
    weights = normal(3, 16, 24, seed=1), normal(3, 24, 8, seed=2)
    grads = []
    for fn, dtype in ((triton_grouped_mlp, DTYPE), (plain_grouped_mlp, torch.float64)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in (normal(9, 24), *weights)]
        out = fn(*inputs, counts)
        if kind == "expanded":
            out.sum().backward()
        else:
            out.backward(normal(24, 9, seed=3).t().to(dtype))
        grads.append([x.grad for x in inputs])
    assert all(close(value, reference) for value, reference in zip(*grads))


@pytest.mark.parametrize("inner", [8, 300])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_rows_with_weights(counts: list[int], inner: int) -> None:
    """Outputs, the weights' gradient and all others; rows behind the last belong to nobody, and 0 is a weight."""
    total, counts_E = sum(counts), torch.tensor(counts, device=DEVICE)
    values = [normal(total + 3, 24), normal(3, 2 * inner, 24, seed=1), normal(3, 24, inner, seed=2)]
    weights = torch.rand(total + 3, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    weights[::4] = 0
    grad = poisoned(total, 3, 24, seed=4)
    found = []
    for fn, dtype in ((triton_grouped_mlp, DTYPE), (plain_grouped_mlp, torch.float64)):
        inputs = [x.to(dtype, copy=True).requires_grad_() for x in values]
        weights_R = weights.to(torch.float32 if dtype == DTYPE else dtype, copy=True).requires_grad_()
        out = fn(*inputs, counts_E, weights_R=weights_R)
        out[:total].backward(grad[:total].to(dtype)) if fn is plain_grouped_mlp else out.backward(grad)
        assert (weights_R.grad[total:] == 0).all()
        found.append([out[:total], inputs[0].grad[:total], *(x.grad for x in inputs[1:]), weights_R.grad])
    assert found[0][-1].dtype == torch.float32
    assert all(close(value, reference) for value, reference in zip(*found))


def test_frozen_weights_get_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = normal(9, 24).requires_grad_()
    gate_up, down, counts = normal(2, 16, 24, seed=1), normal(2, 24, 8, seed=2), torch.tensor([4, 5], device=DEVICE)
    monkeypatch.setattr(grouped_gemm, "dual_wgrad", None)
    triton_grouped_mlp(rows, gate_up, down, counts).sum().backward()
    expected = rows.detach().double().requires_grad_()
    plain_grouped_mlp(expected, gate_up.double(), down.double(), counts).sum().backward()
    assert close(rows.grad, expected.grad)


def saved_bytes(fn, *inputs) -> int:
    own = {x.untyped_storage().data_ptr() for x in inputs[1:]}
    kept: dict[int, int] = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in own and x.is_floating_point():
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = fn(*inputs)
    del out
    return sum(kept.values())


def test_saved_activations_are_three_quarters_of_the_unfused_ones() -> None:
    inputs = [normal(9, 32), normal(2, 48, 32, seed=1), normal(2, 32, 24, seed=2)]
    inputs = [x.requires_grad_() for x in inputs]
    counts = torch.tensor([4, 5], device=DEVICE)
    assert saved_bytes(triton_grouped_mlp, *inputs, counts) <= 0.75 * saved_bytes(plain_grouped_mlp, *inputs, counts)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("num_rows", [0, 9])
def test_compiles_whole(num_rows: int, weighted: bool) -> None:
    counts = torch.tensor([num_rows, 0], device=DEVICE)
    compiled = torch.compile(triton_grouped_mlp, fullgraph=True, backend="aot_eager")
    results = []
    for fn in (triton_grouped_mlp, compiled):
        inputs = [normal(num_rows, 24), normal(2, 16, 24, seed=1), normal(2, 24, 8, seed=2)]
        inputs = [x.requires_grad_() for x in inputs]
        weights = torch.linspace(0.1, 1, num_rows, device=DEVICE).requires_grad_()
        out = fn(*inputs, counts, weights_R=weights if weighted else None)
        out.sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)] + ([weights.grad] if weighted else []))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert (results[1][2][1] == 0).all()


def test_operators_keep_their_contracts() -> None:
    tiles = make_tiles([4, 5], 1, 9)
    tables = (*tiles[:5], tiles.block_rows)
    rows, gate_up, down = normal(9, 24), normal(2, 16, 24, seed=1), normal(2, 24, 8, seed=2)
    ops, slots, weights = torch.ops.equipoise, torch.zeros(1, 16, 24, device=DEVICE), torch.rand(9, device=DEVICE)
    calls = (
        (ops.dual_gemm, (rows, gate_up[:1], gate_up[1:].clone(), None, None, *tables, True)),
        (ops.dual_gemm, (normal(9, 16), gate_up[:1], gate_up[1:].clone(), None, None, *tables, False)),
        (ops.dual_wgrad, (normal(9, 16), rows, slots, tiles.offsets_L1, tiles.order_L, 1, torch.float32, True)),
        (ops.dual_swiglu_forward, (rows, gate_up[:1], gate_up[1:].clone(), None, *tables)),
        (ops.dual_swiglu_forward, (rows, gate_up[:1], gate_up[1:].clone(), weights, *tables)),
        (ops.dual_swiglu_backward, (rows, down[:1], down[1:].clone(), normal(9, 16), None, *tables)),
        (ops.dual_swiglu_backward, (rows, down[:1], down[1:].clone(), normal(9, 16), weights, *tables)),
    )
    for op, arguments in calls:
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_weights_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="slots are"):
        dual_forward(normal(4, 24), normal(1, 16, 24), normal(1, 8, 24), make_tiles([2, 2], 1, 4))


def test_choice_by_name() -> None:
    choice = choose_grouped_linear(DEVICE, DTYPE, "triton")
    assert choice.fn is triton_grouped_linear
    inputs = normal(9, 24), normal(2, 16, 24, seed=1), normal(2, 24, 8, seed=2), torch.tensor([4, 5], device=DEVICE)
    assert torch.equal(grouped_mlp(*inputs, kernel="triton"), triton_grouped_mlp(*inputs))


def test_choice_without_triton_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "equipoise.kernels.grouped_linear.triton_problem", lambda device_type: "triton is not installed"
    )
    choose_grouped_linear.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"'triton' cannot be used: triton is not installed. Use auto or loop"):
            choose_grouped_linear(DEVICE, DTYPE, "triton")
    finally:
        choose_grouped_linear.cache_clear()
