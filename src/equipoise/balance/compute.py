"""Expert compute over weights in two storages: a rank's masters and the replicas in its slots.

Rows arrive sorted by local physical expert, masters first, so they split in two where the masters' rows end. Forward
and the rows' gradient read both storages; the weights' gradient goes to autograd for masters, and in FP32 to the
runtime's buffer for replicas. Four forms: a fused loop for SwiGLU experts on the CPU (the reference of it is
`plain_grouped_mlp`), a loop per product (the reference), two launches of `grouped_mm`, and the Triton kernels, which
read both storages in one launch.

Shapes: M masters and R slots, L = M + R local physical experts, `counts` their rows, N x K one expert's weight.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from equipoise.balance.replicas import as_masters
from equipoise.kernels.grouped_gemm import (
    dual_dgrad,
    dual_forward,
    dual_swiglu_backward,
    dual_swiglu_forward,
    dual_wgrad,
    weighted_swiglu_backward,
)
from equipoise.kernels.grouped_linear import choose_grouped_linear, loop_grouped_linear
from equipoise.kernels.grouped_mlp import loop_mlp_backward, loop_mlp_forward, product_into
from equipoise.kernels.rows import RowMaker
from equipoise.kernels.tiles import Tiles, make_tiles
from equipoise.kernels.tuning import block_rows

if TYPE_CHECKING:
    from equipoise.balance.step import Attached, Step


@dataclass(frozen=True)
class Counts:
    """Rows of each local physical expert, on the host and on the rows' device (int64 [L])."""

    read: Callable[[], list[int]]
    device: torch.Tensor

    @property
    def host(self) -> list[int]:
        """A host sync where the plan is on an accelerator."""
        return self.read()

    def offsets(self, part: slice) -> torch.Tensor:
        """int32 ends of some experts' groups, counted from the first of them, without a host sync."""
        return self.device[part].cumsum(0).to(torch.int32)


def _experts(tensors: Sequence[torch.Tensor], slots: torch.Tensor | None, num_dims: int = 2) -> list[torch.Tensor]:
    """All local physical experts' matrices (or biases, with `num_dims` 1), without copies."""
    masters = as_masters(tensors, num_dims)
    return [*(masters.unbind() if isinstance(masters, torch.Tensor) else masters), *([] if slots is None else slots)]


class _FusedMLP(torch.autograd.Function):
    """SwiGLU experts one after the other, from both storages."""

    @staticmethod
    def forward(ctx, rows_RD, step, gate_up_name, down_name, counts, num_gate_up, *masters):
        gate_up, down = masters[:num_gate_up], masters[num_gate_up:]
        ctx.step, ctx.names, ctx.counts, ctx.num_gate_up = step, (gate_up_name, down_name), counts, num_gate_up
        out_RD, hidden_RI = loop_mlp_forward(
            rows_RD, _experts(gate_up, step.slots(gate_up_name)), _experts(down, step.slots(down_name)), counts
        )
        ctx.save_for_backward(rows_RD, hidden_RI, *masters)
        return out_RD

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, hidden_RI, *masters = ctx.saved_tensors
        step, (gate_up_name, down_name), number = ctx.step, ctx.names, ctx.num_gate_up
        want_rows, want_masters = ctx.needs_input_grad[0], ctx.needs_input_grad[6:]
        gate_up, down = masters[:number], masters[number:]
        grads: list[Sequence[torch.Tensor | None]] = []
        destinations: list[list[torch.Tensor] | None] = []
        for name, tensors, wanted in (
            (gate_up_name, gate_up, want_masters[:number]),
            (down_name, down, want_masters[number:]),
        ):
            if any(wanted):
                made = [torch.empty_like(t) for t in tensors]
                grads.append(made)
                destinations.append(_experts(made, step.gradient_slots(name)))
            else:
                grads.append([None] * len(tensors))
                destinations.append(None)
        grad_rows = loop_mlp_backward(
            grad_RD,
            rows_RD,
            _experts(gate_up, step.slots(gate_up_name)),
            _experts(down, step.slots(down_name)),
            hidden_RI,
            ctx.counts,
            want_rows,
            *destinations,
        )
        for name, destination, gradients in zip(ctx.names, destinations, grads):
            if destination is not None:
                step.send_gradients(name, gradients)
        return grad_rows, None, None, None, None, None, *grads[0], *grads[1]


