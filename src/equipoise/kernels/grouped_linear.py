"""Grouped linear: each expert's rows times that expert's weight. `loop` is the plain reference.

Shapes: R rows sorted by expert, E experts, K input features, N output features; `counts_E` rows of each expert.
Rows past `counts_E.sum()` belong to nobody: their outputs are unspecified and their values never reach a
result or a gradient of another row. Experts without rows get a weight gradient of exactly 0.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from equipoise.errors import ConfigError

GroupedLinear = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _LoopGroupedLinear(torch.autograd.Function):
    """One matrix product per expert, written in place into a shared output."""

    @staticmethod
    def forward(ctx, rows_RK, weight_ENK, counts_E):
        counts = counts_E.tolist()  # a host sync on a GPU: this form is the reference and the CPU's
        ctx.save_for_backward(rows_RK, weight_ENK)
        ctx.counts = counts
        out_RN = rows_RK.new_empty(rows_RK.shape[0], weight_ENK.shape[1])
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                torch.mm(rows_RK[part], weight_ENK[expert].T, out=out_RN[part])
                start += count
        out_RN[start:] = 0
        return out_RN

    @staticmethod
    def backward(ctx, grad_RN):
        rows_RK, weight_ENK = ctx.saved_tensors
        grad_RN = grad_RN.contiguous()
        want_rows, want_weight = ctx.needs_input_grad[:2]
        grad_rows = torch.empty_like(rows_RK) if want_rows else None
        grad_weight = torch.empty_like(weight_ENK) if want_weight else None
        start = 0
        for expert, count in enumerate(ctx.counts):
            part = slice(start, start + count)
            if count and grad_rows is not None:
                torch.mm(grad_RN[part], weight_ENK[expert], out=grad_rows[part])
            if grad_weight is not None:
                if count:
                    torch.mm(grad_RN[part].T, rows_RK[part], out=grad_weight[expert])
                else:
                    grad_weight[expert] = 0
            start += count
        if grad_rows is not None:
            grad_rows[start:] = 0
        return grad_rows, grad_weight, None


def loop_grouped_linear(rows_RK: torch.Tensor, weight_ENK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Reference: a loop over experts. Returns rows_RN of the dtype of the inputs, which must agree."""
    return _LoopGroupedLinear.apply(rows_RK, weight_ENK, counts_E)


class _GroupedMM(torch.autograd.Function):
    """`torch.nn.functional.grouped_mm` both ways, with the cases that it gets wrong handled."""

    @staticmethod
    def forward(ctx, rows_RK, weight_ENK, counts_E):
        offsets_E = counts_E.cumsum(0).to(torch.int32)
        ctx.save_for_backward(rows_RK, weight_ENK, offsets_E)
        if rows_RK.shape[0] == 0:
            return rows_RK.new_empty(0, weight_ENK.shape[1])
        return F.grouped_mm(rows_RK, weight_ENK.transpose(-2, -1), offs=offsets_E)

    @staticmethod
    def backward(ctx, grad_RN):
        rows_RK, weight_ENK, offsets_E = ctx.saved_tensors
        want_rows, want_weight = ctx.needs_input_grad[:2]
        if rows_RK.shape[0] == 0:
            return (
                torch.empty_like(rows_RK) if want_rows else None,
                torch.zeros_like(weight_ENK) if want_weight else None,
                None,
            )
        grad_RN = grad_RN.contiguous()
        grad_rows = F.grouped_mm(grad_RN, weight_ENK, offs=offsets_E) if want_rows else None
        grad_weight = None
        if want_weight:
            # The product over an empty group leaves its slice unwritten on some versions: clear it here.
            grad_weight = F.grouped_mm(grad_RN.transpose(0, 1), rows_RK, offs=offsets_E)
            counts_E = offsets_E.diff(prepend=offsets_E.new_zeros(1))
            grad_weight = grad_weight.masked_fill((counts_E == 0)[:, None, None], 0)
        return grad_rows, grad_weight, None


def grouped_mm_linear(rows_RK: torch.Tensor, weight_ENK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """PyTorch's grouped matrix product; no host sync. Same contract as `loop_grouped_linear`."""
    return _GroupedMM.apply(rows_RK, weight_ENK, counts_E)


@dataclass(frozen=True)
class KernelChoice:
    """The implementation in use, by name, and why."""

    name: str
    reason: str
    fn: GroupedLinear


def _probe_grouped_mm(device: torch.device, dtype: torch.dtype) -> str | None:
    """None if `grouped_mm` runs and agrees with the loop, otherwise what went wrong."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 32, generator=generator).to(device, dtype)
    weight = torch.randn(3, 16, 32, generator=generator).to(device, dtype)
    counts = torch.tensor([16, 0, 8], device=device)
    results = []
    try:
        for fn in (loop_grouped_linear, grouped_mm_linear):
            x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
            out = fn(x, w, counts)
            out.backward(torch.ones_like(out))
            results.append((out.detach(), x.grad, w.grad))
    except (RuntimeError, NotImplementedError) as error:
        return f"grouped_mm does not run here: {str(error).splitlines()[0]}"
    for reference, value in zip(*results):
        if not torch.allclose(reference.float(), value.float(), rtol=2e-2, atol=2e-1):
            return "grouped_mm disagrees with the loop on this device"
    return None


@lru_cache
def choose_grouped_linear(device: torch.device, dtype: torch.dtype, name: str = "auto") -> KernelChoice:
    """Picks the implementation: `auto`, `loop` or `grouped_mm`. Probes once per device and dtype.

    On CPU the loop is preferred: its products write straight into the output, and the row counts are already
    on the host.

    Raises:
        ConfigError: the implementation asked for is unknown or does not run here.
    """
    if name == "loop":
        return KernelChoice("loop", "asked for", loop_grouped_linear)
    if name not in ("auto", "grouped_mm"):
        raise ConfigError(f"expert kernel {name!r} is unknown: choose auto, loop or grouped_mm")
    if name == "auto" and device.type == "cpu":
        return KernelChoice("loop", "on CPU the loop is at least as fast as grouped_mm", loop_grouped_linear)
    # In a thread of its own, where the caller's modes do not reach (no_grad, recompute, fake tensors): they would
    # change what the probe sees, and its answer is kept.
    with ThreadPoolExecutor(1) as fresh:
        problem = fresh.submit(_probe_grouped_mm, device, dtype).result()
    if problem is None:
        reason = "asked for" if name == "grouped_mm" else "grouped_mm runs here and agrees with the loop"
        return KernelChoice("grouped_mm", reason, grouped_mm_linear)
    if name == "grouped_mm":
        raise ConfigError(f"expert kernel 'grouped_mm' cannot be used: {problem}. Use auto or loop")
    return KernelChoice("loop", problem, loop_grouped_linear)
