"""Files that are written whole or not at all, names that are free, and folders that can be written."""

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp"
"""What the name of a file ends with while it is written."""


@contextlib.contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Inside, a name beside `path` that ends with `TEMPORARY`, to write a file there; it then takes the place of
    `path`.

    Its content is on the disk before it does. If the body raises, `path` stays as it was and nothing is left beside it.
    Of several processes that write the same `path` the last one stays: each has a name of its own.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        yield partial
        with open(partial, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def free_name(path: Path) -> Path:
    """The first of NAME.json, NAME-2.json, NAME-3.json, ... that is not there."""
    number, found = 1, path
    while found.exists():
        number += 1
        found = path.with_stem(f"{path.stem}-{number}")
    return found


def try_writing(folder: Path) -> None:
    """Raises the OSError of a folder in which no file can be written; leaves none there."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b"\0")
