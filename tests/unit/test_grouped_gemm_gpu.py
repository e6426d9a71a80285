"""What only compiled kernels can show: repeatability, threads, graphs, sizes past 32 bits, others' allocators."""

import threading

import pytest
import torch

from equipoise.kernels.grouped_gemm import dual_dgrad, dual_forward, dual_wgrad, triton_grouped_mlp
from equipoise.kernels.grouped_mlp import plain_grouped_mlp
from equipoise.kernels.tiles import plain_tiles
from equipoise.kernels.triton_support import triton_problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.skipif(triton_problem("cuda") is not None, reason="needs Triton"),
]
COUNTS = [300, 0, 1, 129, 513]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def mlp_inputs(num_rows: int = sum(COUNTS), D: int = 256, inner: int = 192) -> list[torch.Tensor]:
    torch.manual_seed(0)
    inputs = [normal(num_rows, D), normal(len(COUNTS), 2 * inner, D) * D**-0.5, normal(len(COUNTS), D, inner)]
    return [x.requires_grad_() for x in inputs]


def gradients(fn, inputs: list[torch.Tensor], counts: torch.Tensor) -> list[torch.Tensor]:
    out = fn(*inputs, counts)
    return [out.detach(), *torch.autograd.grad(out, inputs, out.detach())]


def close(value: torch.Tensor, reference: torch.Tensor, tolerance: float = 1e-2) -> bool:
    return bool((value.double() - reference.double()).norm() <= tolerance * reference.double().norm())


def test_equal_bits_over_twenty_repeats() -> None:
    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    first = gradients(triton_grouped_mlp, inputs, counts)
    for _ in range(20):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(triton_grouped_mlp, inputs, counts)))


def test_experts_against_fp64() -> None:
    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    values = gradients(triton_grouped_mlp, inputs, counts)
    references = gradients(plain_grouped_mlp, [x.detach().double().requires_grad_() for x in inputs], counts)
    for value, reference in zip(values[:2], references[:2]):
        assert close(value, reference)
    for value, reference in zip(values[2:], references[2:]):
        for expert, count in enumerate(COUNTS):  # one wrong expert must not hide among right ones
            assert close(value[expert], reference[expert]) if count else (value[expert] == 0).all()


def test_first_call_in_a_thread_of_its_own() -> None:
    """Neither launches nor autograd's threads depend on state that another thread set."""
    inputs, counts, results = mlp_inputs(D=320), torch.tensor(COUNTS, device="cuda"), []
    thread = threading.Thread(target=lambda: results.append(gradients(triton_grouped_mlp, inputs, counts)))
    thread.start()
    thread.join(timeout=120)
    assert results
    assert all(torch.equal(a, b) for a, b in zip(results[0], gradients(triton_grouped_mlp, inputs, counts)))


def test_k11_a_backward_alone_in_a_thread_of_its_own() -> None:
    """Widths that no forward has used: the first launch of all is a gradient's."""
    counts = [130, 0, 70]
    rows, grad, weight = normal(200, 448), normal(200, 320), normal(3, 320, 448)
    tiles, results = plain_tiles(torch.tensor(counts, device="cuda"), 3, 200, 128), []

    def backward() -> None:
        results.extend((dual_dgrad(grad, weight, None, tiles), dual_wgrad(grad, rows, tiles, 3)))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join(timeout=120)
    assert close(results[0][:130], grad[:130].double() @ weight[0].double())
    assert close(results[1][2], grad[130:].double().T @ rows[130:].double())


def test_after_a_kernel_that_changes_tritons_allocator() -> None:
    import triton

    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    expected = gradients(triton_grouped_mlp, inputs, counts)

    def refuse(size: int, alignment: int, stream: int | None) -> torch.Tensor:
        raise AssertionError("the grouped kernels need no scratch memory of Triton's")

    triton.set_allocator(refuse)
    assert all(torch.equal(a, b) for a, b in zip(expected, gradients(triton_grouped_mlp, inputs, counts)))


def test_captured_graph_follows_changing_counts() -> None:
    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    gradients(triton_grouped_mlp, inputs, counts)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(triton_grouped_mlp, inputs, counts)
    for changed in (COUNTS[::-1], [0, 0, 0, 0, 943], [0, 100, 0, 0, 0], [0] * 5):
        counts.copy_(torch.tensor(changed))
        graph.replay()
        total = sum(changed)
        for index, (value, fresh) in enumerate(zip(captured, gradients(triton_grouped_mlp, inputs, counts))):
            # Unowned rows of the output are unspecified, so their "gradient" cannot be compared.
            assert torch.equal(value[:total] if index < 2 else value, fresh[:total] if index < 2 else fresh)


def test_no_host_sync() -> None:
    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    gradients(triton_grouped_mlp, inputs, counts)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError):  # the mode notices
            counts.sum().item()
        gradients(triton_grouped_mlp, inputs, counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_compiled_by_inductor() -> None:
    inputs, counts = mlp_inputs(), torch.tensor(COUNTS, device="cuda")
    compiled = torch.compile(triton_grouped_mlp, fullgraph=True)
    expected, values = (gradients(fn, inputs, counts) for fn in (triton_grouped_mlp, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, values))


@pytest.mark.parametrize("what", ["activations", "weights"])
def test_more_than_two_to_the_31_elements(what: str) -> None:
    """The last rows, or the last expert, lie past what 32 bits can count."""
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory")
    N, K = (256, 8192) if what == "activations" else (4096, 4096)
    num_rows, num_experts = (2**31 // K + 500, 2) if what == "activations" else (512, 130)
    rows = torch.zeros(num_rows, K, device="cuda", dtype=torch.bfloat16)
    rows[-300:] = normal(300, K)
    weight = torch.zeros(num_experts, N, K, device="cuda", dtype=torch.bfloat16)
    weight[-1] = normal(N, K) * K**-0.5
    counts = torch.zeros(num_experts, dtype=torch.int64)
    counts[0], counts[-1] = num_rows - 300, 300
    tiles = plain_tiles(counts.cuda(), num_experts, num_rows, 128)
    out = dual_forward(rows, weight, None, tiles)
    assert close(out[-300:], rows[-300:].double() @ weight[-1].double().T)
    grad = torch.zeros(num_rows, N, device="cuda", dtype=torch.bfloat16)
    grad[-300:] = normal(300, N)
    del out
    assert close(dual_dgrad(grad, weight, None, tiles)[-300:], grad[-300:].double() @ weight[-1].double())
    made = dual_wgrad(grad, rows, tiles, num_experts)
    assert close(made[-1], grad[-300:].double().T @ rows[-300:].double())
    assert (made[0] == 0).all()


@pytest.mark.parametrize("what", ["forward", "wgrad"])
def test_slightly_uneven_loads_cost_no_more_than_even_ones(what: str) -> None:
    from equipoise.bench.kernel_timing import interleaved_medians

    x, grad, weight = normal(16 * 1000, 2048), normal(16 * 1000, 1536), normal(16, 1536, 2048)
    works = {}
    for name, counts in (("even", [1000] * 16), ("uneven", [1000 + d * 20 for d in (-1, 1) * 8])):
        tiles = plain_tiles(torch.tensor(counts, device="cuda"), 16, 16 * 1000, 128)
        works[name] = {
            "forward": lambda tiles=tiles: dual_forward(x, weight, None, tiles),
            "wgrad": lambda tiles=tiles: dual_wgrad(grad, x, tiles, 16),
        }[what]
    ms = interleaved_medians(works, rounds=30)
    assert ms["uneven"] < 1.03 * ms["even"]
