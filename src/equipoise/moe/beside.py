"""Shared experts beside the routed ones: on a stream of their own, under dispatch and combine, forward and backward.

Autograd runs a node's backward on the stream of its forward, so the backward of the shared experts is beside that of
the routed ones as well. The edges are explicit, and are those of a fork and a join both ways:

    forward     fork: the side goes on after what the current stream holds     join: the current stream after the side
    backward    join: the side goes on after what the current stream holds     fork: the current stream after the side

The join adds both outputs, and is its layer's last module. So FSDP, which frees the weights of a unit after its last
module and gathers them again at the backward of its output, does both on the current stream outside of fork and join.

Memory of one stream that the other works with outlives the join or, in the backward, the fork: whoever gets it
afterwards comes later on either stream, and the allocator need not be told. The gradients' order of addition does not
depend on the streams, so the bits are those without overlap.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from equipoise.accelerator import Accelerator


class SideStream:
    """A stream for what may run beside the current one. None of an accelerator: everything runs in order."""

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self._accelerator = accelerator
        self._stream: Any = None if accelerator is None else accelerator.new_stream()

    def fork(self) -> None:
        """What the side gets from now on comes after all that the current stream holds."""
        if self._accelerator is not None:
            self._stream.wait_stream(self._accelerator.current_stream())

    def join(self) -> None:
        """What the current stream gets from now on comes after all that the side holds."""
        if self._accelerator is not None:
            self._accelerator.current_stream().wait_stream(self._stream)

    def use(self) -> AbstractContextManager[Any]:
        """In this context work goes to the side."""
        return nullcontext() if self._accelerator is None else self._accelerator.use_stream(self._stream)

    def keep(self, tensor: torch.Tensor) -> None:
        """The side works with the tensor: when it is freed, its memory waits for what the side then holds."""
        if self._accelerator is not None and tensor.device.type != "cpu":
            tensor.record_stream(self._stream)


class _Region:
    """What lies between one fork and its join. kept: a gradient that the side reads, until the backward of the fork,
    where there is one."""

    def __init__(self, side: SideStream) -> None:
        self.side, self.has_backward = side, False
        self.kept: torch.Tensor | None = None


class _ForkShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, region):
        region.side.fork()
        region.has_backward = ctx.needs_input_grad[0]
        ctx.region = region
        ctx.save_for_backward(x)  # so that it lives as long as the side works with it
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.region.side.join()
        ctx.region.kept = None
        return grad, None


class _AddShared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, shared, region):
        region.side.join()
        ctx.region = region
        ctx.save_for_backward(y.new_empty(0))
        return y + shared

    @staticmethod
    def backward(ctx, grad):
        # Where the layer is recomputed it is recomputed now, on this stream and before the fork.
        assert len(ctx.saved_tensors) == 1
        region = ctx.region
        if region.has_backward:
            region.kept = grad
        else:
            region.side.keep(grad)
        region.side.fork()
        return grad, grad, None


class Beside(nn.Module):
    """Adds the shared experts' output to the routed ones'. Has no weights; FSDP knows by it when both are done."""

    def __init__(self) -> None:
        super().__init__()
        self.side = SideStream()

    def overlap(self, side: SideStream, run: Callable[[torch.Tensor], torch.Tensor]) -> Callable:
        """`run`, the forward of the shared experts, on the side from now on."""
        self.side = side

        def run_on_side(x_TD: torch.Tensor) -> torch.Tensor:
            with side.use():
                return run(x_TD)

        return run_on_side

    def fork(self, x_TD: torch.Tensor) -> tuple[torch.Tensor, _Region]:
        """The shared experts' input, and what `forward` is to be given."""
        region = _Region(self.side)
        return _ForkShared.apply(x_TD, region), region

    def forward(self, y_TD: torch.Tensor, shared_TD: torch.Tensor, region: _Region) -> torch.Tensor:
        return _AddShared.apply(y_TD, shared_TD, region)
