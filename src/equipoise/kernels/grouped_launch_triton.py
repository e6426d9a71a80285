"""Launches of the grouped kernels: descriptors or pointers, programs that walk over tiles. Writes into given outputs.

Alone on the device one program per multiprocessor is best. Balanced experts run beside transfers of replicas, which
hold some multiprocessors for a while. Programs that have to wait for one must not have a whole one's work before them,
so there are several, and the last ones are short.

Descriptors are made on the host and travel as kernel arguments, so no launch needs Triton's scratch allocator, which is
a context variable that other threads (autograd's) do not have and that others overwrite.
"""

import logging
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from triton.tools.tensor_descriptor import TensorDescriptor

from equipoise.kernels.grouped_gemm_triton import dual_gemm_kernel
from equipoise.kernels.grouped_wgrad_triton import SLOT_COLUMNS as _SLOT_COLUMNS
from equipoise.kernels.grouped_wgrad_triton import dual_wgrad_kernel
from equipoise.kernels.launching import launch
from equipoise.kernels.peers import padded
from equipoise.kernels.swiglu_triton import (
    swiglu_rows_backward_kernel,
    swiglu_rows_kernel,
    weighted_swiglu_rows_backward_kernel,
)
from equipoise.kernels.tiles import Tiles, plain_tiles
from equipoise.kernels.tuning import INTERPRETED, Block

logger = logging.getLogger(__name__)

SLOT_COLUMNS: int = _SLOT_COLUMNS.value
RAGGED_ROWS = 1 << 30
RAGGED_OUTER = 0x7FFF0000
SLICES, MOST_LEVELS = 8, 12
"""Of its launch, a program beside transfers does one of so many parts at most, but two tiles; levels of programs."""


@lru_cache
def num_multiprocessors(device: torch.device) -> int:
    """Of a device; few where programs run one after another."""
    if device.type == "cpu":
        return 3
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count


def beside_others() -> bool:
    """Whether other ranks may be at work on this one's slots while products run."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Division(NamedTuple):
    """How a launch's work is divided among programs: see `share_of_level`."""

    lanes: int
    levels: int = 1
    slices: int = 1


