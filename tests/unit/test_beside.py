"""Shared experts beside the routed ones: which stream gets what, in which order, and that nothing else changes."""

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

from equipoise.accelerator.cpu import CPUAccelerator
from equipoise.models.config import ModelConfig
from equipoise.models.layer import build_moe_layer
from equipoise.models.parallelize import _side_stream
from equipoise.models.recompute import recomputed
from equipoise.moe.beside import SideStream
from equipoise.moe.layer import MoELayer

T, D = 12, 16
CONFIG = ModelConfig(
    hidden_size=D, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, n_shared_experts=1, vocab_size=8
)


class Stream:
    """Says in the log whom it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append(f"{self.name} waits for {other.name}")


class Recorder(CPUAccelerator):
    """An accelerator whose streams write down what is done with them."""

    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.current = Stream("main", self.log)

    def new_stream(self) -> Any:
        return Stream("side", self.log)

    def current_stream(self) -> Any:
        return self.current

    @contextmanager
    def use_stream(self, stream: Any):
        before, self.current = self.current, stream
        yield stream
        self.current = before


class Logged(torch.autograd.Function):
    """Identity that says on which stream its forward and in which order its backward is."""

    @staticmethod
    def forward(ctx, x, name, recorder):
        ctx.name, ctx.recorder = name, recorder
        recorder.log.append(f"{name} on {recorder.current.name}")
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.recorder.log.append(f"{ctx.name} backward")
        return grad, None, None


def make_layer(side: SideStream | None) -> MoELayer:
    torch.manual_seed(3)
    layer = build_moe_layer(CONFIG, "auto")
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    if side is not None:
        layer.overlap_shared_experts(side)
    return layer


def log_of(recorder: Recorder, layer: MoELayer) -> None:
    """The layer's parts write into the recorder's log."""
    dispatch, combine, shared = layer.dispatcher.dispatch, layer.dispatcher.combine, layer.shared_experts
    assert shared is not None
    project = shared.down_proj.forward

    def logged_dispatch(x_TD, *rest):
        return dispatch(Logged.apply(x_TD, "dispatch", recorder), *rest)

    layer.dispatcher.dispatch = logged_dispatch  # type: ignore[method-assign]
    layer.dispatcher.combine = lambda rows, handle: Logged.apply(  # type: ignore[method-assign]
        combine(rows, handle), "combine", recorder
    )
    shared.down_proj.forward = lambda x: Logged.apply(project(x), "shared", recorder)  # type: ignore[method-assign]


FORWARD = ["side waits for main", "dispatch on main", "shared on side", "combine on main", "main waits for side"]
BACKWARD = ["side waits for main", "combine backward", "shared backward", "dispatch backward", "main waits for side"]


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
def test_the_edges_of_forward_and_backward(recompute: Any) -> None:
    recorder = Recorder()
    layer = make_layer(SideStream(recorder))
    log_of(recorder, layer)
    x_BSD = torch.randn(1, T, D, requires_grad=True)
    y_BSD = recomputed(recompute, lambda x: layer(x)[0], x_BSD)
    assert recorder.log == FORWARD
    recorder.log.clear()
    y_BSD.sum().backward()
    again = [] if recompute == "none" else FORWARD
    assert recorder.log == again + BACKWARD, "a layer is recomputed before the side is on its way, as a whole"


@pytest.mark.parametrize("frozen", ["nothing", "input", "shared_experts", "experts", "gate"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_bits_of_running_in_order(recompute: Any, frozen: str) -> None:
    found = []
    for side in (None, SideStream(Recorder()), SideStream(CPUAccelerator())):
        layer = make_layer(side)
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(not name.startswith(frozen))
        torch.manual_seed(4)
        x_BSD = torch.randn(1, T, D, requires_grad=frozen != "input")
        gradient = torch.randn(1, T, D)
        y_BSD = recomputed(recompute, lambda x, layer=layer: layer(x)[0], x_BSD)
        y_BSD.backward(gradient)
        found.append([y_BSD.detach(), x_BSD.grad, *(p.grad for p in layer.parameters())])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


def test_a_layer_without_shared_experts_has_no_region() -> None:
    layer = build_moe_layer(CONFIG.model_copy(update={"n_shared_experts": 0}), "auto")
    recorder = Recorder()
    layer.overlap_shared_experts(SideStream(recorder))
    with torch.no_grad():
        for parameter in layer.parameters():
            nn.init.normal_(parameter, std=0.3)
        layer(torch.randn(1, T, D))
    assert layer.beside is None
    assert recorder.log == []


@pytest.mark.parametrize(
    ("shared", "ep_size", "device", "why"),
    [
        (0, 2, "cuda", "the model has no shared experts"),
        (1, 1, "cuda", "parallel.ep_size is 1, so nothing is exchanged"),
        (1, 2, "cpu", "a CPU has no streams"),
    ],
)
def test_a_wish_without_effect_is_answered(
    caplog: pytest.LogCaptureFixture, shared: int, ep_size: int, device: str, why: str
) -> None:
    model = CONFIG.model_copy(update={"n_shared_experts": shared})
    assert _side_stream(model, ep_size, torch.device(device))._stream is None
    assert f"parallel.overlap_shared_experts has no effect: {why}" in caplog.text


def test_a_gradient_that_the_side_reads_lives_until_the_fork() -> None:
    """Its memory goes back to the current stream's allocator, which may hand it out before the side has read it."""
    layer = make_layer(SideStream(Recorder()))
    assert layer.beside is not None
    x_TD = torch.randn(T, D, requires_grad=True)
    forked_TD, region = layer.beside.fork(x_TD)
    kept = []
    forked_TD.register_hook(lambda grad: kept.append(region.kept))
    y_TD = layer.beside(x_TD * 2, forked_TD * 3, region)
    y_TD.backward(torch.ones(T, D))
    assert [tensor is not None for tensor in kept] == [True]
    assert region.kept is None