def _stacked(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Masters as one tensor [M, N, K]; copies those that are in storages of their own."""
    masters = as_masters(tensors, 2)
    return masters if isinstance(masters, torch.Tensor) else torch.stack(list(masters))


def _like(gradient_MNK: torch.Tensor, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """Masters' gradients in the form in which the masters were given."""
    return [gradient_MNK.view(tensors[0].shape)] if len(tensors) == 1 else gradient_MNK.unbind()


def _tiles(rows: torch.Tensor, step: "Step", counts: Counts) -> Tiles:
    counts_L = counts.device if step.has_replicas else counts.device[: step.num_masters]
    return make_tiles(counts_L, step.num_masters, rows.shape[0], block_rows(rows.device))


class _KernelLinear(torch.autograd.Function):
    """Rows times both storages' weights by the Triton kernels."""

    @staticmethod
    def forward(ctx, rows_RK, step, name, counts, *masters):
        ctx.step, ctx.name, ctx.tiles = step, name, _tiles(rows_RK, step, counts)
        ctx.save_for_backward(rows_RK, *masters)
        return dual_forward(rows_RK, _stacked(masters), step.slots(name), ctx.tiles)

    @staticmethod
    def backward(ctx, grad_RN):
        rows_RK, *masters = ctx.saved_tensors
        step, name = ctx.step, ctx.name
        grad_RN = grad_RN.contiguous()
        grad_rows = None
        if ctx.needs_input_grad[0]:
            grad_rows = dual_dgrad(grad_RN, _stacked(masters), step.slots(name), ctx.tiles)
        if not any(ctx.needs_input_grad[4:]):
            return grad_rows, None, None, None, *[None] * len(masters)
        slots = step.gradient_slots(name)
        gradient = dual_wgrad(grad_RN, rows_RK, ctx.tiles, step.num_masters, masters[0].dtype, slots)
        grads = _like(gradient, masters)
        step.send_gradients(name, grads)
        return grad_rows, None, None, None, *grads


class _KernelMLP(torch.autograd.Function):
    """SwiGLU experts from both storages by the Triton kernels. Saves the rows, and gate and up."""

    @staticmethod
    def forward(ctx, rows_RD, step, gate_up_name, down_name, counts, num_gate_up, make_rows, weights_R, *masters):
        gate_up, down = masters[:num_gate_up], masters[num_gate_up:]
        ctx.step, ctx.names, ctx.num_gate_up, ctx.make_rows = step, (gate_up_name, down_name), num_gate_up, make_rows
        ctx.tiles = _tiles(rows_RD, step, counts)
        slots, arrivals = step.coming_slots(gate_up_name)  # they arrive behind the masters' product
        act_RI, hidden_RI = dual_swiglu_forward(rows_RD, _stacked(gate_up), slots, ctx.tiles, arrivals, weights_R)
        ctx.save_for_backward(rows_RD, hidden_RI, weights_R, *masters)
        return dual_forward(act_RI, _stacked(down), step.slots(down_name), ctx.tiles, make_rows=make_rows)

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, hidden_RI, weights_R, *masters = ctx.saved_tensors
        step, tiles, (gate_up_name, down_name) = ctx.step, ctx.tiles, ctx.names
        gate_up, down = masters[: ctx.num_gate_up], masters[ctx.num_gate_up :]
        want_rows, want_masters = ctx.needs_input_grad[0], ctx.needs_input_grad[8:]
        want_gate_up, want_down = any(want_masters[: len(gate_up)]), any(want_masters[len(gate_up) :])
        grad_RD = grad_RD.contiguous()
        # Every rank does these in one order.
        wanted = want_gate_up, want_down
        slots = [step.gradient_slots(name) if want else None for name, want in zip(ctx.names, wanted)]
        step.restore()
        slots_of_down, arrivals = step.coming_slots(down_name)
        if len(arrivals) == 1:  # few are there before the rows; a launch more would cost more than the wait
            arrivals.pop()()
        both, grad_weights = (_stacked(down), slots_of_down), None
        if weights_R is None:
            grad_hidden, act_RI = dual_swiglu_backward(grad_RD, *both, hidden_RI, tiles, arrivals)
        else:
            made = weighted_swiglu_backward(grad_RD, *both, hidden_RI, weights_R, tiles, arrivals)
            grad_hidden, act_RI, grad_weights = made
        grads: list[Sequence[torch.Tensor | None]] = [[None] * len(gate_up), [None] * len(down)]
        if want_down:
            grads[1] = _like(dual_wgrad(grad_RD, act_RI, tiles, step.num_masters, down[0].dtype, slots[1]), down)
            step.send_gradients(down_name, grads[1])  # beside the products that follow, while the links are idle
        del act_RI
        if want_gate_up:
            gradient = dual_wgrad(grad_hidden, rows_RD, tiles, step.num_masters, gate_up[0].dtype, slots[0])
            grads[0] = _like(gradient, gate_up)
            step.send_gradients(gate_up_name, grads[0])
        grad_rows = None
        if want_rows:
            slots_of_gate_up = step.slots(gate_up_name)  # which has had the products before to arrive
            grad_rows = dual_dgrad(grad_hidden, _stacked(gate_up), slots_of_gate_up, tiles, ctx.make_rows)
        return grad_rows, None, None, None, None, None, None, grad_weights, *grads[0], *grads[1]


def _loop_product(rows: torch.Tensor, weights: Sequence[torch.Tensor], counts: Sequence[int], transposed: bool):
    """Each expert's rows times its weight (transposed: [N, K] used as K -> N)."""
    width = weights[0].shape[0 if transposed else 1] if len(weights) else 0
    out = rows.new_empty(rows.shape[0], width)
    start = 0
    for weight, count in zip(weights, counts):
        if count:
            part = slice(start, start + count)
            torch.mm(rows[part], weight.T if transposed else weight, out=out[part])
            start += count
    out[start:] = 0
    return out


class _DualProduct(torch.autograd.Function):
    """rows_A times masters and rows_B times slots; both outputs. `grouped` chooses grouped_mm over the loop."""

    @staticmethod
    def forward(ctx, rows_A, rows_B, step, name, counts, grouped, *masters):
        ctx.step, ctx.name, ctx.counts, ctx.grouped = step, name, counts, grouped
        slots = step.slots(name)
        ctx.parts = slice(0, step.num_masters), slice(step.num_masters, None)
        ctx.save_for_backward(rows_A, rows_B, *masters)
        return _DualProduct.both(ctx, rows_A, rows_B, masters, slots, transposed=True)

    @staticmethod
    def both(ctx, rows_A, rows_B, masters, slots, transposed: bool):
        out = []
        for rows, weights, part in zip((rows_A, rows_B), (as_masters(masters, 2), slots), ctx.parts):
            if weights is None:
                out.append(rows.new_zeros(rows.shape[0], masters[0].shape[-2 if transposed else -1]))
            elif ctx.grouped and rows.shape[0]:
                weight = weights if isinstance(weights, torch.Tensor) else torch.stack(weights)
                weight = weight.transpose(-2, -1) if transposed else weight
                out.append(F.grouped_mm(rows, weight, offs=ctx.counts.offsets(part)))
            else:
                out.append(_loop_product(rows, list(weights), ctx.counts.host[part], transposed))
        return tuple(out)

    @staticmethod
    def backward(ctx, grad_A, grad_B):
        rows_A, rows_B, *masters = ctx.saved_tensors
        step = ctx.step
        grad_A, grad_B = grad_A.contiguous(), grad_B.contiguous()
        grad_rows: tuple = (None, None)
        if ctx.needs_input_grad[0] or ctx.needs_input_grad[1]:
            grad_rows = _DualProduct.both(ctx, grad_A, grad_B, masters, step.slots(ctx.name), transposed=False)
        if not any(ctx.needs_input_grad[6:]):
            return *grad_rows, None, None, None, None, *[None] * len(masters)
        grads = [torch.empty_like(t) for t in masters]
        slots = step.gradient_slots(ctx.name)
        bases = [_experts(grads, None), [] if slots is None else list(slots)]
        for grad, rows, destinations, part in zip((grad_A, grad_B), (rows_A, rows_B), bases, ctx.parts):
            counts = ctx.counts.host[part]
            products: Sequence[torch.Tensor] | None = None
            if ctx.grouped and rows.shape[0] and destinations:
                products = F.grouped_mm(grad.transpose(0, 1), rows, offs=ctx.counts.offsets(part)).unbind()
            start = 0
            for index, (destination, count) in enumerate(zip(destinations, counts)):
                rows_of_expert = slice(start, start + count)
                start += count
                if count == 0:  # the grouped product leaves its slice of an empty group unwritten on some versions
                    destination.zero_()
                elif products is not None:
                    destination.copy_(products[index])
                else:
                    product_into(destination, grad[rows_of_expert].T, rows[rows_of_expert])
        step.send_gradients(ctx.name, grads)
        return *grad_rows, None, None, None, None, *grads


def _product(rows: Sequence[torch.Tensor], counts: Counts, attached: "Attached", kernel: str) -> list[torch.Tensor]:
    rows_A, rows_B = rows
    choice = choose_grouped_linear(rows_A.device, rows_A.dtype, kernel)
    grouped = choice.fn is not loop_grouped_linear
    return _DualProduct.apply(rows_A, rows_B, attached.step, attached.name, counts, grouped, *attached.tensors)


def _split(rows: torch.Tensor, step: "Step", counts: Counts) -> Sequence[torch.Tensor]:
    """Rows of masters and rows of replicas (and of nobody)."""
    first = sum(counts.host[: step.num_masters])
    return rows.split([first, rows.shape[0] - first])


class _DualAddBias(torch.autograd.Function):
    """Adds each row's expert's bias to the row, in place."""

    @staticmethod
    def forward(ctx, rows_RN, step, name, counts, *masters):
        ctx.step, ctx.name, ctx.counts = step, name, counts
        ctx.mark_dirty(rows_RN)
        ctx.save_for_backward(*masters)
        for rows, bias in zip(_by_expert(rows_RN, counts), _experts(masters, step.slots(name), 1)):
            rows.add_(bias)
        return rows_RN

    @staticmethod
    def backward(ctx, grad_RN):
        masters = ctx.saved_tensors
        if not any(ctx.needs_input_grad[4:]):
            return grad_RN, None, None, None, *[None] * len(masters)
        grads = [torch.empty_like(t) for t in masters]
        destinations = _experts(grads, ctx.step.gradient_slots(ctx.name), 1)
        for rows, destination in zip(_by_expert(grad_RN, ctx.counts), destinations):
            destination.copy_(rows.sum(0, dtype=torch.float32))
        ctx.step.send_gradients(ctx.name, grads)
        return grad_RN, None, None, None, *grads


def _by_expert(rows: torch.Tensor, counts: Counts) -> Sequence[torch.Tensor]:
    """The rows of each local physical expert, then those of nobody."""
    return rows.split([*counts.host, rows.shape[0] - sum(counts.host)])


def dual_add_bias(rows_RN: torch.Tensor, counts: Counts, bias: "Attached") -> torch.Tensor:
    """The rows, which change in place, plus the bias [N] of their local physical expert. Differentiable in both."""
    return _DualAddBias.apply(rows_RN, bias.step, bias.name, counts, *bias.tensors)


def dual_linear(rows_RK: torch.Tensor, counts: Counts, attached: "Attached", kernel: str = "auto") -> torch.Tensor:
    """rows_RN: each row times the weight [N, K] of its local physical expert. Differentiable in rows and masters."""
    if choose_grouped_linear(rows_RK.device, rows_RK.dtype, kernel).name == "triton":
        return _KernelLinear.apply(rows_RK, attached.step, attached.name, counts, *attached.tensors)
    return torch.cat(_product(_split(rows_RK, attached.step, counts), counts, attached, kernel))


def dual_mlp(
    rows_RD: torch.Tensor,
    counts: Counts,
    gate_up: "Attached",
    down: "Attached",
    kernel: str = "auto",
    make_rows: RowMaker | None = None,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """SwiGLU experts, gate rows first in `gate_up` [2 * I, D]; `down` is [D, I]. The `triton` form writes its result
    and the rows' gradient to what `make_rows` makes. `weights_R` (float32) multiply the outputs."""
    step = gate_up.step
    choice = choose_grouped_linear(rows_RD.device, rows_RD.dtype, kernel)
    names, number = (gate_up.name, down.name), len(gate_up.tensors)
    if choice.name == "triton":
        tensors = *gate_up.tensors, *down.tensors
        return _KernelMLP.apply(rows_RD, step, *names, counts, number, make_rows, weights_R, *tensors)
    if weights_R is not None:
        out = dual_mlp(rows_RD, counts, gate_up, down, kernel)
        return (out * weights_R[:, None]).to(out.dtype)
    if choice.fn is loop_grouped_linear:
        here = counts.host if step.has_replicas else counts.host[: step.num_masters]
        return _FusedMLP.apply(rows_RD, step, *names, here, number, *gate_up.tensors, *down.tensors)
    hidden = _product(_split(rows_RD, step, counts), counts, gate_up, kernel)
    parts = []
    for part in hidden:
        gate, up = part.chunk(2, dim=-1)
        parts.append(F.silu(gate) * up)
    return torch.cat(_product(parts, counts, down, kernel))
