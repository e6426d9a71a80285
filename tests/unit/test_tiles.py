"""Tile tables against a loop in plain Python."""

import pytest
import torch

from equipoise.kernels.tiles import Tiles, first_half, make_tiles, max_tiles, plain_tiles
from equipoise.kernels.triton_support import triton_problem

COUNTS = [[0], [1], [128], [129], [0, 0, 0], [5, 0, 7], [0, 300, 0, 1], [127, 128, 129, 0], [1000, 0, 0, 0]]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def triton_form(*args) -> Tiles:
    if triton_problem(DEVICE.type) is not None:
        pytest.skip("Triton does not run here")
    from equipoise.kernels.tiles_triton import triton_tiles

    return triton_tiles(*args)


@pytest.mark.parametrize("make", [plain_tiles, triton_form, make_tiles], ids=lambda make: make.__name__)
@pytest.mark.parametrize("counts", COUNTS, ids=str)
@pytest.mark.parametrize("block_rows", [16, 128])
@pytest.mark.parametrize("spare_rows", [0, 37])
def test_tables_cover_every_row_once(make, counts: list[int], block_rows: int, spare_rows: int) -> None:
    num_masters = len(counts) // 2
    half = num_masters + first_half(len(counts) - num_masters)
    num_rows = sum(counts) + spare_rows
    tiles = make(torch.tensor(counts, device=DEVICE), num_masters, num_rows, block_rows)
    expected, starts, first = [], [0], 0
    for expert, count in enumerate(counts):
        expected += [(expert, row) for row in range(first, first + count, block_rows)]
        first += count
        starts.append(first)
    spare = max_tiles(num_rows, len(counts), block_rows) - len(expected)
    assert spare >= 0
    assert tiles.offsets_L1.tolist() == starts
    assert list(zip(tiles.expert_W.tolist(), tiles.row_W.tolist())) == expected + [(-1, -1)] * spare
    assert tiles.num_3.tolist() == [sum(e < end for e, _ in expected) for end in (num_masters, half, len(counts))]
    assert tiles.order_L.tolist() == sorted(range(len(counts)), key=lambda e: (e >= num_masters, -counts[e]))
    assert {x.dtype for x in tiles[:5]} == {torch.int32}
