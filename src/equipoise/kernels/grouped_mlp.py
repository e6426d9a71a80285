"""The experts' SwiGLU feed-forward networks over rows sorted by expert. `plain_grouped_mlp` is the reference.

Shapes: R rows sorted by expert, E experts, D model features, I inner features, `counts_E` rows of each expert.
Rows past `counts_E.sum()` belong to nobody, as in `grouped_linear`.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from equipoise.kernels.grouped_linear import GroupedLinear, choose_grouped_linear, loop_grouped_linear
from equipoise.kernels.rows import RowMaker

Matrices = torch.Tensor | Sequence[torch.Tensor]
"""One matrix per expert: stacked, or in storages of their own."""


def plain_grouped_mlp(
    rows_RD: torch.Tensor,
    gate_up_EID: torch.Tensor,
    down_EDI: torch.Tensor,
    counts_E: torch.Tensor,
    grouped_linear: GroupedLinear = loop_grouped_linear,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Two grouped products with the activation between them, as separate steps of autograd. A row's weight multiplies
    its activation, so that its output is weighted."""
    gate, up = grouped_linear(rows_RD, gate_up_EID, counts_E).chunk(2, dim=-1)
    act = F.silu(gate) * up
    if weights_R is not None:
        act = (act * weights_R[:, None]).to(act.dtype)
    return grouped_linear(act, down_EDI, counts_E)


