"""Grouped linear: each expert's rows times that expert's weight. `loop` is the plain reference.

Shapes: R rows sorted by expert, E experts, K input features, N output features; `counts_E` rows of each expert.
Rows past `counts_E.sum()` belong to nobody: their outputs are unspecified and their values never reach a
result or a gradient of another row. Experts without rows get a weight gradient of exactly 0.
"""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from equipoise.errors import ConfigError
from equipoise.kernels.triton_support import triton_problem

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


def _triton_grouped_linear() -> GroupedLinear:
    from equipoise.kernels.grouped_gemm import triton_grouped_linear

    return triton_grouped_linear


def _problem(name: str, fn: GroupedLinear, device: torch.device, dtype: torch.dtype) -> str | None:
    """None if an implementation runs and agrees with the loop, otherwise what went wrong."""
    if name == "triton":
        problem = triton_problem(device.type)
        if problem is not None:
            return problem
    elif not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no grouped_mm"
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(24, 32, generator=generator).to(device, dtype)
    weight = torch.randn(3, 16, 32, generator=generator).to(device, dtype)
    counts = torch.tensor([16, 0, 8], device=device)
    results = []
    try:
        for implementation in (loop_grouped_linear, fn):
            x, w = rows.clone().requires_grad_(), weight.clone().requires_grad_()
            out = implementation(x, w, counts)
            out.backward(torch.ones_like(out))
            results.append((out.detach(), x.grad, w.grad))
    except Exception as error:  # compilers and drivers raise what they like
        return f"{name} does not run here: {str(error).splitlines()[0] if str(error) else repr(error)}"
    for reference, value in zip(*results):
        if not torch.allclose(reference.float(), value.float(), rtol=2e-2, atol=2e-1):
            return f"{name} disagrees with the loop on this device"
    return None


def _probe(name: str, fn: GroupedLinear, device: torch.device, dtype: torch.dtype) -> str | None:
    # In a thread of its own, where the caller's modes do not reach (no_grad, recompute, fake tensors): they would
    # change what the probe sees, and its answer is kept.
    with ThreadPoolExecutor(1) as fresh, warnings.catch_warnings():
        # torch's own thread for backwards has no CUDA context yet, and says that it makes one.
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
        return fresh.submit(_problem, name, fn, device, dtype).result()


@lru_cache
def choose_grouped_linear(device: torch.device, dtype: torch.dtype, name: str = "auto") -> KernelChoice:
    """Picks the implementation: `auto`, `loop`, `grouped_mm` or `triton`. Probes once per device and dtype.

    `auto` takes the first of triton, grouped_mm and loop that runs. On CPU the loop is preferred: its products write
    straight into the output, and the row counts are already on the host. FP32 is left to grouped_mm, whose products
    are cuBLAS's; the Triton kernels are laid out for 16-bit elements.

    Raises:
        ConfigError: the implementation asked for is unknown or does not run here.
    """
    if name == "loop":
        return KernelChoice("loop", "asked for", loop_grouped_linear)
    if name not in ("auto", "grouped_mm", "triton"):
        raise ConfigError(f"expert kernel {name!r} is unknown: choose auto, loop, grouped_mm or triton")
    if name == "auto" and device.type == "cpu":
        return KernelChoice("loop", "on CPU the loop is at least as fast as grouped_mm", loop_grouped_linear)
    candidates = {"triton": _triton_grouped_linear(), "grouped_mm": grouped_mm_linear}
    problems = []
    for candidate, fn in candidates.items():
        if name == "auto" and candidate == "triton" and dtype.itemsize > 2:
            problems.append(f"triton is not preferred for {dtype}")
            continue
        if name in ("auto", candidate):
            problem = _probe(candidate, fn, device, dtype)
            if problem is None:
                works = f"{candidate} runs here and agrees with the loop"
                return KernelChoice(candidate, "asked for" if name != "auto" else "; ".join([*problems, works]), fn)
            problems.append(problem)
    if name != "auto":
        raise ConfigError(f"expert kernel {name!r} cannot be used: {problems[0]}. Use auto or loop")
    return KernelChoice("loop", "; ".join(problems), loop_grouped_linear)
