"""SwiGLU in Triton, over rows: the activation after the experts' first product, and its gradient after the last one's.

In the epilogues of the products, where gate and up need not be read again, both were tried on an H200: the forward was
no faster at any of four shapes, 128 to 1024 tokens per expert, and the backward slower at all of them.

Rows may have a weight each (a token's weight for the expert): the activation is multiplied by it, and so is the output.
The weight's gradient is then a sum over the I features of the activation, and needs no output of D features.

Shapes: R rows, I inner features; `hidden` is [R, 2 * I], gate first; weights are FP32 [R].
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_columns"])
def swiglu_rows_kernel(
    hidden, act, weights, end_ptr, num_columns, I: tl.constexpr, WEIGHTED: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """act = silu(gate) * up, times the row's weight if there are weights, over the rows before *end_ptr."""
    end = tl.load(end_ptr)
    row, column = tl.program_id(0) // num_columns * BR, tl.program_id(0) % num_columns * BC
    if row < end:
        rows, columns = row + tl.arange(0, BR), column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < I)[None, :]
        at = rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
        gate = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden + at + I, mask=mask, other=0.0).to(tl.float32)
        value = gate * tl.sigmoid(gate) * up
        if WEIGHTED:
            value *= tl.load(weights + rows, mask=rows < end, other=0.0)[:, None]
        tl.store(act + rows.to(tl.int64)[:, None] * I + columns[None, :], value.to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_columns"])
def swiglu_rows_backward_kernel(
    hidden, act, grad_hidden, end_ptr, num_columns, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """`act` holds its own gradient, which the activation replaces; grad_hidden comes from both."""
    end = tl.load(end_ptr)
    row, column = tl.program_id(0) // num_columns * BR, tl.program_id(0) % num_columns * BC
    if row < end:
        rows, columns = row + tl.arange(0, BR), column + tl.arange(0, BC)
        mask = (rows < end)[:, None] & (columns < I)[None, :]
        at = rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
        act_at = act + rows.to(tl.int64)[:, None] * I + columns[None, :]
        dtype = act.dtype.element_ty
        dact = tl.load(act_at, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(hidden + at + I, mask=mask, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
        tl.store(grad_hidden + at, dgate.to(dtype), mask=mask)
        tl.store(grad_hidden + at + I, (dact * silu).to(dtype), mask=mask)
        tl.store(act_at, (silu * up).to(dtype), mask=mask)


@triton.jit
def weighted_swiglu_rows_backward_kernel(
    hidden, act, grad_hidden, weights, grad_weights, end_ptr, I: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr
):
    """The same for rows with weights: `act` holds the gradient of what was made of it, and gets the weighted
    activation. A program has whole rows, for the sum over their features."""
    end = tl.load(end_ptr)
    row = tl.program_id(0) * BR
    if row < end:
        rows = row + tl.arange(0, BR)
        weight = tl.load(weights + rows, mask=rows < end, other=0.0)[:, None]
        products = tl.zeros([BR, BC], tl.float32)
        dtype = act.dtype.element_ty
        for column in range(0, I, BC):
            columns = column + tl.arange(0, BC)
            mask = (rows < end)[:, None] & (columns < I)[None, :]
            at = rows.to(tl.int64)[:, None] * (2 * I) + columns[None, :]
            act_at = act + rows.to(tl.int64)[:, None] * I + columns[None, :]
            dact = tl.load(act_at, mask=mask, other=0.0).to(tl.float32)
            gate = tl.load(hidden + at, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(hidden + at + I, mask=mask, other=0.0).to(tl.float32)
            sigmoid = tl.sigmoid(gate)
            silu = gate * sigmoid
            products += dact * silu * up
            dact *= weight
            dgate = dact * up * (sigmoid + silu * (1 - sigmoid))
            tl.store(grad_hidden + at, dgate.to(dtype), mask=mask)
            tl.store(grad_hidden + at + I, (dact * silu).to(dtype), mask=mask)
            tl.store(act_at, (silu * up * weight).to(dtype), mask=mask)
        tl.store(grad_weights + rows, tl.sum(products, 1), mask=rows < end)
