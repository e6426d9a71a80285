"""What an update consists of: names, dtypes, shapes and where each tensor lies in which bucket. Plain JSON.

The sender states the whole layout, so both sides agree on it by construction. Names are those of Hugging Face
checkpoints. A bucket is a run of bytes that is moved at a time; a tensor that is larger is split between its rows.
"""

import hashlib
import math
from collections.abc import Container, Iterable, Mapping
from functools import cached_property
from typing import Any, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeInt, ValidationError

from equipoise.config import Config
from equipoise.errors import WeightUpdateError

ALIGNMENT = 16
"""Bytes to whose multiples tensors in a bucket are aligned."""
NAMED = 5  # tensors that an error lists


class TensorSpec(NamedTuple):
    """Shape and dtype (torch's name without the prefix: "bfloat16") of one tensor."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_rows(self) -> int:
        """Extent of the first dimension; 1 without dimensions."""
        return self.shape[0] if self.shape else 1

    @property
    def row_numel(self) -> int:
        """Elements of a row."""
        return math.prod(self.shape[1:])

    @property
    def row_bytes(self) -> int:
        return self.row_numel * self.torch_dtype.itemsize


def spec_of(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> TensorSpec:
    """The tensor's, as if it were of another dtype if one is given."""
    return TensorSpec(tuple(tensor.shape), str(dtype or tensor.dtype).removeprefix("torch."))


class Piece(NamedTuple):
    """Rows [row, row + num_rows) of the tensor `name`, at byte `offset` of its bucket."""

    name: str
    row: int
    num_rows: int
    offset: int


class Bucket(Config):
    """`num_bytes` bytes that hold pieces, in order of their offsets. Without pieces it is empty, and legal."""

    num_bytes: NonNegativeInt
    pieces: list[Piece]

    def spans(self, tensors: Mapping[str, TensorSpec], without: Container[str] = ()) -> list[tuple[int, int]]:
        """Offset and number of bytes of its pieces, neighbours joined; what lies between is padding. `without`: names
        that are left out."""
        found: list[tuple[int, int]] = []
        for name, _, count, offset in self.pieces:
            size = count * tensors[name].row_bytes
            if name in without or not size:
                continue
            if found and sum(found[-1]) == offset:
                found[-1] = (found[-1][0], found[-1][1] + size)
            else:
                found.append((offset, size))
        return found


