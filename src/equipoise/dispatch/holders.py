"""Whether only the backward that got a gradient has it, and may overwrite it. A hook may have kept it, and a sum gives
one tensor to the backwards of all its terms."""

import sys
from functools import cache

import torch


def num_holders(tensor: torch.Tensor) -> int:
    """References to an argument of a backward, of Python and of autograd. How many there are where nobody else has it
    depends on the versions of both (`num_holders_alone`)."""
    return sys.getrefcount(tensor) + tensor._use_count()  # type: ignore[attr-defined]


class _Made(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad.clone()


class _Counted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, found):
        ctx.found = found
        return x.clone(), x.sum()

    @staticmethod
    def backward(ctx, grad, grad_sum=None):
        ctx.found.append(num_holders(grad))
        return grad, None


@cache
def num_holders_alone() -> int:
    """`num_holders` of a gradient that the backward before has just made and kept nothing of."""
    found: list[int] = []
    with torch.inference_mode(False), torch.enable_grad():
        x = torch.zeros(1, device="cpu", requires_grad=True)
        torch.autograd.grad(_Made.apply(_Counted.apply(x, found)[0]), x, torch.ones(1, device="cpu"))
    return found[0]
