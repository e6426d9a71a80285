"""Grouped products over weights in two storages, and the SwiGLU experts that are made of them: operators and autograd.

The operators wrap the Triton kernels; the plain forms they are compared with are in `grouped_linear` and `grouped_mlp`.
They read the counts on the device (`Tiles`), synchronize nothing, add in a fixed order, and can be captured in a CUDA
graph. Rows past `tiles.offsets_L1[-1]` belong to nobody: they reach no result, and their outputs are unspecified.
Experts without rows get gradients of exactly 0.

Weights have their elements in order within an expert, slots may lie further apart. The kernels use tensor descriptors
where the device has them and all row lengths are multiples of 16 bytes, otherwise plain pointers.

Shapes: R rows sorted by physical expert, M masters then S slots, N x K one expert's weight (y = x W^T), D model
features, I inner features.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from equipoise.kernels.operators import operator
from equipoise.kernels.rows import RowMaker
from equipoise.kernels.tiles import Tiles, make_tiles
from equipoise.kernels.tuning import Block, block_rows, choose_block

_TILES = "Tensor offsets_L1, Tensor expert_W, Tensor row_W, Tensor num_3, Tensor order_L, SymInt block_rows"
"""`Tiles` in an operator's schema."""


def _check_weights(masters: torch.Tensor, slots: torch.Tensor | None) -> None:
    for name, weight in (("masters", masters), ("slots", slots)):
        if weight is None:
            continue
        if weight.shape[1:] != masters.shape[1:] or weight.dtype != masters.dtype:
            raise ValueError(f"{name} are {tuple(weight.shape)} {weight.dtype}, masters {tuple(masters.shape)}")
        if weight.shape[0] == 0 or not (weight.is_contiguous() or weight[0].is_contiguous()):
            raise ValueError(f"{name} {tuple(weight.shape)} must exist and have each matrix contiguous")


def _block(kernel: str, rows: torch.Tensor, N: int, K: int, num_experts: int, descriptors: bool) -> Block:
    return choose_block(rows.device, kernel, N, K, rows.shape[0], num_experts, descriptors, rows.element_size())


def _gemm(
    rows_RC: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    bias_MN: torch.Tensor | None,
    bias_SN: torch.Tensor | None,
    tiles: Tiles,
    transposed: bool,
    out: torch.Tensor | None = None,
    arrivals: Sequence[Callable[[], None]] = (),
) -> torch.Tensor:
    from equipoise.kernels.grouped_launch_triton import can_describe, has_descriptors, launch_gemm

    _check_weights(masters, slots)
    rows_RC = rows_RC.contiguous()
    N, K = masters.shape[1:]
    out = rows_RC.new_empty(rows_RC.shape[0], N if transposed else K) if out is None else out
    if rows_RC.shape[0] == 0:
        for wait in arrivals:
            wait()
        return out
    descriptors = has_descriptors(rows_RC.device) and can_describe(rows_RC, masters, slots, out)
    block = _block("forward" if transposed else "dgrad", rows_RC, N, K, tiles.order_L.shape[0], descriptors)
    rest = out, tiles, transposed, block, descriptors
    launch_gemm(rows_RC, masters, None if arrivals else slots, bias_MN, None if arrivals else bias_SN, *rest)
    for number, wait in enumerate(arrivals, 1):
        wait()
        half = 0 if len(arrivals) == 1 else number
        launch_gemm(rows_RC, masters, slots, bias_MN, bias_SN, *rest, masters_too=False, half=half)
    return out


@operator(
    "dual_gemm",
    schema="(Tensor rows_RC, Tensor masters, Tensor? slots, Tensor? bias_MN, Tensor? bias_SN, "
    f"{_TILES}, bool transposed) -> Tensor",
)
def _dual_gemm(rows_RC, masters, slots, bias_MN, bias_SN, *tiles_transposed):
    *tiles, transposed = tiles_transposed
    return _gemm(rows_RC, masters, slots, bias_MN, bias_SN, Tiles(*tiles), transposed)


