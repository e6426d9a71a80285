"""Mistakes that the process which starts the workers can find before it does: in seconds less, and told once."""

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from equipoise.accelerator import get_accelerator
from equipoise.checkpoint import layout
from equipoise.checkpoint.resume import other_model
from equipoise.data import Datasets
from equipoise.data.corpus import check_data
from equipoise.data.loader import refuse_other_order
from equipoise.errors import DataError
from equipoise.models.config import model_changes
from equipoise.train.config import TrainConfig, plan_run
from equipoise.train.memory import device_memory, refuse_too_large


def check_start(config: TrainConfig, num_workers: int, checkpoints: Path, resume_step: int | None) -> None:
    """For a run of `num_workers` ranks on this host, which will look again, together.

    Raises:
        ConfigError, CheckpointError: see `check_model`.
        DataError: see `check_data` and `check_position`.
    """
    if not check_model(config, num_workers, checkpoints, resume_step):
        return
    if num_workers > 1:  # a single one reads its data at once
        with _without_warnings():
            loop = config.train
            read = check_data(config.data, loop.sequence_length, config.model.vocab_size, loop.seed)
        check_position(config, checkpoints, resume_step, read)


def check_model(config: TrainConfig, num_workers: int, checkpoints: Path, resume_step: int | None) -> bool:
    """The part that is not about data. Returns whether anything is left to train.

    Raises:
        ConfigError: the model is too large for the host's memory. (Of a device it would take some to ask.)
        CheckpointError: see `check_saved_model`.
    """
    check_saved_model(config, checkpoints, resume_step)
    if is_finished(config, checkpoints, resume_step):
        return False
    accelerator = get_accelerator()
    if accelerator.device_type == "cpu":
        memory = [device_memory(accelerator, num_workers)] * num_workers
        refuse_too_large(config, plan_run(config, num_workers), memory, accelerator.device_type)
    return True


def is_finished(config: TrainConfig, checkpoints: Path, resume_step: int | None) -> bool:
    """Whether nothing is left to train, going by the names and sizes of files."""
    return any(layout.step_of(folder) >= config.train.steps for folder in _candidates(checkpoints, resume_step))


def check_saved_model(config: TrainConfig, checkpoints: Path, resume_step: int | None) -> None:
    """Raises CheckpointError if the run cannot resume, whichever of its checkpoints is whole: none is of its model."""
    if config.checkpoint.allow_other_model:
        return
    present = config.model.model_dump(mode="json")
    saved = _states(checkpoints, resume_step)
    changes = [model_changes(state.get("config", {}).get("model", {}), present) for state in saved.values()]
    if changes and all(changes):
        raise other_model(list(saved)[-1], changes[-1])


def check_position(config: TrainConfig, checkpoints: Path, resume_step: int | None, read: Datasets | None) -> None:
    """Raises DataError if the run cannot resume, whichever of its checkpoints is whole: none has a position in its
    data. Where these were not `read` they count as the same, and only seed, order and sizes are compared."""
    loop = config.train
    present: dict[str, Any] = {
        "seed": loop.seed,
        "shuffle": config.data.shuffle,
        "global_batch_size": loop.global_batch_size,
        "sequence_length": loop.sequence_length,
    }
    if read is not None:
        present |= {"num_sequences": read.train.num_sequences, "fingerprint": read.train.fingerprint}
    errors = []
    for state in _states(checkpoints, resume_step).values():
        try:
            refuse_other_order(state.get("loader", {}), present)
            return
        except DataError as error:
            errors.append(error)
    if errors:
        raise errors[-1]


def _candidates(checkpoints: Path, resume_step: int | None) -> list[Path]:
    """The checkpoints that a run may go on from, by ascending step: it takes the last one that is not damaged."""
    folders = layout.complete_folders(checkpoints)
    if resume_step is None:
        return folders
    with contextlib.suppress(OSError, ValueError):  # damaged
        if folders and layout.was_trained_since(folders[-1], resume_step):
            return folders
    return [folder for folder in folders if layout.step_of(folder) == resume_step]


def _states(checkpoints: Path, resume_step: int | None) -> dict[Path, dict[str, Any]]:
    """What they say of themselves; nothing where one is damaged, which those who compare checksums tell."""
    try:
        return {
            folder: json.loads((folder / layout.TRAIN_STATE).read_text())
            for folder in _candidates(checkpoints, resume_step)
        }
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """Workers will log what reading the data meets."""
    log = logging.getLogger("equipoise.data")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)
