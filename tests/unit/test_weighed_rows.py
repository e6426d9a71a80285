"""A layer whose experts multiply by the rows' weights, against one whose dispatcher does, on values and gradients."""

import pytest
import torch
from torch import nn

from equipoise.accelerator import CPUAccelerator
from equipoise.dispatch import LocalDispatcher
from equipoise.distributed.mesh import ParallelConfig, build_meshes, derive_axes
from equipoise.distributed.world import join_world
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


@needs_interpreter
@pytest.mark.parametrize(("kernel", "weighs"), [("triton", True), ("loop", False)])
def test_a_model_whose_kernel_gains_by_it_does_it(kernel: ExpertKernel, weighs: bool) -> None:
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
        model: MoEForCausalLM = build_parallel_model(config, meshes, world.device, 0, expert_kernel=kernel)
        (layer,) = moe_layers(model)
        assert isinstance(layer.dispatcher, LocalDispatcher)
        assert layer.dispatcher.weighs_rows == weighs
        ids = torch.arange(12).view(1, 12)
        loss = model(ids, ids.clone()).loss_sum
        assert loss is not None
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