def product_into(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """out = a @ b; an FP32 `out` takes the products of 16-bit matrices without rounding the sum."""
    if out.dtype == a.dtype:
        torch.mm(a, b, out=out)
    elif a.device.type == "cuda":
        out.copy_(torch.mm(a, b, out_dtype=out.dtype))
    else:
        torch.mm(a.to(out.dtype), b.to(out.dtype), out=out)


def loop_mlp_forward(
    rows_RD: torch.Tensor, gate_up: Matrices, down: Matrices, counts: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs [R, D] and the first product's results [R, 2 * I], which the backward needs. Outside of autograd."""
    inner = down[0].shape[1]
    hidden_RI = rows_RD.new_empty(rows_RD.shape[0], 2 * inner)
    out_RD = torch.empty_like(rows_RD)
    activated = rows_RD.new_empty(max(counts, default=0), inner)
    start = 0
    for expert, count in enumerate(counts):
        if count:
            part = slice(start, start + count)
            hidden, act = hidden_RI[part], activated[:count]
            torch.mm(rows_RD[part], gate_up[expert].T, out=hidden)
            torch.ops.aten.silu.out(hidden[:, :inner], out=act)
            act.mul_(hidden[:, inner:])
            torch.mm(act, down[expert].T, out=out_RD[part])
            start += count
    out_RD[start:] = 0
    return out_RD, hidden_RI


def loop_mlp_backward(
    grad_RD: torch.Tensor,
    rows_RD: torch.Tensor,
    gate_up: Matrices,
    down: Matrices,
    hidden_RI: torch.Tensor,
    counts: Sequence[int],
    want_rows: bool,
    grad_gate_up: Matrices | None,
    grad_down: Matrices | None,
) -> torch.Tensor | None:
    """Writes every expert's weight gradients into the given matrices (None: not wanted), returns that of the rows."""
    inner = down[0].shape[1]
    grad_RD = grad_RD.contiguous()
    grad_rows = torch.empty_like(rows_RD) if want_rows else None
    largest = max(counts, default=0)
    silu_space, act_space = (rows_RD.new_empty(largest, inner) for _ in range(2))
    grad_hidden_space = rows_RD.new_empty(largest, 2 * inner)
    start = 0
    for expert, count in enumerate(counts):
        if count == 0:
            for gradient in (grad_gate_up, grad_down):
                if gradient is not None:
                    gradient[expert].zero_()
            continue
        part = slice(start, start + count)
        gate, up = hidden_RI[part].chunk(2, dim=-1)
        silu, act, grad_hidden = silu_space[:count], act_space[:count], grad_hidden_space[:count]
        torch.ops.aten.silu.out(gate, out=silu)
        if grad_down is not None:
            torch.mul(silu, up, out=act)
            product_into(grad_down[expert], grad_RD[part].T, act)
        grad_act = act  # its values were used up by the product above
        torch.mm(grad_RD[part], down[expert], out=grad_act)
        torch.mul(grad_act, silu, out=grad_hidden[:, inner:])
        torch.mul(grad_act, up, out=silu)
        torch.ops.aten.silu_backward.grad_input(silu, gate, grad_input=grad_hidden[:, :inner])
        if grad_gate_up is not None:
            product_into(grad_gate_up[expert], grad_hidden.T, rows_RD[part])
        if grad_rows is not None:
            torch.mm(grad_hidden, gate_up[expert], out=grad_rows[part])
        start += count
    if grad_rows is not None:
        grad_rows[start:] = 0
    return grad_rows


class _LoopGroupedMLP(torch.autograd.Function):
    """One expert after the other, whole: its intermediates stay in the cache and only gate and up are saved."""

    @staticmethod
    def forward(ctx, rows_RD, gate_up_EID, down_EDI, counts_E):
        ctx.counts = counts_E.tolist()
        out_RD, hidden_RI = loop_mlp_forward(rows_RD, gate_up_EID, down_EDI, ctx.counts)
        ctx.save_for_backward(rows_RD, gate_up_EID, down_EDI, hidden_RI)
        return out_RD

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, gate_up_EID, down_EDI, hidden_RI = ctx.saved_tensors
        want_rows, want_gate_up, want_down = ctx.needs_input_grad[:3]
        grad_gate_up = torch.empty_like(gate_up_EID) if want_gate_up else None
        grad_down = torch.empty_like(down_EDI) if want_down else None
        grad_rows = loop_mlp_backward(
            grad_RD, rows_RD, gate_up_EID, down_EDI, hidden_RI, ctx.counts, want_rows, grad_gate_up, grad_down
        )
        return grad_rows, grad_gate_up, grad_down, None


def loop_grouped_mlp(
    rows_RD: torch.Tensor, gate_up_EID: torch.Tensor, down_EDI: torch.Tensor, counts_E: torch.Tensor
) -> torch.Tensor:
    """Fused loop over experts, for the CPU. Saves the first product's output and nothing of the second's input."""
    return _LoopGroupedMLP.apply(rows_RD, gate_up_EID, down_EDI, counts_E)


def grouped_mlp(
    rows_RD: torch.Tensor,
    gate_up_EID: torch.Tensor,
    down_EDI: torch.Tensor,
    counts_E: torch.Tensor,
    kernel: str = "auto",
    make_rows: RowMaker | None = None,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each expert's SwiGLU network applied to its rows, with the implementation that fits the device.

    Args:
        rows_RD: rows sorted by expert.
        gate_up_EID: [E, 2 * I, D], gate rows first.
        down_EDI: [E, D, I].
        counts_E: int64, rows of each expert.
        kernel: `auto`, `loop`, `grouped_mm` or `triton`; see `choose_grouped_linear`.
        make_rows: memory that the `triton` form writes its result and the rows' gradient to.
        weights_R: a weight for each row's output, differentiable. `triton` needs no saved output for its gradient.
    """
    choice = choose_grouped_linear(rows_RD.device, rows_RD.dtype, kernel)
    if choice.fn is loop_grouped_linear and weights_R is None:
        return loop_grouped_mlp(rows_RD, gate_up_EID, down_EDI, counts_E)
    if choice.name == "triton":
        from equipoise.kernels.grouped_gemm import triton_grouped_mlp

        return triton_grouped_mlp(rows_RD, gate_up_EID, down_EDI, counts_E, make_rows, weights_R)
    return plain_grouped_mlp(rows_RD, gate_up_EID, down_EDI, counts_E, choice.fn, weights_R)
