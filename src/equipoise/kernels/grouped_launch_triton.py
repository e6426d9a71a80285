"""Launches of the grouped kernels: descriptors or pointers, one program per multiprocessor. Writes into given outputs.

Descriptors are made on the host and travel as kernel arguments, so no launch needs Triton's scratch allocator, which is
a context variable that other threads (autograd's) do not have and that others overwrite.
"""

import logging
from functools import lru_cache

import torch
import triton
from triton.tools.tensor_descriptor import TensorDescriptor

from equipoise.kernels.grouped_gemm_triton import dual_gemm_kernel
from equipoise.kernels.grouped_wgrad_triton import dual_wgrad_kernel
from equipoise.kernels.swiglu_triton import (
    swiglu_backward_kernel,
    swiglu_forward_kernel,
    swiglu_rows_backward_kernel,
    swiglu_rows_kernel,
)
from equipoise.kernels.tiles import Tiles, plain_tiles
from equipoise.kernels.tuning import INTERPRETED, Block

logger = logging.getLogger(__name__)

RAGGED_ROWS = 1 << 30
RAGGED_OUTER = 0x7FFF0000


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a device; few where programs run one after another."""
    if device.type == "cpu":
        return 3
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


def dense(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(x, list(x.shape), list(x.stride()), block)


def ragged(x: torch.Tensor, block: list[int]) -> TensorDescriptor:
    """Rows of groups, whose ends are given at each access: see `ragged_coordinates`. `block` without the two extras."""
    row = x.stride(0)
    shape = [RAGGED_OUTER, RAGGED_OUTER, RAGGED_ROWS, *x.shape[1:]]
    return TensorDescriptor(x, shape, [2**34 - row, row, *x.stride()], [1, 1, *block])


def can_describe(*tensors: torch.Tensor | None) -> bool:
    """Whether hardware descriptors can hold these: 16-byte aligned bases and strides, something to describe."""
    for x in tensors:
        if x is None:
            continue
        size = x.element_size()
        if x.data_ptr() % 16 or any(stride * size % 16 for stride in x.stride()[:-1]) or x.numel() == 0:
            return False
        if x.shape[0] > RAGGED_ROWS:
            return False
    return True


@lru_cache
def has_descriptors(device: torch.device) -> bool:
    """Whether a kernel with descriptors runs on this device and computes what it should."""
    if device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < 9:
        return False  # Triton would turn them into pointers, worse than the kernels' own
    rows = torch.arange(24 * 16, device=device, dtype=torch.float32).view(24, 16).div(100)
    weight, out = rows[:16].clone()[None], torch.zeros(24, 16, device=device)
    tiles = plain_tiles(torch.tensor([20], device=device), 1, 24, 16)
    try:
        launch_gemm(rows, weight, None, None, None, out, tiles, True, INTERPRETED, True)
    except Exception as error:  # compilers and drivers raise what they like
        logger.info("grouped kernels use pointers on %s: descriptors do not run: %s", device, error)
        return False
    return torch.allclose(out[:20], rows[:20] @ weight[0].T, rtol=1e-2) and not out[20:].any()


def _tables(tiles: Tiles) -> tuple[torch.Tensor, ...]:
    return tiles.offsets_L1, tiles.expert_W, tiles.row_W, tiles.num_2


def launch_gemm(
    rows_RC: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    bias: torch.Tensor | None,
    slot_bias: torch.Tensor | None,
    out_RO: torch.Tensor,
    tiles: Tiles,
    transposed: bool,
    block: Block,
    descriptors: bool,
) -> None:
    """out_RO = rows_RC times [O, C] weights if transposed, else [C, O] ones."""
    C, O = rows_RC.shape[1], out_RO.shape[1]
    BM, BN, BK = tiles.block_rows, block.columns, block.depth
    rows, weights, out = rows_RC, [masters, slots], out_RO
    if descriptors:
        rows = dense(rows_RC, [BM, BK])
        shape = [1, BN, BK] if transposed else [1, BK, BN]
        weights = [None if w is None else dense(w, shape) for w in weights]
        out = ragged(out_RO, [BM, BN // 2 if block.split else BN])
    dual_gemm_kernel[(block.programs * num_multiprocessors(rows_RC.device),)](
        rows, weights[0], weights[1], bias, slot_bias, out, *_tables(tiles), rows_RC.shape[0],
        masters.stride(0), 0 if slots is None else slots.stride(0),
        M=masters.shape[0], C=C, O=O, TRANSPOSED=transposed, HAS_SLOTS=slots is not None, HAS_BIAS=bias is not None,
        DESC=descriptors, BM=BM, BN=BN, BK=BK, GROUP=block.group, FLATTEN=block.flatten, SPLIT=block.split,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


ALL, MASTERS_ALONE, SLOTS_ALONE = 0, 1, 2
"""Whose gradients a launch makes, as the kernel numbers them."""


def launch_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    out_masters: torch.Tensor,
    out_slots: torch.Tensor | None,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    block: Block,
    add: bool,
    share: int,
    descriptors: bool,
) -> None:
    """Gradients of masters, and of slots if there are any; SLOTS_ALONE still writes the zeros of idle masters."""
    M, N, K = out_masters.shape
    BM, BN, BT = block.rows, block.columns, block.depth
    grad, rows, masters, slots = grad_RN, rows_RK, out_masters, out_slots
    num_experts = order_L.shape[0]
    if share == SLOTS_ALONE:
        num_experts = 0 if out_slots is None else out_slots.shape[0]
    elif out_slots is None:
        share = MASTERS_ALONE
    if out_slots is None:
        slots = out_masters  # never written: code for slots is compiled all the same, and needs a pointer
    # Adding in memory is the hardware's; the interpreter has no such thing.
    describe_slots = out_slots is not None and block.reduce and descriptors and rows_RK.device.type != "cpu"
    describe_slots = describe_slots and can_describe(out_slots)
    describe_out = (
        descriptors and share != SLOTS_ALONE and out_masters.element_size() == 2 and can_describe(out_masters)
    )
    if descriptors:
        grad, rows = ragged(grad_RN, [BT, BM]), ragged(rows_RK, [BT, BN])
    if describe_out:
        masters = dense(out_masters, [1, BM, BN // 2 if block.split else BN])
    if describe_slots and out_slots is not None:
        slots = dense(out_slots, [1, BM, BN // 8])
    dual_wgrad_kernel[(block.programs * num_multiprocessors(rows_RK.device),)](
        grad, rows, masters, slots, offsets_L1, order_L, 0 if out_slots is None else out_slots.stride(0),
        num_experts, M, N=N, K=K, MASTERS=triton.next_power_of_2(M), SHARE=share, ADD=add, DESC=descriptors,
        DESC_OUT=describe_out, DESC_SLOTS=describe_slots, BM=BM, BN=BN, BT=BT, GROUP=block.group,
        FLATTEN=block.flatten, SPLIT=block.split, SNAKE=block.snake,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def launch_swiglu_forward(
    rows_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    hidden: torch.Tensor,
    act_RI: torch.Tensor,
    tiles: Tiles,
    block: Block,
    descriptors: bool,
) -> None:
    """Weights [., 2 * I, D]; hidden [R, 2 * I]."""
    (R, D), I = rows_RD.shape, act_RI.shape[1]
    BM, BN, BK = tiles.block_rows, block.columns, block.depth
    rows, weights, out_hidden, act = rows_RD, [masters, slots], hidden, act_RI
    if descriptors:
        rows = dense(rows_RD, [BM, BK])
        weights = [None if w is None else dense(w.unflatten(1, (2, I)), [1, 2, BN, BK]) for w in weights]
        out_hidden = ragged(hidden.view(R, 2, I), [BM, 1, BN])
        act = ragged(act_RI, [BM, BN])
    swiglu_forward_kernel[(block.programs * num_multiprocessors(rows_RD.device),)](
        rows, weights[0], weights[1], out_hidden, act, *_tables(tiles), R, masters.stride(0),
        0 if slots is None else slots.stride(0), M=masters.shape[0], D=D, I=I, HAS_SLOTS=slots is not None,
        DESC=descriptors, BM=BM, BN=BN, BK=BK, GROUP=block.group, FLATTEN=block.flatten,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def launch_swiglu_backward(
    grad_RD: torch.Tensor,
    masters: torch.Tensor,
    slots: torch.Tensor | None,
    hidden: torch.Tensor,
    grad_hidden: torch.Tensor,
    act_RI: torch.Tensor,
    tiles: Tiles,
    block: Block,
    descriptors: bool,
) -> None:
    """Weights [., D, I]; hidden and its gradient [R, 2 * I]."""
    (R, D), I = grad_RD.shape, act_RI.shape[1]
    BM, BN, BK = tiles.block_rows, block.columns, block.depth
    grad, weights, read_hidden, out_hidden, act = grad_RD, [masters, slots], hidden, grad_hidden, act_RI
    if descriptors:
        width = BN // 2 if block.split else BN
        grad = dense(grad_RD, [BM, BK])
        weights = [None if w is None else dense(w, [1, BK, BN]) for w in weights]
        read_hidden = dense(hidden.view(R, 2, I), [BM, 1, width])
        out_hidden = ragged(grad_hidden.view(R, 2, I), [BM, 1, width])
        act = ragged(act_RI, [BM, width])
    swiglu_backward_kernel[(block.programs * num_multiprocessors(grad_RD.device),)](
        grad, weights[0], weights[1], read_hidden, out_hidden, act, *_tables(tiles), R, masters.stride(0),
        0 if slots is None else slots.stride(0), M=masters.shape[0], D=D, I=I, HAS_SLOTS=slots is not None,
        DESC=descriptors, BM=BM, BN=BN, BK=BK, GROUP=block.group, FLATTEN=block.flatten, SPLIT=block.split,
        num_warps=block.warps, num_stages=block.stages,
    )  # fmt: skip


def _rows_grid(hidden: torch.Tensor) -> tuple[int, int, int, int]:
    """Programs, blocks of columns, rows and columns of a block."""
    R, inner = hidden.shape[0], hidden.shape[1] // 2
    rows, columns = (16, 256) if hidden.device.type != "cpu" else (64, 64)
    num_columns = -(-inner // columns)
    return -(-R // rows) * num_columns, num_columns, rows, columns


def launch_swiglu_rows(hidden: torch.Tensor, act_RI: torch.Tensor, offsets_L1: torch.Tensor) -> None:
    programs, num_columns, rows, columns = _rows_grid(hidden)
    swiglu_rows_kernel[(programs,)](
        hidden, act_RI, offsets_L1[-1:], num_columns, I=act_RI.shape[1], BR=rows, BC=columns, num_warps=8
    )


def launch_swiglu_rows_backward(
    hidden: torch.Tensor, act_RI: torch.Tensor, grad_hidden: torch.Tensor, offsets_L1: torch.Tensor
) -> None:
    """`act_RI` holds the activation's gradient and then the activation."""
    programs, num_columns, rows, columns = _rows_grid(hidden)
    swiglu_rows_backward_kernel[(programs,)](
        hidden, act_RI, grad_hidden, offsets_L1[-1:], num_columns, I=act_RI.shape[1], BR=rows, BC=columns, num_warps=8
    )