def divide(device: torch.device, block: Block, tiles: int, has_slots: bool) -> Division:
    """Of a launch over `tiles` tiles at most: in levels where other ranks may be at work on the slots."""
    lanes = block.programs * num_multiprocessors(device)
    if not (has_slots and beside_others()):
        return Division(lanes)
    turns = left = max(-(-tiles // lanes), 1)
    slices, levels = max(min(SLICES, turns // 2), 1), 0
    while left > 0 and levels < MOST_LEVELS:
        left, levels = left - min(-(-turns // slices), -(-left // 2)), levels + 1
    return Division(lanes, levels, slices)


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
    return tiles.offsets_L1, tiles.expert_W, tiles.row_W, tiles.num_3


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
    masters_too: bool = True,
    half: int = 0,
) -> None:
    """out_RO = rows_RC times [O, C] weights if transposed, else [C, O] ones; only slots' rows without `masters_too`, of
    them only those of the first or second half of the slots if `half` is 1 or 2."""
    C, O = rows_RC.shape[1], out_RO.shape[1]
    BM, BN, BK = tiles.block_rows, block.columns, block.depth
    rows, weights, out = rows_RC, [masters, slots], out_RO
    if descriptors:
        rows = dense(rows_RC, [BM, BK])
        shape = [1, BN, BK] if transposed else [1, BK, BN]
        weights = [None if w is None else dense(w, shape) for w in weights]
        out = ragged(out_RO, [BM, BN // 2 if block.split else BN])
    has_slots = tiles.offsets_L1.shape[0] - 1 > masters.shape[0]  # which may have a launch of their own
    lanes, levels, slices = divide(rows_RC.device, block, tiles.expert_W.shape[0] * -(-O // BN), has_slots)
    arguments = (
        rows, weights[0], weights[1], bias, slot_bias, out, *_tables(tiles), rows_RC.shape[0],
        masters.stride(0), 0 if slots is None else slots.stride(0), masters.shape[0], lanes, slices,
    )  # fmt: skip
    launch(
        dual_gemm_kernel, lanes * levels, arguments, block.warps,
        C=C, O=O, TRANSPOSED=transposed, HAS_MASTERS=masters_too, HAS_SLOTS=slots is not None,
        HALF=half, HAS_BIAS=bias is not None, DESC=descriptors, BM=BM, BN=BN, BK=BK, GROUP=block.group,
        FLATTEN=block.flatten, SPLIT=block.split, num_stages=block.stages,
    )  # fmt: skip


def launch_wgrad(
    grad_RN: torch.Tensor,
    rows_RK: torch.Tensor,
    out_masters: torch.Tensor,
    out_slots: torch.Tensor | None,
    offsets_L1: torch.Tensor,
    order_L: torch.Tensor,
    block: Block,
    add: bool,
    masters_too: bool,
    descriptors: bool,
) -> None:
    """Gradients of masters, and of slots if there are any; without `masters_too` only the zeros of idle masters."""
    M, N, K = out_masters.shape
    BM, BN, BT = block.rows, block.columns, block.depth
    grad, rows, masters, slots = grad_RN, rows_RK, out_masters, out_slots
    # Adding in memory is the hardware's; the interpreter has no such thing.
    describe_slots = descriptors and rows_RK.device.type != "cpu" and can_describe(out_slots)
    describe_slots = describe_slots and out_slots is not None and BN in (4 * SLOT_COLUMNS, 8 * SLOT_COLUMNS)
    describe_out = descriptors and masters_too and out_masters.element_size() == 2 and can_describe(out_masters)
    if descriptors:
        grad, rows = ragged(grad_RN, [BT, BM]), ragged(rows_RK, [BT, BN])
    if describe_out:
        masters = dense(out_masters, [1, BM, BN >> block.split])
    if describe_slots and out_slots is not None:
        slots = dense(out_slots, [1, BM, SLOT_COLUMNS])
    num_experts = M * masters_too + (0 if out_slots is None else out_slots.shape[0])
    num_tiles = num_experts * -(-N // BM) * -(-K // BN)
    lanes, levels, slices = divide(rows_RK.device, block, num_tiles, offsets_L1.shape[0] - 1 > M)
    arguments = (
        grad, rows, masters, slots, offsets_L1, order_L, 0 if out_slots is None else out_slots.stride(0),
        M, 0 if out_slots is None else out_slots.shape[0], lanes, slices,
    )  # fmt: skip
    launch(
        dual_wgrad_kernel, lanes * levels, arguments, block.warps, N=N, K=K,
        E_PAD=padded(max(M, num_experts - M * masters_too)), HAS_MASTERS=masters_too,
        HAS_SLOTS=out_slots is not None, ADD=add, DESC=descriptors, DESC_OUT=describe_out,
        DESC_SLOTS=describe_slots, BM=BM, BN=BN, BT=BT, GROUP=block.group, SPLIT=block.split, SNAKE=block.snake,
        num_stages=block.stages,
    )  # fmt: skip


def _rows_grid(hidden: torch.Tensor) -> tuple[int, int, int, int]:
    """Programs, blocks of columns, rows and columns of a block."""
    R, inner = hidden.shape[0], hidden.shape[1] // 2
    rows, columns = (16, 256) if hidden.device.type != "cpu" else (64, 64)
    num_columns = -(-inner // columns)
    return -(-R // rows) * num_columns, num_columns, rows, columns


def launch_swiglu_rows(
    hidden: torch.Tensor, act_RI: torch.Tensor, offsets_L1: torch.Tensor, weights_R: torch.Tensor | None = None
) -> None:
    programs, num_columns, rows, columns = _rows_grid(hidden)
    arguments = hidden, act_RI, weights_R, offsets_L1[-1:], num_columns
    launch(
        swiglu_rows_kernel, programs, arguments, 8,
        I=act_RI.shape[1], WEIGHTED=weights_R is not None, BR=rows, BC=columns,
    )  # fmt: skip


def launch_swiglu_rows_backward(
    hidden: torch.Tensor,
    act_RI: torch.Tensor,
    grad_hidden: torch.Tensor,
    offsets_L1: torch.Tensor,
    weights_R: torch.Tensor | None = None,
    grad_weights_R: torch.Tensor | None = None,
) -> None:
    """`act_RI` holds the activation's gradient and then the activation."""
    programs, num_columns, rows, columns = _rows_grid(hidden)
    if weights_R is not None:
        rows = max(rows // 4, 4)  # whole rows: as many programs as there are for parts of more of them
        launch(
            weighted_swiglu_rows_backward_kernel, -(-hidden.shape[0] // rows),
            (hidden, act_RI, grad_hidden, weights_R, grad_weights_R, offsets_L1[-1:]), 4,
            I=act_RI.shape[1], BR=rows, BC=columns,
        )  # fmt: skip
        return
    arguments = hidden, act_RI, grad_hidden, offsets_L1[-1:], num_columns
    launch(swiglu_rows_backward_kernel, programs, arguments, 8, I=act_RI.shape[1], BR=rows, BC=columns)
