"""Folders of a run's checkpoints: names, publishing, retention, going back. Plain files, no tensors.

    checkpoints/step-00000020/       a complete checkpoint
        __0_0.distcp .. .metadata    shards and index of torch.distributed.checkpoint
        train_state.json             step, loader position, config, ...
        COMPLETE                     size and checksum of every other file; written last
    checkpoints/step-00000030.tmp/   being written, or left by a run that died; never read
    checkpoints/superseded-1/        what was newer when a run went back to an earlier step; never read

A folder counts as a checkpoint only if it has its final name, a COMPLETE file, and all files listed there at
their sizes.
"""

import itertools
import json
import logging
import os
import re
import shutil
from pathlib import Path

from equipoise.checkpoint.manifest import Manifest, incomplete_reason, write_manifest
from equipoise.errors import CheckpointError
from equipoise.files import try_writing

logger = logging.getLogger(__name__)

TRAIN_STATE = "train_state.json"
_STEP_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL_NAME = re.compile(r"step-(\d{8,})\.tmp")
_LISTED = 20  # steps that an error lists
WENT_BACK = "resume_step"
"""In the extra values of a training state: the step that the run was told to go back to, if it was."""


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


def final_folders(directory: Path) -> list[tuple[int, Path]]:
    """Folders with a final name, complete or not, by ascending step."""
    if not directory.is_dir():
        return []
    return sorted((int(m[1]), path) for path in directory.iterdir() if (m := _STEP_NAME.fullmatch(path.name)))


def partial_folders(directory: Path) -> list[tuple[int, Path]]:
    """Folders of unfinished writes by ascending step."""
    if not directory.is_dir():
        return []
    return sorted((int(m[1]), path) for path in directory.iterdir() if (m := _PARTIAL_NAME.fullmatch(path.name)))


def newest_complete(directory: Path, below: int | None = None) -> Path | None:
    """Newest complete checkpoint under `directory`, of a step less than `below`; None without one.

    Incomplete newer ones are logged and ignored.
    """
    newest = None
    for step, path in reversed(final_folders(directory)):
        if below is not None and step >= below:
            continue
        reason = incomplete_reason(path)
        if reason is None:
            newest = (step, path)
            break
        logger.warning("checkpoint of step %d is incomplete and ignored: %s: %s", step, path, reason)
    for step, path in partial_folders(directory) if below is None else []:
        if newest is None or step > newest[0]:
            logger.warning("checkpoint of step %d is incomplete and ignored: %s was not finished", step, path)
    return newest[1] if newest else None


def complete_at(directory: Path, step: int) -> Path:
    """The complete checkpoint of `step`. Raises CheckpointError that lists those that are there."""
    path = step_path(directory, step)
    reason = incomplete_reason(path)
    if reason is None:
        return path
    steps = [s for s, other in final_folders(directory) if incomplete_reason(other) is None]
    listed = ", ".join(map(str, steps[-_LISTED:])) or "none"
    raise CheckpointError(
        f"cannot resume from step {step}: {path}: {reason}. Complete checkpoints of the run: "
        f"{'..., ' if len(steps) > _LISTED else ''}{listed}. Choose one of them, or leave --resume-step away to take "
        "the newest."
    )


def wanted(directory: Path, resume_step: int | None) -> Path | None:
    """The newest complete checkpoint, None without one; or that of `resume_step`.

    Once a run has gone back to `resume_step` and saved again, it is what it has saved since. Contents are not read.
    Raises CheckpointError if `resume_step` is not there.
    """
    newest = newest_complete(directory)
    if resume_step is None:
        return newest
    if newest is not None and was_trained_since(newest, resume_step):
        logger.warning(
            "%s was trained after the run went back to step %d: continuing from it. To go back once more, move the "
            "checkpoints after that step away",
            newest,
            resume_step,
        )
        return newest
    return complete_at(directory, resume_step)


def was_trained_since(path: Path, step: int) -> bool:
    """Whether a complete checkpoint is of a run that had gone back to `step`, and later than it."""
    if step_of(path) <= step:
        return False
    return bool(json.loads((path / TRAIN_STATE).read_text())["extra"].get(WENT_BACK) == step)


def complete_folders(directory: Path) -> list[Path]:
    """Complete checkpoints by ascending step. Nothing is logged."""
    return [path for _, path in final_folders(directory) if incomplete_reason(path) is None]


def refuse_any(directory: Path, found: Path | None) -> None:
    """For a run that starts anew: raises CheckpointError if a checkpoint was found in `directory`."""
    if found is not None:
        raise CheckpointError(
            f"{directory} holds {found.name} of an earlier run, and checkpoints are never overwritten. "
            "Continue it with --resume, or choose another run folder with --out."
        )


def refuse_unwritable(directory: Path) -> None:
    """Makes `directory` and tries it; the OSError of a place that cannot be written."""
    directory.mkdir(parents=True, exist_ok=True)
    try_writing(directory)


def set_newer_aside(directory: Path, step: int, metrics: Path | None = None) -> Path | None:
    """Moves checkpoints of steps after `step` into a new folder `superseded-<n>`, with a copy of `metrics`.

    A run that continues from an earlier step will write these steps again. Returns the folder, None if there was
    nothing to move. The newest goes first, so that a move which is cut short leaves no gap.
    """
    newer = [path for s, path in final_folders(directory) if s > step]
    if not newer:
        return None
    aside = next(p for n in itertools.count(1) if not (p := directory / f"superseded-{n}").exists())
    aside.mkdir()
    if metrics is not None and metrics.exists():
        shutil.copy2(metrics, aside / metrics.name)
    for path in reversed(newer):
        path.rename(aside / path.name)
    sync_folder(aside)
    sync_folder(directory)
    return aside


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


def publish(partial: Path, final: Path, manifest: Manifest) -> None:
    """Writes the manifest of `partial` and gives the folder its final name in one rename, all on storage."""
    write_manifest(partial, manifest)
    sync_folder(partial)
    if final.exists():  # incomplete, or prepare_partial would have refused
        shutil.rmtree(final)
    partial.rename(final)
    sync_folder(final.parent)


def discard_partial(final: Path) -> None:
    """Removes what a failed save has written, to give its space back. A failure to do so is only logged."""
    partial = partial_path(final)
    try:
        if partial.exists():
            shutil.rmtree(partial)
    except OSError as error:
        logger.warning("cannot remove the unfinished checkpoint %s: %s", partial, error)


def delete_old(directory: Path, current: int, keep_last: int, keep_every: int = 0) -> None:
    """Deletes partial checkpoints up to step `current`, and complete ones but those that are to be kept:
    the newest `keep_last` (0 keeps all) and those whose step is a multiple of `keep_every` (0: none).

    To be called once `current` is complete. A failure is only logged.
    """
    try:
        for step, path in partial_folders(directory):
            if step <= current:
                shutil.rmtree(path)
        complete = [
            (step, path)
            for step, path in final_folders(directory)
            if step <= current and incomplete_reason(path) is None
        ]
        for step, path in complete[:-keep_last] if keep_last else []:
            if keep_every == 0 or step % keep_every:
                # Renamed first, so that a deletion that is cut short leaves nothing that looks like a checkpoint.
                shutil.rmtree(path.rename(partial_path(path)))
    except OSError as error:
        logger.warning("cannot delete old checkpoints in %s: %s", directory, error)


def sync_folder(path: Path) -> None:
    """Waits until the names in a folder are on storage."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
