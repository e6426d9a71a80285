"""Matrices in INT4 with a factor per group of neighbouring columns: "pack-quantized" of compressed-tensors.

For a matrix `<name>.weight` [N, K], G = ceil(K / group_size) groups:

    <name>.weight_packed      [N, ceil(K / 8)] int32: q + 8 of column k in word k // 8 from bit 4 * (k % 8) on
    <name>.weight_scale       [N, G]: the factors
    <name>.weight_shape       [2]: N and K
    <name>.weight_zero_point  [ceil(N / 8), G] int32, only where the form is not symmetric: zeros, packed along rows

The matrix is (q - zero) * scale, q from -8 to 7. Written symmetric: an engine needs no zeros then. The format and the
rule for the factors (half the range of q, 7.5, stands for a group's largest magnitude) are those of compressed-tensors,
https://github.com/vllm-project/compressed-tensors, with which the tests compare.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from equipoise.checkpoint.hf.form import Header, MatrixForm, ReadRows, Rows
from equipoise.checkpoint.hf.safetensors_file import Entry
from equipoise.errors import CheckpointError
from equipoise.models.families import Family

GROUP_SIZE = 32
"""Columns per factor unless another number is asked for."""
PER_WORD = 8
_OFFSET, _LOWEST, _HIGHEST, _HALF_RANGE = 8, -8, 7, 7.5
METHOD, FORMAT = "compressed-tensors", "pack-quantized"


def pack(values: torch.Tensor) -> torch.Tensor:
    """Words, int32 [N, ceil(K / 8)], from integers [N, K] of -8 to 7."""
    shifted = (values + _OFFSET).to(torch.uint8)
    shifted = torch.nn.functional.pad(shifted, (0, -shifted.shape[1] % PER_WORD))
    return (shifted[:, 0::2] | shifted[:, 1::2] << 4).contiguous().view(torch.int32)


def unpack(words: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The inverse of `pack`, as int8."""
    pairs = words.reshape(-1).view(torch.uint8)
    values = torch.stack([pairs & 15, pairs >> 4], dim=-1).view(words.shape[0], -1)
    return values[:, :num_columns].to(torch.int8) - _OFFSET


def dequantize(
    words: torch.Tensor, scale: torch.Tensor, num_columns: int, group_size: int, zero: torch.Tensor | None = None
) -> torch.Tensor:
    """FP32 values [N, num_columns] from words, factors [N, G], and zeros [N, G] where there are some."""
    group_of = torch.arange(num_columns) // group_size
    values = unpack(words, num_columns).float()
    if zero is not None:
        values -= zero.float()[:, group_of]
    return values * scale.float()[:, group_of]


