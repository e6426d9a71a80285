"""Which form of matrices a `config.json` declares, and which one a name on the command line stands for."""

from collections.abc import Mapping
from typing import Any

import torch

from equipoise.checkpoint.hf.form import MatrixForm
from equipoise.checkpoint.hf.fp8 import BLOCK, FP8, FP8Blocks
from equipoise.checkpoint.hf.int4 import GROUP_SIZE, METHOD, PER_WORD, INT4Groups, declared_int4
from equipoise.errors import CheckpointError

DTYPE_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float8_e4m3": FP8}
INT4_NAME = "int4"


def declared_form(config: Mapping[str, Any], path: object) -> MatrixForm | None:
    """The form that a `config.json` declares; None for plain weights. Raises CheckpointError for every other one."""
    declared = config.get("quantization_config")
    if not declared:
        return None
    method = declared.get("quant_method")
    if method == "fp8" and declared.get("weight_block_size") == [BLOCK, BLOCK]:
        return FP8Blocks()
    said = f"bits: {declared.get('bits', 'unknown')}, weight_block_size {declared.get('weight_block_size')}"
    if method == METHOD:
        try:
            return declared_int4(declared)
        except ValueError as error:
            said = str(error)
    raise CheckpointError(
        f"{path} declares quantization_config quant_method {method!r} ({said}), which cannot be read: only FP8 with "
        f"weight_block_size [{BLOCK}, {BLOCK}] and INT4 of compressed-tensors (pack-quantized) can. Convert it to BF16 "
        "with the tool that made it, or take the unquantized release"
    )


def parse_dtype(name: str | None, group_size: int | None = None) -> torch.dtype | MatrixForm | None:
    """A dtype, or a form of matrices, by its name on the command line; None keeps each tensor's own.

    Args:
        group_size: columns per factor of INT4; None is 32.

    Raises:
        CheckpointError: there is no such name, or the number fits no form.
    """
    if group_size is not None and name != INT4_NAME:
        raise CheckpointError(f"--group-size is for --dtype {INT4_NAME}, and the dtype is {name or 'that of SRC'}")
    if name == INT4_NAME:
        size = GROUP_SIZE if group_size is None else group_size
        if size < PER_WORD or size % PER_WORD:
            raise CheckpointError(f"--group-size is {size}: expected a multiple of {PER_WORD}, such as {GROUP_SIZE}")
        return INT4Groups(size)
    if name is None or name in DTYPE_NAMES:
        return None if name is None else DTYPE_NAMES[name]
    raise CheckpointError(f"dtype {name!r} cannot be written: choose one of {', '.join(DTYPE_NAMES)}, {INT4_NAME}")


def dtype_of(config: Mapping[str, Any] | None) -> torch.dtype | None:
    """The dtype that a `config.json` declares, BF16 for quantized weights; None if there is none or it says nothing."""
    if config is None:
        return None
    if config.get("quantization_config"):
        return torch.bfloat16
    return DTYPE_NAMES.get(str(config.get("dtype") or config.get("torch_dtype")))