class Manifest(Config):
    """One update: the version that it makes, every tensor, every bucket.

    A trainer's layout is the same in every update. An engine that has seen it knows it by its digest, so only the first
    update sends all of it.
    """

    version: str = Field(min_length=1, max_length=200)
    tensors: dict[str, TensorSpec]
    buckets: list[Bucket]
    partial: bool = False
    """Whether tensors of the engine may be left out; they stay as they are."""

    @classmethod
    def parse(cls, value: Any) -> Self:
        """From JSON. Raises WeightUpdateError for what is malformed."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise WeightUpdateError(f"the manifest is malformed at {where or 'its root'}: {first['msg']}") from None

    @cached_property
    def digest(self) -> str:
        """Of everything but the version."""
        layout = self.model_dump_json(exclude={"version"})
        return hashlib.sha256(layout.encode()).hexdigest()

    def renamed(self, version: str) -> Self:
        """The same layout for another version; shares everything, checks nothing again."""
        other = self.model_copy(update={"version": version})
        other.__dict__["digest"] = self.digest
        return other

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self.buckets)

    @property
    def largest_bucket(self) -> int:
        """Bytes of the largest bucket; 0 without any."""
        return max((bucket.num_bytes for bucket in self.buckets), default=0)

    def check_layout(self) -> None:
        """Raises WeightUpdateError unless every row of every tensor lies in exactly one place of its own."""
        check_specs(self.tensors)
        next_row = dict.fromkeys(self.tensors, 0)
        for number, bucket in enumerate(self.buckets):
            end = 0
            for name, row, count, offset in bucket.pieces:
                spec = self.tensors.get(name)
                if spec is None:
                    raise WeightUpdateError(
                        f"bucket {number} holds {name!r}, which is not among the manifest's tensors"
                    )
                if row != next_row[name] or count < 0:
                    raise WeightUpdateError(
                        f"bucket {number}: {name!r} goes on at row {row}, expected row {next_row[name]}: rows of a "
                        "tensor follow each other over the buckets"
                    )
                size = count * spec.row_bytes
                if offset < end or offset % spec.torch_dtype.itemsize or offset + size > bucket.num_bytes:
                    raise WeightUpdateError(
                        f"bucket {number}: {name!r} at byte {offset} ({size} bytes) overlaps what comes before, is not "
                        f"aligned to {spec.dtype}, or passes the bucket's {bucket.num_bytes} bytes"
                    )
                end, next_row[name] = offset + size, row + count
        short = [name for name, spec in self.tensors.items() if next_row[name] != spec.num_rows]
        if short:
            name = short[0]
            raise WeightUpdateError(
                f"the buckets hold {next_row[name]} of {self.tensors[name].num_rows} rows of {name!r}"
                + (f", and {len(short) - 1} more tensors are not whole" if len(short) > 1 else "")
            )

    def check_against(self, wanted: Mapping[str, TensorSpec]) -> None:
        """Raises one WeightUpdateError that names the tensors which do not fit the engine's, before anything is sent
        or written."""
        problems = []
        for name, spec in self.tensors.items():
            if name not in wanted:
                problems.append(f"{name!r} is not a tensor of this engine")
            elif spec.shape != wanted[name].shape:
                problems.append(f"{name!r} has shape {list(spec.shape)}, the engine's has {list(wanted[name].shape)}")
            elif spec.dtype != wanted[name].dtype:
                problems.append(f"{name!r} is {spec.dtype}, the engine's is {wanted[name].dtype}")
        if not self.partial:
            problems += [f"{name!r} of the engine is left out" for name in wanted if name not in self.tensors]
        raise_for(problems)


def raise_for(problems: list[str]) -> None:
    """One error for all problems; none without any."""
    if problems:
        more = f"; and {len(problems) - NAMED} more" if len(problems) > NAMED else ""
        raise WeightUpdateError("; ".join(problems[:NAMED]) + more + ". Nothing was changed")


def check_specs(tensors: Mapping[str, TensorSpec]) -> None:
    """Raises WeightUpdateError for a dtype that torch does not have, or a shape that is none."""
    for name, spec in tensors.items():
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise WeightUpdateError(
                f"{name!r} has dtype {spec.dtype!r}: expected a name of torch's, such as 'bfloat16'"
            )
        if any(n < 0 for n in spec.shape):
            raise WeightUpdateError(f"{name!r} has shape {list(spec.shape)}")


def plan_buckets(
    tensors: Iterable[tuple[str, TensorSpec]], bucket_bytes: int, *, alignment: int = ALIGNMENT, split: bool = True
) -> list[Bucket]:
    """Fills buckets of at most `bucket_bytes` in the order of the tensors.

    A tensor that does not fit goes on in the next bucket, row by row; without `split` it gets a bucket of its own. A
    bucket is larger than the limit only when a single row (or unsplit tensor) is.
    """
    if bucket_bytes <= 0:
        raise WeightUpdateError(f"bucket_bytes is {bucket_bytes}: expected a positive number of bytes")
    buckets: list[Bucket] = []
    pieces: list[Piece] = []
    end = 0

    def close() -> None:
        nonlocal pieces, end
        if pieces:
            buckets.append(Bucket(num_bytes=-(-end // alignment) * alignment, pieces=pieces))
        pieces, end = [], 0

    for name, spec in tensors:
        row = 0
        while True:
            offset = -(-end // alignment) * alignment
            left = spec.num_rows - row
            fits = left if not spec.row_bytes else min(left, (bucket_bytes - offset) // spec.row_bytes)
            if fits < left and (pieces or not split) and (fits < 1 or not split):
                if pieces:
                    close()
                    continue
                fits = left
            count = max(fits, min(left, 1))
            pieces.append(Piece(name, row, count, offset))
            end, row = offset + count * spec.row_bytes, row + count
            if row >= spec.num_rows:
                break
            close()
    close()
    return buckets
