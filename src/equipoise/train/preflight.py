"""Mistakes that the process which starts the workers can find before it does: in seconds less, and told once."""

from pathlib import Path

from equipoise.accelerator import get_accelerator
from equipoise.checkpoint import layout
from equipoise.checkpoint.resume import other_model, saved_model
from equipoise.data.corpus import check_data
from equipoise.models.config import model_changes
from equipoise.train.config import TrainConfig, plan_run
from equipoise.train.memory import device_memory, refuse_too_large


def check_start(config: TrainConfig, num_workers: int, checkpoints: Path, resume_step: int | None) -> None:
    """For a run of `num_workers` ranks on this host, which will look again, together.

    Raises:
        ConfigError: the model is too large for the host's memory. (Of a device it would take some to ask.)
        CheckpointError: see `check_saved_model`.
        DataError: see `check_data`.
    """
    accelerator = get_accelerator()
    if accelerator.device_type == "cpu":
        memory = [device_memory(accelerator, num_workers)] * num_workers
        refuse_too_large(config, plan_run(config, num_workers).axes, memory, accelerator.device_type)
    if not config.checkpoint.allow_other_model:
        check_saved_model(config, checkpoints, resume_step)
    if num_workers > 1:  # a single one reads its data at once
        check_data(config.data, config.model.vocab_size)


def check_saved_model(config: TrainConfig, checkpoints: Path, resume_step: int | None) -> None:
    """Raises CheckpointError if the run cannot resume, whichever of its checkpoints is whole: none is of its model."""
    folders = layout.complete_folders(checkpoints)
    if resume_step is not None and not (folders and layout.was_trained_since(folders[-1], resume_step)):
        folders = [folder for folder in folders if layout.step_of(folder) == resume_step]
    present = config.model.model_dump(mode="json")
    try:
        changes = [model_changes(saved_model(folder), present) for folder in folders]
    except (OSError, ValueError):  # damaged: told by those who compare checksums
        return
    if changes and all(changes):
        raise other_model(folders[-1], changes[-1])
