"""Matrices in FP8 with one FP32 factor per block of 128 x 128, as DeepSeek-V3 and FP8 releases of Qwen3 store them.

`<name>.weight` is float8_e4m3 and `<name>.weight_scale_inv` [ceil(N / 128), ceil(K / 128)] FP32; the matrix is the
product of both, block by block. Shapes: N rows, K columns.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from equipoise.checkpoint.hf.form import Header, MatrixForm, ReadRows, Rows
from equipoise.checkpoint.hf.safetensors_file import Entry
from equipoise.models.families import Family

BLOCK = 128
SCALE_SUFFIX = "_scale_inv"
FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max


def scale_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Shape of the factors of a matrix."""
    return -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)


def dequantize(matrix_NK: torch.Tensor, scale: torch.Tensor, first_row: int = 0) -> torch.Tensor:
    """FP32 values of rows from `first_row` on of a matrix; `scale` holds the factors of the blocks that they touch."""
    rows = (torch.arange(matrix_NK.shape[0]) + first_row % BLOCK) // BLOCK
    columns = torch.arange(matrix_NK.shape[1]) // BLOCK
    return matrix_NK.float() * scale[rows][:, columns]


def quantize(matrix_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 values and FP32 factors. Each block's largest magnitude becomes FP8's; a block of zeros has the factor 1."""
    num_rows, num_columns = matrix_NK.shape
    down, right = scale_shape((num_rows, num_columns))
    padded = torch.zeros(down * BLOCK, right * BLOCK)
    padded[:num_rows, :num_columns] = matrix_NK
    blocks = padded.view(down, BLOCK, right, BLOCK)
    largest = blocks.abs().amax((1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST, torch.ones_like(largest))
    values = (blocks / scale[:, None, :, None]).clamp(-_LARGEST, _LARGEST)
    return values.view(down * BLOCK, right * BLOCK)[:num_rows, :num_columns].to(FP8).contiguous(), scale


class FP8Blocks(MatrixForm):
    """See the module."""

    name = "FP8"
    row_step = BLOCK

    def pattern(self, family: Family) -> re.Pattern[str]:
        """See `MatrixForm`."""
        return family.fp8_pattern

    def header(self, key: str, shape: tuple[int, ...]) -> Header:
        """See `MatrixForm`."""
        return {key: (FP8, shape), key + SCALE_SUFFIX: (torch.float32, scale_shape(shape))}

    def is_used(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """See `MatrixForm`."""
        is_fp8 = key in entries and entries[key].dtype == FP8 and len(entries[key].shape) == 2
        return is_fp8 and key + SCALE_SUFFIX in entries

    def decode(self, key: str, shape: tuple[int, ...], rows: slice, read: ReadRows) -> torch.Tensor:
        """See `MatrixForm`."""
        first, last = rows.start // BLOCK, -(-rows.stop // BLOCK)
        scale = read(key + SCALE_SUFFIX, first, last - first).float()
        return dequantize(read(key, rows.start, rows.stop - rows.start), scale, rows.start)

    def encode(self, key: str, first: int, matrix_NK: torch.Tensor) -> Rows:
        """See `MatrixForm`."""
        values, scale = quantize(matrix_NK)
        return [(key, first, values), (key + SCALE_SUFFIX, first // BLOCK, scale)]

    def declaration(self, others: Iterable[str]) -> dict[str, Any]:
        """See `MatrixForm`."""
        return {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