def quantize(matrix_NK: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Words and BF16 factors of a finite matrix whose columns divide into groups; symmetric. A group of zeros has the
    factor 1."""
    groups = matrix_NK.float().unflatten(1, (-1, group_size))
    scale = (groups.abs().amax(-1) / _HALF_RANGE).to(torch.bfloat16)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    values = (groups / scale.float()[..., None]).round_().clamp_(_LOWEST, _HIGHEST)
    return pack(values.flatten(1)), scale


@dataclass(frozen=True)
class INT4Groups(MatrixForm):
    """See the module.

    group_size: columns per factor; 0 is one factor per row.
    is_symmetric: whether there are no zeros.
    """

    group_size: int = GROUP_SIZE
    is_symmetric: bool = True
    name = "INT4"
    row_step = 1

    def pattern(self, family: Family) -> re.Pattern[str]:
        """See `MatrixForm`."""
        return family.int4_pattern

    def header(self, key: str, shape: tuple[int, ...]) -> Header:
        """See `MatrixForm`."""
        num_rows, num_columns = shape
        num_groups = -(-num_columns // self._columns(num_columns))
        tensors: Header = {
            key + "_packed": (torch.int32, (num_rows, -(-num_columns // PER_WORD))),
            key + "_scale": (torch.bfloat16, (num_rows, num_groups)),
            key + "_shape": (torch.int64, (2,)),
        }
        if not self.is_symmetric:
            tensors[key + "_zero_point"] = (torch.int32, (-(-num_rows // PER_WORD), num_groups))
        return tensors

    def _columns(self, num_columns: int) -> int:
        return self.group_size or num_columns

    def is_used(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """See `MatrixForm`."""
        return key.endswith(".weight") and key + "_packed" in entries

    def decode(self, key: str, shape: tuple[int, ...], rows: slice, read: ReadRows) -> torch.Tensor:
        """See `MatrixForm`."""
        count, columns = rows.stop - rows.start, shape[1]
        words, scale = read(key + "_packed", rows.start, count), read(key + "_scale", rows.start, count)
        zero = None
        if not self.is_symmetric:
            first, last = rows.start // PER_WORD, -(-rows.stop // PER_WORD)
            packed = read(key + "_zero_point", first, last - first)
            zeros = unpack(packed.t(), packed.shape[0] * PER_WORD).t()
            zero = zeros[rows.start - first * PER_WORD :][:count]
        return dequantize(words, scale, columns, self._columns(columns), zero)

    def encode(self, key: str, first: int, matrix_NK: torch.Tensor) -> Rows:
        """See `MatrixForm`."""
        if not matrix_NK.isfinite().all():
            raise CheckpointError(f"{key!r} holds values that are not finite, and INT4 has none: write bfloat16")
        words, scale = quantize(matrix_NK, self._columns(matrix_NK.shape[1]))
        return [(key + "_packed", first, words), (key + "_scale", first, scale)]

    def closing_rows(self, key: str, shape: tuple[int, ...]) -> Rows:
        """See `MatrixForm`."""
        return [(key + "_shape", 0, torch.tensor(shape))]

    def refusal(self, key: str, shape: tuple[int, ...]) -> str | None:
        """See `MatrixForm`."""
        if not self.group_size or shape[1] % self.group_size == 0:
            return None
        return f"{key!r} has {shape[1]} columns, which groups of {self.group_size} do not divide"

    def contradiction(self, key: str, shape: tuple[int, ...], read: ReadRows) -> str | None:
        """See `MatrixForm`."""
        found = read(key + "_shape", 0, 2).tolist()
        return None if found == list(shape) else f"{key + '_shape'!r} is {found}; expected {list(shape)}"

    def declaration(self, others: Iterable[str]) -> dict[str, Any]:
        """See `MatrixForm`."""
        weights = {
            "num_bits": 4,
            "type": "int",
            "symmetric": self.is_symmetric,
            "strategy": "group" if self.group_size else "channel",
            "group_size": self.group_size or None,
            "dynamic": False,
            "actorder": None,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quant_method": METHOD,
            "format": FORMAT,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": sorted(key.removesuffix(".weight") for key in others),
        }


def declared_int4(config: Mapping[str, Any]) -> INT4Groups:
    """The form that a `quantization_config` of compressed-tensors declares. Raises ValueError for what is not read."""
    groups = list((config.get("config_groups") or {}).values())
    if not groups:
        raise ValueError("it has no config_groups")
    found = {_declared_by(group, config.get("format")) for group in groups}
    if len(found) > 1:
        raise ValueError("its config_groups differ in group_size or symmetry")
    return found.pop()


def _declared_by(group: Mapping[str, Any], format_: object) -> INT4Groups:
    weights = group.get("weights") or {}
    wanted = {"num_bits": 4, "type": "int", "strategy": ("group", "channel"), "actorder": (None, "weight", "static")}
    found = {"type": "int", "actorder": None} | dict(weights)
    for name, allowed in wanted.items():
        among = allowed if isinstance(allowed, tuple) else (allowed,)
        if found.get(name) not in among:
            raise ValueError(f"weights.{name} is {found.get(name)!r}; expected {' or '.join(map(repr, among))}")
    if (group.get("format") or format_) != FORMAT:
        raise ValueError(f"format is {group.get('format') or format_!r}; expected {FORMAT!r}")
    if group.get("input_activations"):
        raise ValueError("it quantizes activations as well, which training does not")
    is_symmetric, size = bool(weights.get("symmetric", True)), weights.get("group_size")
    if weights["strategy"] == "channel":
        return INT4Groups(0, is_symmetric)
    if not isinstance(size, int) or size <= 0:
        raise ValueError(f"weights.group_size is {size!r}; expected a number of columns")
    return INT4Groups(size, is_symmetric)
