"""The experts' SwiGLU feed-forward networks over rows sorted by expert. `plain_grouped_mlp` is the reference.

Shapes: R rows sorted by expert, E experts, D model features, I inner features, `counts_E` rows of each expert.
Rows past `counts_E.sum()` belong to nobody, as in `grouped_linear`.
"""

import torch
import torch.nn.functional as F

from equipoise.kernels.grouped_linear import GroupedLinear, choose_grouped_linear, loop_grouped_linear


def plain_grouped_mlp(
    rows_RD: torch.Tensor,
    gate_up_EID: torch.Tensor,
    down_EDI: torch.Tensor,
    counts_E: torch.Tensor,
    grouped_linear: GroupedLinear = loop_grouped_linear,
) -> torch.Tensor:
    """Two grouped products with the activation between them, as separate steps of autograd."""
    gate, up = grouped_linear(rows_RD, gate_up_EID, counts_E).chunk(2, dim=-1)
    return grouped_linear(F.silu(gate) * up, down_EDI, counts_E)


class _LoopGroupedMLP(torch.autograd.Function):
    """One expert after the other, whole: its intermediates stay in the cache and only gate and up are saved."""

    @staticmethod
    def forward(ctx, rows_RD, gate_up_EID, down_EDI, counts_E):
        counts = counts_E.tolist()
        inner = down_EDI.shape[2]
        hidden_RI = rows_RD.new_empty(rows_RD.shape[0], 2 * inner)
        out_RD = torch.empty_like(rows_RD)
        activated = rows_RD.new_empty(max(counts, default=0), inner)
        start = 0
        for expert, count in enumerate(counts):
            if count:
                part = slice(start, start + count)
                hidden, act = hidden_RI[part], activated[:count]
                torch.mm(rows_RD[part], gate_up_EID[expert].T, out=hidden)
                torch.ops.aten.silu.out(hidden[:, :inner], out=act)
                act.mul_(hidden[:, inner:])
                torch.mm(act, down_EDI[expert].T, out=out_RD[part])
                start += count
        out_RD[start:] = 0
        ctx.save_for_backward(rows_RD, gate_up_EID, down_EDI, hidden_RI)
        ctx.counts = counts
        return out_RD

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, gate_up_EID, down_EDI, hidden_RI = ctx.saved_tensors
        grad_RD, counts, inner = grad_RD.contiguous(), ctx.counts, down_EDI.shape[2]
        want_rows, want_gate_up, want_down = ctx.needs_input_grad[:3]
        grad_rows = torch.empty_like(rows_RD) if want_rows else None
        grad_gate_up = torch.empty_like(gate_up_EID) if want_gate_up else None
        grad_down = torch.empty_like(down_EDI) if want_down else None
        largest = max(counts, default=0)
        silu_space, act_space = (rows_RD.new_empty(largest, inner) for _ in range(2))
        grad_hidden_space = rows_RD.new_empty(largest, 2 * inner)
        start = 0
        for expert, count in enumerate(counts):
            if count == 0:
                for gradient in (grad_gate_up, grad_down):
                    if gradient is not None:
                        gradient[expert] = 0
                continue
            part = slice(start, start + count)
            gate, up = hidden_RI[part].chunk(2, dim=-1)
            silu, act, grad_hidden = silu_space[:count], act_space[:count], grad_hidden_space[:count]
            torch.ops.aten.silu.out(gate, out=silu)
            if grad_down is not None:
                torch.mul(silu, up, out=act)
                torch.mm(grad_RD[part].T, act, out=grad_down[expert])
            grad_act = act  # its values were used up by the product above
            torch.mm(grad_RD[part], down_EDI[expert], out=grad_act)
            torch.mul(grad_act, silu, out=grad_hidden[:, inner:])
            torch.mul(grad_act, up, out=silu)
            torch.ops.aten.silu_backward.grad_input(silu, gate, grad_input=grad_hidden[:, :inner])
            if grad_gate_up is not None:
                torch.mm(grad_hidden.T, rows_RD[part], out=grad_gate_up[expert])
            if grad_rows is not None:
                torch.mm(grad_hidden, gate_up_EID[expert], out=grad_rows[part])
            start += count
        if grad_rows is not None:
            grad_rows[start:] = 0
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
) -> torch.Tensor:
    """Each expert's SwiGLU network applied to its rows, with the implementation that fits the device.

    Args:
        rows_RD: rows sorted by expert.
        gate_up_EID: [E, 2 * I, D], gate rows first.
        down_EDI: [E, D, I].
        counts_E: int64, rows of each expert.
        kernel: `auto`, `loop` or `grouped_mm`; see `choose_grouped_linear`.
    """
    choice = choose_grouped_linear(rows_RD.device, rows_RD.dtype, kernel)
    if choice.fn is loop_grouped_linear:
        return loop_grouped_mlp(rows_RD, gate_up_EID, down_EDI, counts_E)
    return plain_grouped_mlp(rows_RD, gate_up_EID, down_EDI, counts_E, choice.fn)
