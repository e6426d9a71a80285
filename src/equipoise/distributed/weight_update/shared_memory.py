"""Buckets of host memory that another process of this machine reads, by handles that are plain JSON.

A segment is a file under /dev/shm named after the process that made it. It is read and written as a file and never
mapped by the reader: whatever a handle says, the worst is an error. Segments of processes that died are removed by
the next one that makes some.
"""

import contextlib
import os
import re
import secrets
import weakref
from pathlib import Path
from typing import Any

import torch

from equipoise.errors import WeightUpdateError

FOLDER = Path("/dev/shm")
_NAME = re.compile(r"equipoise-(\d+)-[0-9a-f]{16}")


class Segment:
    """`num_bytes` of shared memory as a uint8 tensor; its name goes at `close`, or when nobody refers to it."""

    def __init__(self, num_bytes: int) -> None:
        _remove_stale()
        self.name = f"equipoise-{os.getpid()}-{secrets.token_hex(8)}"
        self.num_bytes = num_bytes
        path = FOLDER / self.name
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        self._remove = weakref.finalize(self, path.unlink, missing_ok=True)
        try:
            os.posix_fallocate(file, 0, max(1, num_bytes))  # now, or a full /dev/shm would end the process later
        except OSError as error:
            self._remove()
            raise WeightUpdateError(
                f"no {num_bytes} bytes of shared memory in {FOLDER}: {error.strerror}; make buckets smaller or "
                f"{FOLDER} larger"
            ) from None
        finally:
            os.close(file)
        self.tensor = torch.from_file(str(path), shared=True, size=max(1, num_bytes), dtype=torch.uint8)
        self.tensor = self.tensor[:num_bytes]

    def handle(self) -> dict[str, Any]:
        """What a reader needs."""
        return {"kind": "shm", "name": self.name, "num_bytes": self.num_bytes}

    def close(self) -> None:
        """Takes the name away and the memory back. Twice is harmless."""
        self._remove()
        self.tensor = torch.empty(0, dtype=torch.uint8)


class Reader:
    """Another process's segment, by its handle. Raises WeightUpdateError for a handle that is none."""

    def __init__(self, handle: Any, *, write: bool = False) -> None:
        name = handle.get("name") if isinstance(handle, dict) else None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise WeightUpdateError(f"{name!r} is not the name of a shared-memory segment of a sender")
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._file = os.open(FOLDER / name, flags)
        except OSError as error:
            raise WeightUpdateError(
                f"shared memory {name!r} cannot be opened ({error.strerror}): are trainer and engine on one machine, "
                "and is the trainer alive?"
            ) from None
        self.name = name

    def read(self, out: torch.Tensor, offset: int = 0) -> None:
        """Fills `out` (uint8, on the CPU) from byte `offset`. Raises WeightUpdateError when there is less."""
        data: Any = out.numpy()
        view, done = memoryview(data), 0
        while done < len(view):
            count = os.preadv(self._file, [view[done : done + (1 << 30)]], offset + done)
            if count == 0:
                raise WeightUpdateError(
                    f"shared memory {self.name!r} ends at byte {offset + done}, {len(view) - done} bytes too early"
                )
            done += count

    def read_number(self, index: int) -> int:
        """The int64 at that place."""
        data = os.pread(self._file, 8, 8 * index)
        if len(data) < 8:
            raise WeightUpdateError(f"shared memory {self.name!r} has no number {index}")
        return int.from_bytes(data, "little", signed=True)

    def write_number(self, index: int, value: int) -> None:
        """Puts an int64 at that place, which must be there."""
        self.read_number(index)
        os.pwrite(self._file, value.to_bytes(8, "little", signed=True), 8 * index)

    def close(self) -> None:
        """Twice is harmless."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def segments() -> list[str]:
    """Names of all senders' segments on this machine."""
    return sorted(path.name for path in FOLDER.iterdir() if _NAME.fullmatch(path.name))


def _remove_stale() -> None:
    for name in segments():
        match = _NAME.fullmatch(name)
        assert match is not None
        if not Path(f"/proc/{match[1]}").exists():
            with contextlib.suppress(OSError):
                (FOLDER / name).unlink()
