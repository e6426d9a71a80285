"""Triton form of `kernels/tiles.py`: one launch; each program repeats the short sums and writes its part.

Shapes: L local physical experts, W tiles at most.
"""

import torch
import triton
import triton.language as tl

from equipoise.kernels.launching import launch
from equipoise.kernels.operators import operator
from equipoise.kernels.peers import padded
from equipoise.kernels.tiles import Tiles, first_half, max_tiles

BLOCK_TILES = 32
"""Tiles that one program writes."""


@triton.jit(do_not_specialize=["W"])
def _tiles_kernel(
    counts_ptr,
    offsets_ptr,
    expert_ptr,
    row_ptr,
    num_ptr,
    order_ptr,
    W,
    L: tl.constexpr,
    NUM_MASTERS: tl.constexpr,
    HALF: tl.constexpr,  # masters and the first half of the slots
    BLOCK_ROWS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """A program writes BLOCK_W tiles and, of the order, 32 experts. The first also writes offsets and sums."""
    part = tl.program_id(0)
    local = tl.arange(0, BLOCK_L)
    counts = tl.load(counts_ptr + local, mask=local < L, other=0).to(tl.int32)
    tiles = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    row_ends = tl.cumsum(counts, 0)
    tile_ends = tl.cumsum(tiles, 0)
    if part == 0:
        tl.store(offsets_ptr + local, row_ends - counts, mask=local < L)
        tl.store(offsets_ptr + L, tl.sum(counts, 0))
        tl.store(num_ptr, tl.sum(tl.where(local < NUM_MASTERS, tiles, 0), 0))
        tl.store(num_ptr + 1, tl.sum(tl.where(local < HALF, tiles, 0), 0))
        tl.store(num_ptr + 2, tl.sum(tiles, 0))
    tile = part * BLOCK_W + tl.arange(0, BLOCK_W)
    is_past = (tile_ends[None, :] <= tile[:, None]) & (local < L)[None, :]
    expert = tl.sum(is_past.to(tl.int32), 1)
    is_mine = local[None, :] == expert[:, None]
    row = tl.sum(tl.where(is_mine, (row_ends - counts - (tile_ends - tiles) * BLOCK_ROWS)[None, :], 0), 1)
    row += tile * BLOCK_ROWS
    is_tile = expert < L
    tl.store(expert_ptr + tile, tl.where(is_tile, expert, -1), mask=tile < W)
    tl.store(row_ptr + tile, tl.where(is_tile, row, -1), mask=tile < W)
    mine = part * 32 + tl.arange(0, 32)
    my_count = tl.load(counts_ptr + mine, mask=mine < L, other=0).to(tl.int32)
    is_longer = (counts[None, :] > my_count[:, None]) | (
        (counts[None, :] == my_count[:, None]) & (local[None, :] < mine[:, None])
    )
    is_master, am_master = (local < NUM_MASTERS)[None, :], (mine < NUM_MASTERS)[:, None]
    is_before = (is_master & (am_master == 0)) | ((is_master == am_master) & is_longer)
    place = tl.sum((is_before & (local < L)[None, :]).to(tl.int32), 1)
    tl.store(order_ptr + place, mine, mask=mine < L)


def _empty_tables(counts_L: torch.Tensor, W: int) -> tuple[torch.Tensor, ...]:
    L = counts_L.shape[0]
    return tuple(counts_L.new_empty(size, dtype=torch.int32) for size in (L + 1, W, W, 3, L))


@operator("tile_tables")
def tile_tables(
    counts_L: torch.Tensor, num_masters: int, num_rows: int, block_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The five tensors of `Tiles`, in its order."""
    L, W = counts_L.numel(), max_tiles(num_rows, counts_L.numel(), block_rows)
    offsets, expert, row, num, order = _empty_tables(counts_L, W)
    launch(
        _tiles_kernel,
        max(-(-W // BLOCK_TILES), -(-L // 32), 1),
        (counts_L.contiguous(), offsets, expert, row, num, order, W),
        4,
        L=L,
        NUM_MASTERS=num_masters,
        HALF=num_masters + first_half(L - num_masters),
        BLOCK_ROWS=block_rows,
        BLOCK_L=max(16, padded(L)),
        BLOCK_W=BLOCK_TILES,
    )
    return offsets, expert, row, num, order


@torch.library.register_fake("equipoise::tile_tables")
def _(counts_L, num_masters, num_rows, block_rows):
    return _empty_tables(counts_L, max_tiles(num_rows, counts_L.shape[0], block_rows))


def triton_tiles(counts_L: torch.Tensor, num_masters: int, num_rows: int, block_rows: int) -> Tiles:
    """See `plain_tiles`."""
    offsets_L1, expert_W, row_W, num_3, order_L = tile_tables(counts_L, num_masters, num_rows, block_rows)
    return Tiles(offsets_L1, expert_W, row_W, num_3, order_L, block_rows)