@torch.library.register_fake("equipoise::dual_gemm")
def _(rows_RC, masters, slots, bias_MN, bias_SN, *tiles_transposed):
    return rows_RC.new_empty(rows_RC.shape[0], masters.shape[1 if tiles_transposed[-1] else 2])


def _wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    out_slots: torch.Tensor | None,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    num_masters: int,
    dtype: torch.dtype,
    add: bool,
) -> torch.Tensor:
    from equipoise.kernels.grouped_launch_triton import can_describe, has_descriptors

    (R, N), K = grad_RN.shape, rows_RK.shape[1]
    grad_RN, rows_RK = grad_RN.contiguous(), rows_RK.contiguous()
    if R == 0:
        if out_slots is not None and not add:
            out_slots.zero_()
        return rows_RK.new_zeros(num_masters, N, K, dtype=dtype)
    num_experts = num_masters if out_slots is None else order_L.shape[0]
    descriptors = has_descriptors(rows_RK.device) and can_describe(grad_RN, rows_RK)
    block = _block("wgrad", rows_RK, N, K, num_experts, descriptors)
    return run_wgrad(grad_RN, rows_RK, out_slots, offsets_L1, order_L, num_masters, dtype, block, add, descriptors)


def run_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    out_slots: torch.Tensor | None,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    num_masters: int,
    dtype: torch.dtype,
    block: Block,
    add: bool,
    descriptors: bool,
) -> torch.Tensor:
    """Masters' gradients; by one launch with the replicas', or by `grouped_mm`, and then one for replicas alone."""
    from equipoise.kernels.grouped_launch_triton import launch_wgrad

    theirs = block.grouped_mm and dtype == rows_RK.dtype
    if theirs:
        out = F.grouped_mm(grad_RN.t(), rows_RK, offs=offsets_L1[1 : num_masters + 1])
    else:
        out = rows_RK.new_empty(num_masters, grad_RN.shape[1], rows_RK.shape[1], dtype=dtype)
    # Some versions of grouped_mm leave the slice of an empty group unwritten: the launch writes it.
    launch_wgrad(grad_RN, rows_RK, out, out_slots, offsets_L1, order_L, block, add, not theirs, descriptors)
    return out


@operator("dual_wgrad", mutates_args=("out_slots",))
def _dual_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    out_slots: torch.Tensor,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    num_masters: int,
    dtype: torch.dtype,
    add: bool,
) -> torch.Tensor:
    return _wgrad(grad_RN, rows_RK, out_slots, offsets_L1, order_L, num_masters, dtype, add)


@operator("masters_wgrad")
def _masters_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    num_masters: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """An operator of its own: Inductor of torch 2.11 fails on one that changes an argument which is None."""
    return _wgrad(grad_RN, rows_RK, None, offsets_L1, order_L, num_masters, dtype, False)


@torch.library.register_fake("equipoise::dual_wgrad")
def _(grad_RN, rows_RK, out_slots, offsets_L1, order_L, num_masters, dtype, add):
    return rows_RK.new_empty(num_masters, grad_RN.shape[1], rows_RK.shape[1], dtype=dtype)


@torch.library.register_fake("equipoise::masters_wgrad")
def _(grad_RN, rows_RK, offsets_L1, order_L, num_masters, dtype):
    return rows_RK.new_empty(num_masters, grad_RN.shape[1], rows_RK.shape[1], dtype=dtype)


@operator(
    "dual_swiglu_forward",
    schema=f"(Tensor rows_RD, Tensor masters, Tensor? slots, Tensor? weights_R, {_TILES}) -> (Tensor, Tensor)",
)
def _dual_swiglu_forward(rows_RD, masters, slots, weights_R, *tiles):
    return _swiglu_forward(rows_RD, masters, slots, Tiles(*tiles), (), weights_R)


