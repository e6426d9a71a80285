"""Faults of others' MoE kernels, by their number in the list that they were collected in (SYMPTOMS.md, "Kernels").

Interpreted in FP32 where there is no GPU, compiled in BF16 where there is one, in the sizes of the reports.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from equipoise import kernels
from equipoise.kernels import tuning
from equipoise.kernels.grouped_gemm import dual_wgrad, triton_grouped_linear, triton_grouped_mlp
from equipoise.kernels.grouped_mlp import plain_grouped_mlp
from equipoise.kernels.permute import combine, make_permutation, permute
from equipoise.kernels.tiles import plain_tiles
from equipoise.kernels.triton_support import triton_problem

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
TOLERANCE = 1e-2 if ON_GPU else 2e-6
NAN = float("nan")

pytestmark = pytest.mark.skipif(triton_problem(DEVICE.type) is not None, reason=str(triton_problem(DEVICE.type)))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def close(value: torch.Tensor, reference: torch.Tensor) -> bool:
    difference = (value.double() - reference.double()).norm()
    return bool(difference <= TOLERANCE * reference.double().norm())


def weight_gradients(rows: torch.Tensor, grad: torch.Tensor, counts: Sequence[int]) -> list[torch.Tensor]:
    """Each expert's, in FP64."""
    total = sum(counts)
    parts = zip(grad[:total].double().split(list(counts)), rows[:total].double().split(list(counts)))
    return [g.T @ x for g, x in parts]


def test_k01_rows_of_nobody_reach_nothing_over_two_backwards() -> None:
    counts, total, tail, D, inner = [3, 0, 9], 12, 5, 24, 16
    rows = normal(total + tail, D)
    rows[total:] = NAN
    grad = normal(total + tail, D, seed=1)
    grad[total:] = NAN
    weights = normal(3, 2 * inner, D, seed=2), normal(3, D, inner, seed=3)
    inputs = [x.clone().requires_grad_() for x in (rows, *weights)]
    expected = [x.double().requires_grad_() for x in (rows[:total], *weights)]
    plain_grouped_mlp(*expected, torch.tensor(counts, device=DEVICE)).backward(grad[:total].double())
    out = triton_grouped_mlp(*inputs, torch.tensor(counts, device=DEVICE))
    for _ in range(2):
        made = torch.autograd.grad(out, inputs, grad, retain_graph=True)
        assert close(made[0][:total], expected[0].grad)
        assert close(made[1], expected[1].grad)
        assert close(made[2], expected[2].grad)


EMPTY = [[3, 0, 5, 0], [0, 0, 0, 0], [0, 4, 3, 2], [2, 0, 0, 6], [7, 1, 2, 0]]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("counts", [*EMPTY, [162, 0, 2577, 446, 0, 83]], ids=str)
def test_c11_k02_k03_k05_experts_without_rows_end_with_zeros(counts: list[int]) -> None:
    """cases.md C11: gradients are there and exactly 0, in memory that a run with full experts has left dirty."""
    K, N = (768, 2048) if max(counts) > 100 else (16, 8)
    if K > 16 and not ON_GPU:
        pytest.skip("the report's size is for a GPU")
    E, total = len(counts), sum(counts)
    for given in ([max(max(counts), 4)] * E, counts):
        rows, weight = normal(sum(given), K).requires_grad_(), normal(E, N, K, seed=1).requires_grad_()
        grad = normal(sum(given), N, seed=2)
        out = triton_grouped_linear(rows, weight, torch.tensor(given, device=DEVICE))
        out.backward(grad)
        if given != counts:
            for used in (weight.grad, rows.grad, out.detach()):
                used.fill_(NAN)
            del out, rows, weight, used
    assert out.shape == (total, N)
    assert rows.grad is not None
    assert rows.grad.shape == (total, K)
    for expert, reference in enumerate(weight_gradients(rows.detach(), grad, counts)):
        assert close(weight.grad[expert], reference)
        assert counts[expert] or (weight.grad[expert] == 0).all()
    for x, g, w in zip(rows.grad.split(counts), grad.split(counts), weight.detach()):
        assert close(x, g.double() @ w.double())


