"""Safetensors files read and written region by region, with plain positioned reads and writes.

The `safetensors` package writes a file from tensors that are all in memory and reads through a memory map, whose pages
count as the process's memory. A conversion that streams needs neither. Format: 8 bytes, little-endian, the length of
a JSON header, the header, and the tensors' bytes without gaps; offsets in the header count from its end.
"""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import torch

from equipoise.errors import CheckpointError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_MAX_HEADER = 100_000_000  # bytes; the safetensors package has the same bound


class Entry(NamedTuple):
    """One tensor of a file; `offset` in bytes from the file's start."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one index of the leading dim; of the whole for a scalar."""
        return _num_elements(self.shape[1:]) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return _num_elements(self.shape) * self.dtype.itemsize


def _num_elements(shape: Iterable[int]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


class SafetensorsReader:
    """An open file whose header has been checked against its size.

    Raises:
        CheckpointError: it cannot be opened, is cut short, is no safetensors file, or holds a dtype unknown here.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"cannot open {path}: {error.strerror}") from error
        try:
            self.entries = self._read_header()
        except BaseException:
            self.close()
            raise

    def _read_header(self) -> dict[str, Entry]:
        size = os.fstat(self._file).st_size
        length = int.from_bytes(os.pread(self._file, 8, 0), "little")
        if size < 8 or length > min(size - 8, _MAX_HEADER):
            raise CheckpointError(f"{self.path} is cut short or no safetensors file ({size} bytes): copy it again")
        try:
            header = json.loads(os.pread(self._file, length, 8), object_pairs_hook=self._no_double_keys)
            header.pop("__metadata__", None)
            spans = {key: [8 + length + int(n) for n in value["data_offsets"]] for key, value in header.items()}
            entries = {}
            for key, value in header.items():
                if value["dtype"] not in DTYPES:
                    raise CheckpointError(
                        f"tensor {key!r} in {self.path} has dtype {value['dtype']}, which is not supported: expected "
                        f"one of {', '.join(DTYPES)}"
                    )
                entries[key] = Entry(DTYPES[value["dtype"]], tuple(map(int, value["shape"])), spans[key][0])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{self.path} has an unreadable header ({error}): copy it again") from error
        for key, entry in entries.items():
            start, end = spans[key]
            if end > size:
                raise CheckpointError(
                    f"{self.path} is cut short: tensor {key!r} ends at byte {end}, but the file has {size}; copy it "
                    "again"
                )
            if end - start != entry.num_bytes or start < 8 + length:
                raise CheckpointError(
                    f"tensor {key!r} in {self.path} takes {end - start} bytes, but shape {list(entry.shape)} of "
                    f"{entry.dtype} needs {entry.num_bytes}"
                )
        return entries

    def _no_double_keys(self, pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            keys = [key for key, _ in pairs]
            double = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"tensor {double!r} is twice in {self.path}")
        return found

    def read_rows(self, key: str, start: int, out: torch.Tensor) -> None:
        """Fills `out`, contiguous, on the CPU and of the tensor's dtype, with the rows from `start` on."""
        entry = self.entries[key]
        assert out.is_contiguous()
        assert (out.dtype, out.shape[1:]) == (entry.dtype, entry.shape[1:]), key
        self.read_bytes(entry.offset + start * entry.row_bytes, as_bytes(out))

    def read_bytes(self, offset: int, out: memoryview) -> None:
        """Fills `out` from the file's byte `offset` on."""
        done = 0
        while done < len(out):
            got = os.preadv(self._file, [out[done:]], offset + done)
            if got == 0:
                raise CheckpointError(f"{self.path} ends at byte {offset + done}: it was changed while being read")
            done += got

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class SafetensorsWriter:
    """A new file whose tensors are known by dtype and shape and arrive in any order of whole rows.

    `close` waits until the file is on storage and raises if bytes were left out.
    """

    def __init__(self, path: Path, tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]]) -> None:
        self.path = path
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for key, (dtype, shape) in tensors.items():
            size = Entry(dtype, shape, 0).num_bytes
            header[key] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, as the package has it
        self.entries: dict[str, Entry] = {}
        position = 8 + len(text)
        for key, (dtype, shape) in tensors.items():
            self.entries[key] = Entry(dtype, shape, position)
            position += self.entries[key].num_bytes
        self.num_bytes, self._written = offset, 0
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        self._write(memoryview(len(text).to_bytes(8, "little") + text), 0)

    def write_rows(self, key: str, start: int, rows: torch.Tensor) -> None:
        """Writes rows from `start` on; `rows` is on the CPU, contiguous, of the tensor's dtype."""
        entry = self.entries[key]
        assert rows.is_contiguous()
        assert (rows.dtype, rows.shape[1:]) == (entry.dtype, entry.shape[1:]), key
        data = as_bytes(rows)
        self._write(data, entry.offset + start * entry.row_bytes)
        self._written += len(data)

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._file, data[done:], offset + done)

    def close(self) -> None:
        """Ends the file."""
        if self._written != self.num_bytes:
            raise AssertionError(f"{self.path}: {self._written} of {self.num_bytes} bytes were written")
        os.fsync(self._file)
        self.discard()

    def discard(self) -> None:
        """Lets go of the file, whole or not."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
