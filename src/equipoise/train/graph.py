"""A microbatch's forward and backward as one graph of the device: for models so small that the host, which launches
a hundred kernels for each layer, takes longer than the device does.

The graph reads its tokens from, and adds its gradients to, tensors that stay where they are. So gradients are cleared
in place, and a microbatch that does not fit the graph (packed documents, padding) adds to the same ones without it.
"""

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.distributed.fsdp import FSDPModule

from equipoise.accelerator import Accelerator
from equipoise.accelerator.pinned import to_device
from equipoise.data import Batch
from equipoise.dispatch import LocalDispatcher
from equipoise.models.model import MoEForCausalLM
from equipoise.moe.layer import MoELayer
from equipoise.train.config import TrainConfig
from equipoise.train.offload import OffloadedAdamW

logger = logging.getLogger(__name__)

WARM_UP = 3
"""Microbatches of a shape that run before one is captured: they compile, and allocate what stays."""


class Captured(NamedTuple):
    """What a microbatch gives besides gradients. terms: float32 scalars by name. counts_LE: tokens of each expert, None
    without MoE layers."""

    terms: dict[str, torch.Tensor]
    counts_LE: torch.Tensor | None


Compute = Callable[[Batch, torch.Tensor, torch.Tensor], Captured]
"""Forward and backward of a microbatch on the device; the loss is its sum divided by the first scalar, auxiliary losses
are weighed by the second."""


def setting_problem(config: TrainConfig) -> str | None:
    """Which setting keeps all microbatches from being captured; None without one."""
    found = {
        "the profiler is on, and sees no ranges in a graph": config.profiler is not None,
        "the trace is on, and looks into every layer": config.trace is not None,
        "synthetic_routing is on, and makes its choices on the host": config.synthetic_routing is not None,
        "data.packing is 'documents', and microbatches differ in their documents": config.data.packing == "documents",
    }
    return next((reason for reason, holds in found.items() if holds), None)


def graph_problem(
    model: MoEForCausalLM, optimizer: torch.optim.Optimizer, accelerator: Accelerator, kernel: str
) -> str | None:
    """Why microbatches of this model cannot be captured; None where they can. `kernel`: of the experts' products."""
    answer = accelerator.supports("graphs")
    layers = [module for module in model.modules() if isinstance(module, MoELayer)]
    if not answer:
        return f"{accelerator.name}: {answer.reason}"
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        return "FSDP gathers weights in between; one rank that keeps them (parallel.reshard_after_forward) does not"
    if any(not isinstance(layer.dispatcher, LocalDispatcher) for layer in layers):
        return "tokens go to other ranks in between"
    if layers and kernel != "triton":
        return f"the expert kernel is {kernel}, and only triton needs nothing from the host"
    if isinstance(optimizer, OffloadedAdamW):
        return "optimizer.offload is on"
    return None


class MicrobatchGraph:
    """Runs `compute` for microbatches of one shape, from the third on as a graph.

    What it adds to the parameters' gradients is what `compute` adds. A graph whose gradients or weights have moved is
    made again.
    """

    def __init__(self, model: MoEForCausalLM, accelerator: Accelerator, device: torch.device, compute: Compute) -> None:
        self._model, self._accelerator, self._device, self._compute = model, accelerator, device, compute
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._layers = [module for module in model.modules() if isinstance(module, MoELayer)]
        self._shape: torch.Size | None = None
        self._seen = 0
        self._replay: Callable[[], None] | None = None
        self._found: Captured | None = None
        self._batch: Batch | None = None
        self._divisor, self._share = (torch.ones((), device=device) for _ in range(2))
        self._addresses: list[int] = []
        self.is_refused = False

    def takes(self, batch: Batch, valid: torch.Tensor | None) -> bool:
        """Whether `run` may have this microbatch. It counts towards the warm-up."""
        if self.is_refused or valid is not None or batch.position_ids is not None or batch.document_ids is not None:
            return False
        if any(layer.observer is not None or layer.gate.synthetic is not None for layer in self._layers):
            return False
        if self._shape is None:
            self._shape = batch.input_ids.shape
        if batch.input_ids.shape != self._shape:
            return False
        self._seen += 1
        return self._seen > WARM_UP

    def run(self, batch: Batch, num_tokens: int) -> Captured | None:
        """The microbatch's results; they stay valid until the next call. None where it could not be captured: nothing
        was done then, and `takes` says no from now on."""
        if self._model.copies is not None:
            self._model.copies.refresh()
        self._keep_gradients()
        if self._replay is None or self._addresses != self._where():
            self._capture(batch)
        if self._replay is None or self._batch is None:
            return None
        self._batch.input_ids.copy_(to_device(batch.input_ids, self._device))
        self._batch.labels.copy_(to_device(batch.labels, self._device))
        self._divisor.fill_(num_tokens)
        self._share.fill_(batch.num_valid_tokens / num_tokens)
        self._replay()
        return self._found

    def _keep_gradients(self) -> None:
        """Gives every parameter a gradient in FP32 that may be added to."""
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = torch.zeros_like(parameter)
            elif gradient.dtype != parameter.dtype:
                parameter.grad = gradient.to(parameter.dtype)

    def clear_gradients(self) -> bool:
        """In place, where a graph adds to them; false where none does, and nothing was done."""
        if self._replay is None:
            return False
        torch._foreach_zero_([parameter.grad for parameter in self._parameters if parameter.grad is not None])
        return True

    def _where(self) -> list[int]:
        """Addresses that the graph knows and others could change."""
        addresses = [0 if p.grad is None else p.grad.data_ptr() for p in self._parameters]
        copies = self._model.copies
        for parameter in self._parameters:
            copy = None if copies is None else copies.copy_of(parameter)
            addresses.append(parameter.data_ptr() if copy is None else copy.data_ptr())
        return addresses

    def _capture(self, batch: Batch) -> None:
        self._replay, self._found = None, None  # frees an earlier graph's memory before another one takes its own
        static = batch.to(self._device)
        self._batch = static

        def work() -> None:
            self._found = self._compute(static, self._divisor, self._share)

        try:
            self._replay = self._accelerator.capture(work)
        except RuntimeError as error:
            self.is_refused = True
            reason = str(error).partition("\n")[0]
            logger.warning("train.cuda_graph has no effect: the device refused to capture a microbatch: %s", reason)
            return
        self._addresses = self._where()