@pytest.mark.parametrize("backend", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_k04_a_rank_without_tokens_eager_and_compiled(backend: str) -> None:
    if backend == "inductor" and not ON_GPU:
        pytest.skip("needs a GPU")
    fn = (
        triton_grouped_mlp if backend == "eager" else torch.compile(triton_grouped_mlp, fullgraph=True, backend=backend)
    )
    inputs = [x.requires_grad_() for x in (normal(0, 24), normal(2, 16, 24), normal(2, 24, 8))]
    out = fn(*inputs, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    out.sum().backward()
    assert out.shape == (0, 24)
    assert inputs[0].grad.shape == (0, 24)
    assert all((x.grad == 0).all() for x in inputs[1:])


@pytest.mark.parametrize("total", [1, 7, 8, 9, 15, 17, 127, 129, pytest.param(16392, marks=pytest.mark.gpu)])
def test_k07_any_number_of_rows(total: int) -> None:
    """Totals whose strides are no multiples of 16 bytes, where rows are the contracted dimension."""
    if total > 1000 and not ON_GPU:
        pytest.skip("the report's size is for a GPU")
    counts = [total - total // 3, total // 3]
    rows, weight = normal(total, 24).requires_grad_(), normal(2, 16, 24, seed=1).requires_grad_()
    grad = normal(total, 16, seed=2)
    triton_grouped_linear(rows, weight, torch.tensor(counts, device=DEVICE)).backward(grad)
    for expert, reference in enumerate(weight_gradients(rows.detach(), grad, counts)):
        assert close(weight.grad[expert], reference)
    for x, g, w in zip(rows.grad.split(counts), grad.split(counts), weight.detach()):
        assert close(x, g.double() @ w.double())


@pytest.mark.parametrize("counts", [[1, 63, 65, 31, 7], [64, 1, 128, 1, 64], [130, 5, 3, 1, 66]], ids=str)
def test_k08_each_expert_is_right_at_offsets_that_are_no_multiples_of_64(counts: list[int]) -> None:
    """By each expert's own norm: one wrong expert among right ones hides in an absolute tolerance."""
    rows, grad = normal(sum(counts), 40), normal(sum(counts), 24, seed=1)
    rows[: counts[0]] *= 100  # what leaks from here into others would not pass
    tiles = plain_tiles(torch.tensor(counts, device=DEVICE), 3, sum(counts), tuning.block_rows(DEVICE))
    held = torch.zeros(2, 24, 40, device=DEVICE)
    made = [*dual_wgrad(grad, rows, tiles, 3, torch.float32, held), *held]
    assert all(close(value, reference) for value, reference in zip(made, weight_gradients(rows, grad, counts)))


def test_k10_k12_k13_no_kernel_asks_for_what_breaks_in_triton() -> None:
    """Descriptors made inside of kernels, scratch memory from a replaceable allocator, warp specialisation by the
    compiler, and tuning at run time, which would add to what is there as often as it measures."""
    asks = re.compile(r"make_tensor_descriptor|set_allocator|warp_specialize\s*=|autotune\(|@\w*\.?heuristics")
    sources = sorted(Path(kernels.__file__).parent.glob("*.py"))
    assert len(sources) > 15
    assert [path.name for path in sources if asks.search(path.read_text())] == []


def test_k13_the_first_call_adds_as_later_ones_do() -> None:
    """A width that nobody used before: what happens at a first call happens here."""
    counts, K = [5, 20, 7], 88
    rows, grad = normal(32, K), normal(32, 24, seed=1)
    tiles = plain_tiles(torch.tensor(counts, device=DEVICE), 1, 32, tuning.block_rows(DEVICE))
    held = [torch.full((2, 24, K), 3.0, device=DEVICE) for _ in range(3)]
    masters = [dual_wgrad(grad, rows, tiles, 1, torch.float32, buffer, add=True) for buffer in held]
    assert close(held[0] - 3, torch.stack(weight_gradients(rows, grad, counts)[1:]))
    for repeat in (1, 2):
        assert torch.equal(held[0], held[repeat])
        assert torch.equal(masters[0], masters[repeat])


def test_k14_permuting_and_combining_repeat_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    T, K, D, E = (4096, 8, 1024, 64) if ON_GPU else (33, 8, 24, 12)
    ids = torch.rand(T, E, generator=generator).argsort(-1)[:, :K].int().to(DEVICE)
    x, weights = normal(T, D), torch.rand(T, K, generator=generator).to(DEVICE)
    grad = normal(T, D, seed=1)
    results = []
    for _ in range(20):
        inputs = x.clone().requires_grad_(), weights.clone().requires_grad_()
        permutation = make_permutation(ids, E)
        y = combine(permute(inputs[0], permutation), inputs[1], permutation)
        y.backward(grad)
        results.append((y.detach(), *(i.grad for i in inputs)))
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result))


@pytest.mark.gpu
@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_c15_permuting_past_two_to_the_31_elements_on_a_gpu() -> None:
    """cases.md C15 by the kernels: 299,600 rows of width 7,168; the last are those of index_select, both ways."""
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free GPU memory")
    T, K, D, late = 37_450, 8, 7168, slice(-10, None)
    x, grad = (torch.randint(-8, 9, (T, D), device=DEVICE).to(DTYPE) for _ in range(2))
    x.requires_grad_()
    ids = torch.arange(T * K, dtype=torch.int32, device=DEVICE).view(T, K).remainder(8)
    permutation = make_permutation(ids, 8)
    token_R = permutation.token_R.long()
    rows = permute(x, permutation)
    assert rows.numel() > 2**31
    assert torch.equal(rows[late], x.detach().index_select(0, token_R[late]))
    y = combine(rows.detach(), torch.ones(T, K, device=DEVICE), permutation, torch.float32)
    assert torch.equal(y[late], 8 * x.detach()[late].float())
    rows.backward(grad.index_select(0, token_R))
    assert torch.equal(x.grad[late], 8 * grad[late])
