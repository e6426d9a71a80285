"""A whole training run in this process, which is one rank of the world that its launcher describes."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from equipoise.accelerator import get_accelerator
from equipoise.checkpoint.hf import dtype_of, export, open_source
from equipoise.checkpoint.layout import step_path
from equipoise.distributed.agree import together
from equipoise.distributed.world import World, join_world
from equipoise.errors import CheckpointError
from equipoise.run_files import CHECKPOINTS
from equipoise.train.config import TrainConfig
from equipoise.train.log import configure_logging
from equipoise.train.progress import ByteProgress
from equipoise.train.resolved import check_run_folder, hold_run_folder, save_resolved
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer, build_datasets

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"
"""Folder inside a run folder that `save_hf` writes."""


def run_training(
    config: TrainConfig,
    out: Path,
    argv: Sequence[str],
    resume: bool,
    typed: str = "",
    resume_step: int | None = None,
) -> None:
    """Trains `config` to the end in run folder `out`, or until a signal asks to stop, after saving.

    Args:
        config: checked settings.
        out: run folder, the same on every rank; gets `config.toml`, `run.json`, `metrics.jsonl`, `checkpoints/`.
        argv: the command, for `run.json`.
        resume: continue from the newest complete checkpoint in `out`, if there is one.
        typed: the command line as the user gave it, for `run.json`; where it is empty, `argv`.
        resume_step: continue from the checkpoint of this step instead of the newest.
    """
    configure_logging()
    with (
        StopSignals() as stop,
        join_world(get_accelerator(), config.parallel.timeout_s) as world,
        ExitStack() as held,
    ):
        together(lambda: check_run_folder(out, resume, resume_step), world)
        on_rank_0(world, lambda: held.enter_context(hold_run_folder(out)))
        datasets = build_datasets(config, world)
        trainer = Trainer(config, world, datasets, out, stop)
        trainer.restore(resume, resume_step)
        # Only now: a run that the checkpoints refuse leaves the settings of the run that wrote them.
        on_rank_0(world, lambda: save_resolved(config, out, argv, typed))
        trainer.run()
        if world.rank == 0 and config.save_hf and trainer.step == config.train.steps:
            last = step_path(out / CHECKPOINTS, trainer.step)
        else:
            last = None
    if last is not None:  # the other ranks are gone by now and wait for nothing
        save_hf(last, out / HF_FOLDER)


def save_hf(checkpoint: Path, target: Path) -> None:
    """Writes the model of a checkpoint as a Hugging Face folder, unless it is there already."""
    if target.exists():
        logger.warning("%s is there already and stays as it is", target)
        return
    source = open_source(checkpoint)
    try:
        with ByteProgress(f"save {target}") as progress:
            export(source, target, "hf", dtype_of(source.hf_config), progress=progress)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. The training is saved: write the model with `equipoise convert {checkpoint} DST --to hf`"
        ) from error
    finally:
        source.close()
    logger.info("saved the model for Hugging Face in %s", target)


def on_rank_0(world: World, action: Callable[[], object]) -> None:
    """Does something on rank 0 alone; its error is raised on every rank. Collective."""
    together(lambda: action() if world.rank == 0 else None, world)