def _swiglu_forward(
    rows_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    tiles: Tiles,
    arrivals: Sequence[Callable[[], None]],
    weights_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    from equipoise.kernels.grouped_launch_triton import launch_swiglu_rows

    hidden = _gemm(rows_RD, masters, slots, None, None, tiles, transposed=True, arrivals=arrivals)
    act = hidden.new_empty(hidden.shape[0], hidden.shape[1] // 2)
    if hidden.shape[0]:
        launch_swiglu_rows(hidden, act, tiles.offsets_L1, weights_R)
    return act, hidden


@torch.library.register_fake("equipoise::dual_swiglu_forward")
def _(rows_RD, masters, slots, weights_R, *tiles):
    R, inner = rows_RD.shape[0], masters.shape[1] // 2
    return rows_RD.new_empty(R, inner), rows_RD.new_empty(R, 2 * inner)


@operator(
    "dual_swiglu_backward",
    schema="(Tensor grad_RD, Tensor masters, Tensor? slots, Tensor hidden, Tensor? weights_R, "
    f"{_TILES}) -> (Tensor, Tensor, Tensor)",
)
def _dual_swiglu_backward(grad_RD, masters, slots, hidden, weights_R, *tiles):
    return _swiglu_backward(grad_RD, masters, slots, hidden, weights_R, Tiles(*tiles), ())


def _swiglu_backward(
    grad_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    hidden: torch.Tensor,
    weights_R: torch.Tensor | None,
    tiles: Tiles,
    arrivals: Sequence[Callable[[], None]],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from equipoise.kernels.grouped_launch_triton import launch_swiglu_rows_backward

    # `act` holds the activation's gradient until the next launch.
    act = _gemm(grad_RD, masters, slots, None, None, tiles, transposed=False, arrivals=arrivals)
    grad_hidden, R = torch.empty_like(hidden), hidden.shape[0]
    grad_weights_R = hidden.new_zeros(0 if weights_R is None else R, dtype=torch.float32)
    if R:
        launch_swiglu_rows_backward(hidden, act, grad_hidden, tiles.offsets_L1, weights_R, grad_weights_R)
    return grad_hidden, act, grad_weights_R


@torch.library.register_fake("equipoise::dual_swiglu_backward")
def _(grad_RD, masters, slots, hidden, weights_R, *tiles):
    R, inner = hidden.shape[0], masters.shape[2]
    grad_weights_R = hidden.new_empty(0 if weights_R is None else R, dtype=torch.float32)
    return torch.empty_like(hidden), hidden.new_empty(R, inner), grad_weights_R


def _made(make_rows: RowMaker, like_RC: torch.Tensor, width: int) -> torch.Tensor:
    out = make_rows(like_RC.dtype)
    if out.shape != (like_RC.shape[0], width) or out.dtype != like_RC.dtype or not out.is_contiguous():
        raise ValueError(f"memory made for {like_RC.dtype} {(like_RC.shape[0], width)}: {out.dtype} {tuple(out.shape)}")
    return out


def dual_forward(
    rows_RK: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    tiles: Tiles,
    bias_MN: torch.Tensor | None = None,
    bias_SN: torch.Tensor | None = None,
    make_rows: RowMaker | None = None,
) -> torch.Tensor:
    """out_RN: each row times its expert's weight [N, K], plus its expert's bias if there are biases."""
    if make_rows is not None:
        out = _made(make_rows, rows_RK, masters.shape[1])
        return _gemm(rows_RK, masters, slots, bias_MN, bias_SN, tiles, True, out)
    return _dual_gemm(rows_RK, masters, slots, bias_MN, bias_SN, *tiles, transposed=True)


def dual_dgrad(
    grad_RN: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    tiles: Tiles,
    make_rows: RowMaker | None = None,
) -> torch.Tensor:
    """grad_rows_RK: the rows' gradient of `dual_forward`."""
    if make_rows is not None:
        return _gemm(grad_RN, masters, slots, None, None, tiles, False, _made(make_rows, grad_RN, masters.shape[2]))
    return _dual_gemm(grad_RN, masters, slots, None, None, *tiles, transposed=False)


def dual_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    tiles: Tiles,
    num_masters: int,
    dtype: torch.dtype | None = None,
    out_slots: torch.Tensor | None = None,
    add: bool = False,
) -> torch.Tensor:
    """The masters' gradients [M, N, K]; the replicas' go into `out_slots`.

    Args:
        grad_RN, rows_RK: the outputs' gradient, and the rows that went in.
        tiles: its `offsets_L1` and `order_L` cover masters and slots.
        num_masters: M.
        dtype: of the result: the rows' (default) or FP32.
        out_slots: FP32 [S, N, K]; None where no replica has rows.
        add: whether to add to what `out_slots` holds, rather than replace it.
    """
    offsets_L1, order_L, dtype = tiles.offsets_L1, tiles.order_L, dtype or rows_RK.dtype
    if out_slots is None and order_L.shape[0] > num_masters:
        offsets_L1 = offsets_L1[: num_masters + 1]
        order_L = order_L[:num_masters]
    if out_slots is None:
        return _masters_wgrad(grad_RN, rows_RK, offsets_L1, order_L, num_masters, dtype)
    return _dual_wgrad(grad_RN, rows_RK, out_slots, offsets_L1, order_L, num_masters, dtype, add)


def dual_swiglu_forward(
    rows_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    tiles: Tiles,
    arrivals: Sequence[Callable[[], None]] = (),
    weights_R: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up [R, I], and gate and up [R, 2 * I] for the backward; weights [., 2 * I, D], gate rows first.

    `weights_R`: FP32, the first result is multiplied by its row's.
    `arrivals`: what has to be called before slots are read, or before the first and before the second half of them
    are (`first_half`). The masters' product is then launched before it, the replicas' after it; same bits, and the ends
    of more launches, where multiprocessors run out of tiles.
    """
    if arrivals:
        return _swiglu_forward(rows_RD, masters, slots, tiles, arrivals, weights_R)
    return _dual_swiglu_forward(rows_RD, masters, slots, weights_R, *tiles)


def dual_swiglu_backward(
    grad_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    hidden: torch.Tensor,
    tiles: Tiles,
    arrivals: Sequence[Callable[[], None]] = (),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of `hidden` [R, 2 * I], and silu(gate) * up [R, I] for the gradient of `down`.

    Args:
        grad_RD: gradient of the experts' outputs.
        masters, slots: `down` [., D, I].
        hidden: gate and up, from `dual_swiglu_forward`.
        tiles: the forward's.
        arrivals: of slots, as there.
    """
    if arrivals:
        return _swiglu_backward(grad_RD, masters, slots, hidden, None, tiles, arrivals)[:2]
    return _dual_swiglu_backward(grad_RD, masters, slots, hidden, None, *tiles)[:2]


def weighted_swiglu_backward(
    grad_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    hidden: torch.Tensor,
    weights_R: torch.Tensor,
    tiles: Tiles,
    arrivals: Sequence[Callable[[], None]] = (),
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same for rows with weights: gradient of `hidden`, the weighted activation, and the weights' gradient FP32 [R]
    (0 for rows that belong to nobody)."""
    if arrivals:
        return _swiglu_backward(grad_RD, masters, slots, hidden, weights_R, tiles, arrivals)
    return _dual_swiglu_backward(grad_RD, masters, slots, hidden, weights_R, *tiles)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RK, weight_ENK, *tables):
        ctx.block_rows = tables[-1]
        ctx.save_for_backward(rows_RK, weight_ENK, *tables[:-1])
        return dual_forward(rows_RK, weight_ENK, None, Tiles(*tables))

    @staticmethod
    def backward(ctx, grad_RN):
        rows_RK, weight_ENK, *tables = ctx.saved_tensors
        tiles = Tiles._make([*tables, ctx.block_rows])
        want_rows, want_weight = ctx.needs_input_grad[:2]
        grad_RN = grad_RN.contiguous()
        grad_rows = dual_dgrad(grad_RN, weight_ENK, None, tiles) if want_rows else None
        grad_weight = dual_wgrad(grad_RN, rows_RK, tiles, weight_ENK.shape[0]) if want_weight else None
        return grad_rows, grad_weight, *[None] * 6


class _GroupedMLP(torch.autograd.Function):
    """Saves the rows and the first product's results; the activation is made again, the last product never needed."""

    @staticmethod
    def forward(ctx, rows_RD, gate_up_EID, down_EDI, weights_R, make_rows, *tables):
        tiles = Tiles(*tables)
        act_RI, hidden = dual_swiglu_forward(rows_RD, gate_up_EID, None, tiles, weights_R=weights_R)
        ctx.block_rows, ctx.make_rows = tiles.block_rows, make_rows
        ctx.save_for_backward(rows_RD, gate_up_EID, down_EDI, weights_R, hidden, *tables[:-1])
        return dual_forward(act_RI, down_EDI, None, tiles, make_rows=make_rows)

    @staticmethod
    def backward(ctx, grad_RD):
        rows_RD, gate_up_EID, down_EDI, weights_R, hidden, *tables = ctx.saved_tensors
        tiles = Tiles._make([*tables, ctx.block_rows])
        want_rows, want_gate_up, want_down = ctx.needs_input_grad[:3]
        grad_RD, E, grad_weights = grad_RD.contiguous(), down_EDI.shape[0], None
        if weights_R is None:
            grad_hidden, act_RI = dual_swiglu_backward(grad_RD, down_EDI, None, hidden, tiles)
        else:
            made = weighted_swiglu_backward(grad_RD, down_EDI, None, hidden, weights_R, tiles)
            grad_hidden, act_RI, grad_weights = made
        grad_down = dual_wgrad(grad_RD, act_RI, tiles, E) if want_down else None
        del act_RI
        grad_gate_up = dual_wgrad(grad_hidden, rows_RD, tiles, E) if want_gate_up else None
        grad_rows = dual_dgrad(grad_hidden, gate_up_EID, None, tiles, ctx.make_rows) if want_rows else None
        return grad_rows, grad_gate_up, grad_down, grad_weights, *[None] * 7


def _tiles(rows: torch.Tensor, counts_E: torch.Tensor) -> Tiles:
    return make_tiles(counts_E, counts_E.shape[0], rows.shape[0], block_rows(rows.device))


def triton_grouped_linear(rows_RK: torch.Tensor, weight_ENK: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """The Triton form of `loop_grouped_linear`, with its contract; no host sync."""
    return _GroupedLinear.apply(rows_RK, weight_ENK.contiguous(), *_tiles(rows_RK, counts_E))


def triton_grouped_mlp(
    rows_RD: torch.Tensor,
    gate_up_EID: torch.Tensor,
    down_EDI: torch.Tensor,
    counts_E: torch.Tensor,
    make_rows: RowMaker | None = None,
    weights_R: torch.Tensor | None = None,
) -> torch.Tensor:
    """The Triton form of `plain_grouped_mlp`, with its contract; no host sync. Saves rows and gate and up. The output
    and the rows' gradient are written to what `make_rows` makes."""
    tables = _tiles(rows_RD, counts_E)
    gate_up_EID, down_EDI = gate_up_EID.contiguous(), down_EDI.contiguous()
    weights_R = None if weights_R is None else weights_R.float().contiguous()
    return _GroupedMLP.apply(rows_RD, gate_up_EID, down_EDI, weights_R, make_rows, *tables)
