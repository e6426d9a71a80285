"""Folders of a run's checkpoints: names, completeness, publishing and retention. Plain files, no tensors.

    checkpoints/step-00000020/       a complete checkpoint
        __0_0.distcp .. .metadata    shards and index of torch.distributed.checkpoint
        train_state.json             step, loader position, config, ...
        COMPLETE                     name and size of every other file; written last
    checkpoints/step-00000030.tmp/   being written, or left by a run that died; never read

A folder counts as a checkpoint only if it has its final name, a COMPLETE file, and all files listed there at
their sizes.
"""

import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

from equipoise.errors import CheckpointError

logger = logging.getLogger(__name__)

MANIFEST = "COMPLETE"
TRAIN_STATE = "train_state.json"
FORMAT = 1
_STEP_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_NAME = re.compile(r"step-(\d{8,})\.tmp")


def step_path(directory: Path, step: int) -> Path:
    """Folder of the complete checkpoint of `step`."""
    return directory / f"step-{step:08d}"


def partial_path(final: Path) -> Path:
    """Folder beside `final` in which it is written."""
    return final.with_name(final.name + ".tmp")


def step_of(path: Path) -> int:
    """Step in the name of a checkpoint folder. Raises CheckpointError for another name."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path} is not a checkpoint: expected a folder named step-<8 digits>")
    return int(match[1])


def incomplete_reason(path: Path) -> str | None:
    """Why `path` is no complete checkpoint; None if it is one. Sizes are checked, contents are not."""
    if not path.is_dir():
        return "there is no such folder"
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        files = {str(name): int(size) for name, size in manifest["files"].items()}
        written_format = manifest["format"]
    except FileNotFoundError:
        return f"it has no {MANIFEST} file, so its writing did not finish"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST} file is unreadable ({error})"
    if written_format != FORMAT:
        return f"its format is {written_format}; this version reads format {FORMAT}"
    for name, size in files.items():
        file = path / name
        if not file.is_file():
            return f"file {name} is missing"
        if file.stat().st_size != size:
            return f"file {name} has {file.stat().st_size} bytes instead of {size}"
    return None


def newest_complete(directory: Path) -> Path | None:
    """Newest complete checkpoint under `directory`, or None. Incomplete newer ones are logged and ignored."""
    if not directory.is_dir():
        return None
    found, partial = [], []
    for path in directory.iterdir():
        if match := _STEP_NAME.fullmatch(path.name):
            found.append((int(match[1]), path))
        elif match := _PARTIAL_NAME.fullmatch(path.name):
            partial.append((int(match[1]), path))
    newest = None
    for step, path in sorted(found, reverse=True):
        reason = incomplete_reason(path)
        if reason is None:
            newest = (step, path)
            break
        logger.warning("checkpoint of step %d is incomplete and ignored: %s: %s", step, path, reason)
    for step, path in sorted(partial):
        if newest is None or step > newest[0]:
            logger.warning("checkpoint of step %d is incomplete and ignored: %s was not finished", step, path)
    return newest[1] if newest else None


def prepare_partial(final: Path) -> None:
    """Makes an empty folder beside `final` to write that checkpoint into, in place of what a dead run left.

    Raises CheckpointError if `final` is complete already.
    """
    if incomplete_reason(final) is None:
        raise CheckpointError(
            f"checkpoint {final} exists and is complete; it is not overwritten. "
            "Resume from it with --resume, or choose another run folder with --out."
        )
    partial = partial_path(final)
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON and waits until it is on storage. Raises TypeError or ValueError if it can't."""
    text = json.dumps(value, indent=1, allow_nan=False)
    with open(path, "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def publish(partial: Path, final: Path, step: int, world_size: int) -> None:
    """Writes the manifest of `partial` and gives the folder its final name in one rename, all on storage."""
    files = {path.name: path.stat().st_size for path in sorted(partial.iterdir()) if path.is_file()}
    write_json(partial / MANIFEST, {"format": FORMAT, "step": step, "world_size": world_size, "files": files})
    _sync_folder(partial)
    if final.exists():  # incomplete, or prepare_partial would have refused
        shutil.rmtree(final)
    partial.rename(final)
    _sync_folder(final.parent)


def discard_partial(final: Path) -> None:
    """Removes what a failed save has written, to give its space back. A failure to do so is only logged."""
    partial = partial_path(final)
    try:
        if partial.exists():
            shutil.rmtree(partial)
    except OSError as error:
        logger.warning("cannot remove the unfinished checkpoint %s: %s", partial, error)


def delete_old(directory: Path, keep_last: int, current: int) -> None:
    """Deletes partial checkpoints up to step `current`, and complete ones but the newest `keep_last`.

    0 keeps all. To be called once `current` is complete. A failure is only logged.
    """
    try:
        complete, remains = [], []
        for path in directory.iterdir():
            if (match := _STEP_NAME.fullmatch(path.name)) and int(match[1]) <= current:
                if incomplete_reason(path) is None:
                    complete.append((int(match[1]), path))
            elif (match := _PARTIAL_NAME.fullmatch(path.name)) and int(match[1]) <= current:
                remains.append(path)
        complete.sort()
        for _, path in complete[:-keep_last] if keep_last else []:
            # Renamed first, so that a deletion that is cut short leaves nothing that looks like a checkpoint.
            remains.append(path.rename(partial_path(path)))
        for path in remains:
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("cannot delete old checkpoints in %s: %s", directory, error)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
