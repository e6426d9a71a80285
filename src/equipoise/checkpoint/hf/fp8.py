"""Matrices in FP8 with one FP32 factor per block of 128 x 128, as DeepSeek-V3 and FP8 releases of Qwen3 store them.

`<name>.weight` is float8_e4m3 and `<name>.weight_scale_inv` [ceil(N / 128), ceil(K / 128)] FP32; the matrix is the
product of both, block by block. Shapes: N rows, K columns.
"""

from collections.abc import Mapping
from typing import Any

import torch

from equipoise.errors import CheckpointError

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


QUANTIZATION_CONFIG = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [BLOCK, BLOCK],
}
"""What `config.json` of such a checkpoint says."""


def check_quantization(config: Mapping[str, Any], path: object) -> bool:
    """Whether a `config.json` declares such matrices. Raises CheckpointError for every other quantization."""
    declared = config.get("quantization_config")
    if not declared:
        return False
    method = declared.get("quant_method")
    if method == "fp8" and declared.get("weight_block_size") == [BLOCK, BLOCK]:
        return True
    bits = declared.get("bits") or ("4 or 8" if method == "compressed-tensors" else "unknown")
    raise CheckpointError(
        f"{path} declares quantization_config quant_method {method!r} (bits: {bits}, weight_block_size "
        f"{declared.get('weight_block_size')}), which cannot be read: only FP8 with weight_block_size "
        f"[{BLOCK}, {BLOCK}] can. INT4 needs its own kernels to unpack; convert it to BF16 with the tool that made it, "
        "or take the unquantized release"
    )
