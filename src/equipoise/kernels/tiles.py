"""Tile tables: which rows each tile of a grouped product covers, known on the device alone.

Rows are sorted by local physical expert, masters first. A tile is up to `block_rows` consecutive rows of one expert, so
the number of tiles depends on the data; every table has the size that bounds it, and entries past the last tile are -1.

Shapes: L = M + R local physical experts, W tiles at most.
"""

from typing import NamedTuple

import torch

from equipoise.kernels.triton_support import use_triton


class Tiles(NamedTuple):
    """One layer's and microbatch's rows, cut into tiles; all int32 on the rows' device.

    offsets_L1: [L + 1], first row of each expert, then the number of rows that belong to anybody.
    expert_W: the expert of each tile, in order of rows.
    row_W: its first row.
    num_3: tiles of masters, of masters and the first half of the slots, tiles in all.
    order_L: masters by descending number of rows, then slots likewise; equal ones by lower index.
    block_rows: rows of a full tile.
    """

    offsets_L1: torch.Tensor
    expert_W: torch.Tensor
    row_W: torch.Tensor
    num_3: torch.Tensor
    order_L: torch.Tensor
    block_rows: int


def first_half(num_slots: int) -> int:
    """Slots whose weights a product may read while the others' are still coming."""
    return -(-num_slots // 2)


def max_tiles(num_rows: int, num_experts: int, block_rows: int) -> int:
    """W: no distribution of this many rows makes more tiles."""
    return num_rows // block_rows + min(num_experts, num_rows)


def plain_tiles(counts_L: torch.Tensor, num_masters: int, num_rows: int, block_rows: int) -> Tiles:
    """The reference: tables for `counts_L` rows (integer tensor [L]) of a buffer of `num_rows`. No host sync."""
    counts = counts_L.long()
    L, W = counts.numel(), max_tiles(num_rows, counts_L.numel(), block_rows)
    tiles_L = (counts + block_rows - 1) // block_rows
    ends_L = tiles_L.cumsum(0)
    tile_W = torch.arange(W, device=counts.device)
    expert_W = torch.searchsorted(ends_L, tile_W, right=True)
    is_tile_W = expert_W < L
    expert_W = expert_W.clamp(max=max(L - 1, 0))
    offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    row_W = offsets[expert_W] + (tile_W - (ends_L - tiles_L)[expert_W]) * block_rows
    ends_L1 = torch.cat([ends_L.new_zeros(1), ends_L])
    return Tiles(
        offsets.int(),
        torch.where(is_tile_W, expert_W, -1).int(),
        torch.where(is_tile_W, row_W, -1).int(),
        torch.stack([ends_L1[num_masters], ends_L1[num_masters + first_half(L - num_masters)], ends_L1[L]]).int(),
        torch.cat(
            [
                counts[:num_masters].argsort(descending=True, stable=True),
                counts[num_masters:].argsort(descending=True, stable=True) + num_masters,
            ]
        ).int(),
        block_rows,
    )


def make_tiles(counts_L: torch.Tensor, num_masters: int, num_rows: int, block_rows: int) -> Tiles:
    """Tables with the form that fits the device: one Triton launch on accelerators. See `plain_tiles`."""
    if counts_L.numel() and use_triton(counts_L.device):
        from equipoise.kernels.tiles_triton import triton_tiles

        return triton_tiles(counts_L, num_masters, num_rows, block_rows)
    return plain_tiles(counts_L, num_masters, num_rows, block_rows)
