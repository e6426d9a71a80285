"""The manifest of a checkpoint: size and SHA-256 of each of its files. Written last, it makes a folder complete."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

MANIFEST = "COMPLETE"
FORMAT = 2


class FileEntry(NamedTuple):
    """What the manifest says about one file; `sha256` in hexadecimal, as `sha256sum` prints it."""

    bytes: int
    sha256: str


class Manifest(NamedTuple):
    """What COMPLETE holds, by file name."""

    step: int
    world_size: int
    files: dict[str, FileEntry]


def describe_file(path: Path) -> FileEntry:
    """Reads a file through. Raises OSError."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return FileEntry(file.tell(), digest.hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes COMPLETE into `folder` and waits until it is on storage."""
    files = {name: entry._asdict() for name, entry in sorted(manifest.files.items())}
    write_json(folder / MANIFEST, {"format": FORMAT, **manifest._asdict(), "files": files})


def read_manifest(folder: Path) -> Manifest:
    """Raises FileNotFoundError without one, ValueError (in words) for one that this version cannot read."""
    try:
        content = json.loads((folder / MANIFEST).read_text())
        if content["format"] != FORMAT:
            raise ValueError(f"its format is {content['format']}; this version reads format {FORMAT}")
        files = {str(name): FileEntry(int(e["bytes"]), str(e["sha256"])) for name, e in content["files"].items()}
        return Manifest(int(content["step"]), int(content["world_size"]), files)
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"its {MANIFEST} file is unreadable ({error})") from error


def incomplete_reason(folder: Path) -> str | None:
    """Why `folder` is no complete checkpoint; None if it is one. Sizes are checked, contents are not."""
    if not folder.is_dir():
        return "there is no such folder"
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        return f"it has no {MANIFEST} file, so its writing did not finish"
    except OSError as error:
        return f"its {MANIFEST} file is unreadable ({error})"
    except ValueError as error:
        return str(error)
    for name, entry in manifest.files.items():
        file = folder / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != entry.bytes:
            return f"file {name} has {file.stat().st_size} bytes instead of {entry.bytes}"
    return None


def damage(folder: Path, share: int = 0, shares: int = 1) -> str | None:
    """How the contents of a complete checkpoint differ from its manifest; None if they do not.

    Every file is read; of `shares` callers, each with its own number `share`, each reads a part of them.
    """
    files = sorted(read_manifest(folder).files.items())
    for name, entry in files[share::shares]:
        found = describe_file(folder / name)
        if found != entry:
            return f"file {name} has SHA-256 {found.sha256} ({found.bytes} bytes) instead of {entry.sha256}"
    return None


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON and waits until it is on storage. Raises TypeError or ValueError if it can't."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with open(path, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
