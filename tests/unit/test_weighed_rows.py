"""A layer whose experts multiply by the rows' weights, against one whose dispatcher does, on values and gradients."""

import pytest
import torch
from torch import nn

from equipoise.accelerator import CPUAccelerator
from equipoise.dispatch import LocalDispatcher
from equipoise.dispatch.config import DispatchConfig
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
from equipoise.kernels.grouped_mlp import grouped_mlp
from equipoise.kernels.triton_support import triton_problem
from equipoise.models.config import ModelConfig
from equipoise.models.model import MoEForCausalLM
from equipoise.models.parallelize import build_parallel_model
from equipoise.moe.experts import ExpertKernel, Experts
from equipoise.moe.layer import MoELayer
from equipoise.moe.router import Router, RouterConfig
from equipoise.train.step import moe_layers

E, D, K, INNER = 4, 32, 2, 24
needs_interpreter = pytest.mark.skipif(triton_problem("cpu") is not None, reason=str(triton_problem("cpu")))


def run(weighs_rows: bool, kernel: ExpertKernel, tokens: int) -> list[torch.Tensor]:
    """Output and gradients of the input, the router and the experts; the last token is padding."""
    config = RouterConfig(hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True)
    layer = MoELayer(Router(config), Experts(E, D, INNER, kernel), None, LocalDispatcher(E, weighs_rows))
    generator = torch.Generator().manual_seed(1)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3, generator=generator)
    x_BSD = torch.randn(1, tokens, D, generator=generator).requires_grad_()
    valid_BS = torch.arange(tokens)[None] < max(tokens - 1, 1)
    y_BSD, _ = layer(x_BSD, valid_BS)
    y_BSD.backward(torch.randn(y_BSD.shape, generator=generator))
    return [y_BSD.detach(), x_BSD.grad, *(p.grad for p in layer.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("kernel", ["loop", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("tokens", [1, 9])
def test_same_layer(kernel: ExpertKernel, tokens: int) -> None:
    for value, reference in zip(run(True, kernel, tokens), run(False, "loop", tokens)):
        torch.testing.assert_close(value, reference, rtol=1e-4, atol=1e-5)


IDS = {
    "no token": [],
    "nobody": [[-1, -1], [-1, -1]],
    "some": [[-1, 2], [3, -1], [-1, -1], [0, 3]],
    "all to one": [[1, -1]] * 5,
}


@pytest.mark.parametrize("kernel", ["loop", pytest.param("triton", marks=needs_interpreter)])
@pytest.mark.parametrize("name", IDS)
def test_awkward_rows_against_float64(kernel: ExpertKernel, name: str) -> None:
    """Slots without an expert have NaN for a weight, and no part in anything."""
    ids_TK = torch.tensor(IDS[name], dtype=torch.int32).view(-1, K)
    T, generator = len(ids_TK), torch.Generator().manual_seed(2)
    make = lambda *shape: torch.randn(shape, generator=generator) * 0.5  # noqa: E731
    values = make(T, D), make(T, K), make(E, 2 * INNER, D), make(E, D, INNER)
    gradient = make(T, D)
    x, weights, up, down = (value.double().requires_grad_() for value in values)
    want = torch.zeros(T, D, dtype=torch.float64)
    for token, slots in enumerate(ids_TK.tolist()):
        for k, expert in enumerate(slots):
            if expert >= 0:
                gate, linear = (up[expert] @ x[token]).chunk(2)
                out = weights[token, k] * (down[expert] @ (nn.functional.silu(gate) * linear))
                want = want.index_add(0, torch.tensor([token]), out[None])
    if want.requires_grad:
        want.backward(gradient.double())
    given = [value.clone().requires_grad_() for value in values]
    with torch.no_grad():
        given[1][ids_TK < 0] = float("nan")
    dispatcher = LocalDispatcher(E, weighs_rows=True)
    arrived = dispatcher.dispatch(given[0], ids_TK, given[1])
    rows = grouped_mlp(arrived.rows_RD, given[2], given[3], arrived.counts_M, kernel, weights_R=arrived.weights_R)
    got = dispatcher.combine(rows, arrived.handle)
    got.backward(gradient)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)
    for value, exact in zip(given, (x, weights, up, down)):
        exact_gradient = torch.zeros_like(exact) if exact.grad is None else exact.grad
        assert value.grad is not None
        torch.testing.assert_close(value.grad.double(), exact_gradient, rtol=1e-5, atol=1e-5)


@needs_interpreter
@pytest.mark.parametrize(("kernel", "weighs"), [("triton", True), ("loop", False)])
def test_a_model_whose_kernel_gains_by_it_does_it(
    caplog: pytest.LogCaptureFixture, kernel: ExpertKernel, weighs: bool
) -> None:
    """The setting is for the symmetric dispatcher, and says so."""
    config = ModelConfig(
        vocab_size=32,
        hidden_size=D,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=INNER,
        num_experts=E,
        num_experts_per_tok=K,
    )
    with join_world(CPUAccelerator(), timeout_s=60) as world:
        meshes = build_meshes(derive_axes(ParallelConfig(), 1, E), world)
        dispatch = DispatchConfig(weighs_rows=True)
        model: MoEForCausalLM = build_parallel_model(
            config, meshes, world.device, 0, expert_kernel=kernel, dispatch=dispatch
        )
        assert "dispatch.weighs_rows has no effect" in caplog.text
        (layer,) = moe_layers(model)
        assert isinstance(layer.dispatcher, LocalDispatcher)
        assert layer.dispatcher.weighs_rows == weighs
        ids = torch.arange(12).view(1, 12)
        loss = model(ids, ids.clone()).loss_sum
        assert loss is not None
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
