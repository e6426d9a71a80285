"""What a form of matrices in fewer bits has to say, so that reading and writing know no form by name.

Shapes: N rows, K columns of a matrix. Its key ends in `.weight`, whether a tensor of that name is stored or not.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

import torch

from equipoise.checkpoint.hf.safetensors_file import Entry
from equipoise.models.families import Family

Header = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of tensors by key."""
Rows = list[tuple[str, int, torch.Tensor]]
"""Key, first row and values, of one tensor or of those that hold a matrix together."""
ReadRows = Callable[[str, int, int], torch.Tensor]
"""Rows of a stored tensor, by its key, the first and how many."""


class MatrixForm(ABC):
    """A way to store a matrix as several tensors."""

    name: str
    """As errors call it."""
    row_step: int
    """Rows that have to be written together."""

    @abstractmethod
    def pattern(self, family: Family) -> re.Pattern[str]:
        """Names of the matrices that are written so in files of a family."""

    @abstractmethod
    def header(self, key: str, shape: tuple[int, ...]) -> Header:
        """The tensors that hold a matrix, as they are written."""

    @abstractmethod
    def is_used(self, key: str, entries: Mapping[str, Entry]) -> bool:
        """Whether the matrix is there in this form; what is missing of it is told afterwards."""

    @abstractmethod
    def decode(self, key: str, shape: tuple[int, ...], rows: slice, read: ReadRows) -> torch.Tensor:
        """FP32 values [rows, K] of a stored matrix of `shape`."""

    @abstractmethod
    def encode(self, key: str, first: int, matrix_NK: torch.Tensor) -> Rows:
        """What is stored for FP32 rows from `first` on, a multiple of `row_step`. Raises CheckpointError for values
        that have no place in the form."""

    @abstractmethod
    def declaration(self, others: Iterable[str]) -> dict[str, Any]:
        """`quantization_config` of a folder that holds the weights `others` as they are."""

    def closing_rows(self, key: str, shape: tuple[int, ...]) -> Rows:
        """What is stored once for a matrix, besides its rows."""
        return []

    def refusal(self, key: str, shape: tuple[int, ...]) -> str | None:
        """Why a matrix cannot be written in this form; None if it can."""
        return None

    def contradiction(self, key: str, shape: tuple[int, ...], read: ReadRows) -> str | None:
        """What the stored tensors say against the matrix having this shape; None if nothing."""
        return None


def fits(found: torch.dtype, written: torch.dtype) -> bool:
    """Whether a part that is written in one dtype can be read in another: factors and shapes have several."""
    kinds: tuple[Container[torch.dtype], ...] = (
        {torch.float32, torch.bfloat16, torch.float16, torch.float64},
        {torch.int64, torch.int32},
    )
    if written == torch.int32:  # packed bits
        return found == written
    return found == written or any(found in kind and written in kind for kind in kinds)
