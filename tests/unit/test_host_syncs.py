"""What an MoE layer reads on the host: each read makes a GPU's host wait, so each one is counted here."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from equipoise.accelerator import CPUAccelerator
from equipoise.dispatch import build_dispatcher
from equipoise.dispatch.base import Dispatcher
from equipoise.distributed.world import join_world
from equipoise.kernels.select_experts import plain_select
from equipoise.moe.experts import Experts
from equipoise.moe.layer import MoELayer
from equipoise.moe.router import Router, RouterConfig

E, D, K = 4, 16, 2
READS = {"item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"}
DATA_DEPENDENT = {"bincount", "nonzero", "unique", "masked_select", "argwhere", "is_nonzero", "equal", "allclose"}


class HostReads(TorchFunctionMode):
    """Names of the calls, in order, that would wait for a device: reads, and shapes that depend on values."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        masked = name in ("__getitem__", "__setitem__") and getattr(args[1], "dtype", None) == torch.bool
        counted = name == "repeat_interleave" and torch.is_tensor(args[1]) and "output_size" not in kwargs
        if name in READS | DATA_DEPENDENT or masked or counted:
            self.names.append(name)
        return func(*args, **kwargs)


def make_layer(dispatcher: Dispatcher) -> MoELayer:
    config = RouterConfig(
        hidden_size=D, num_experts=E, num_experts_per_tok=K, norm_topk_prob=True, aux_loss=True, z_loss=True
    )
    layer = MoELayer(Router(config), Experts(E, D, 8, "grouped_mm"), None, dispatcher)
    for p in layer.parameters():
        nn.init.normal_(p, generator=torch.Generator().manual_seed(1))
    return layer


@contextmanager
def made_dispatcher(name: str) -> Iterator[Dispatcher]:
    with join_world(CPUAccelerator(), timeout_s=30) as world:
        yield build_dispatcher(name, E, world.group)  # type: ignore[arg-type]


# `__bool__` is make_permutation's look for dropped slots, which it takes on the CPU only, where it is free.
EXPECTED = {
    "local": ["__bool__"],
    "all_to_all": ["__bool__", "tolist"],
    "all_gather": ["__int__", "__bool__", "__int__"],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_layer_reads_what_its_dispatcher_documents_and_nothing_else(name: str) -> None:
    x_BSD = torch.randn(2, 5, D, requires_grad=True)
    with made_dispatcher(name) as dispatcher:
        layer = make_layer(dispatcher)
        layer(x_BSD)  # probes and first-use checks
        with HostReads() as reads:
            y_BSD, routing = layer(x_BSD)
            forward = list(reads.names)
            (y_BSD.sum() + routing.aux_loss + routing.z_loss).backward()
    assert forward == EXPECTED[name]
    assert reads.names == forward


@pytest.mark.parametrize("groups", [(1, 1), (2, 1)])
@pytest.mark.parametrize("valid", [None, torch.tensor([True, False, True])])
def test_selecting_experts_reads_nothing(groups: tuple[int, int], valid: torch.Tensor | None) -> None:
    with HostReads() as reads:
        plain_select(torch.rand(3, E), torch.zeros(E), valid, K, *groups)
    assert reads.names == []


@pytest.mark.parametrize(
    "read",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: bool(t.any()),
        lambda t: int(t[0]),
        lambda t: torch.bincount(t),
        lambda t: t.bincount(),
        lambda t: t[t > 1],
        lambda t: t.repeat_interleave(t),
        lambda t: t.cpu(),
    ],
)
def test_the_counter_sees_each_kind_of_read(read: Callable[[torch.Tensor], Any]) -> None:
    with HostReads() as reads:
        read(torch.tensor([1, 2, 3]))
    assert len(reads.names) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "expected"), [("local", 0), ("all_to_all", 1), ("all_gather", 2)])
def test_cuda_itself_counts_the_same(name: str, expected: int) -> None:
    from equipoise.accelerator import get_accelerator

    with join_world(get_accelerator(), timeout_s=60) as world:
        layer = make_layer(build_dispatcher(name, E, world.group)).to(world.device)  # type: ignore[arg-type]
        x_BSD = torch.randn(2, 5, D, device=world.device, dtype=torch.bfloat16, requires_grad=True)
        layer.experts.bfloat16()
        for _ in range(2):
            y_BSD, routing = layer(x_BSD)
            (y_BSD.sum() + routing.aux_loss + routing.z_loss).backward()
        torch.cuda.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                y_BSD, routing = layer(x_BSD)
                (y_BSD.sum() + routing.aux_loss + routing.z_loss).backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        messages = [str(w.message) for w in caught if "called a synchronizing" in str(w.message)]
        assert len(messages) == expected, messages
