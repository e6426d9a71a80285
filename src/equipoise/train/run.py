"""A whole training run in this process, which is one rank of the world that its launcher describes."""

import logging
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from equipoise.accelerator import get_accelerator
from equipoise.checkpoint.hf import dtype_of, export, open_source
from equipoise.checkpoint.layout import step_of, step_path
from equipoise.checkpoint.training import choose_checkpoint
from equipoise.distributed.agree import gather_json, raised_by_all, together
from equipoise.distributed.world import World, join_world
from equipoise.errors import CheckpointError
from equipoise.files import free_name, written_whole
from equipoise.run_files import CHECKPOINTS
from equipoise.train.config import TrainConfig
from equipoise.train.log import configure_logging
from equipoise.train.preflight import check_saved_model, is_finished
from equipoise.train.progress import ByteProgress
from equipoise.train.resolved import check_run_folder, hold_run_folder, save_resolved, writing
from equipoise.train.stop import StopSignals
from equipoise.train.trainer import Trainer, build_datasets

logger = logging.getLogger(__name__)

HF_FOLDER = "hf"
"""Folder inside a run folder that `save_hf` writes."""
HF_STEP = "STEP"
"""File in that folder with the step after which it was written."""


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

    def make(world: World, stop: StopSignals) -> Trainer:
        return Trainer(config, world, build_datasets(config, world), out, stop)

    run_trainer(make, config, out, argv, resume, typed, resume_step)


def run_trainer(
    make: Callable[[World, StopSignals], Trainer],
    config: TrainConfig,
    out: Path,
    argv: Sequence[str],
    resume: bool,
    typed: str,
    resume_step: int | None,
) -> None:
    """The same with the trainer that `make` returns."""
    with (
        StopSignals() as stop,
        join_world(get_accelerator(), config.parallel.timeout_s) as world,
        ExitStack() as held,
    ):
        together(lambda: check_run_folder(out, resume, resume_step), world)
        on_rank_0(world, lambda: held.enter_context(hold_run_folder(out)))
        step = finished_step(config, out / CHECKPOINTS, world, resume_step)
        if step is None:
            trainer = make(world, stop)
            trainer.restore(resume, resume_step)
            # Only now: a run that the checkpoints refuse leaves the settings of the run that wrote them.
            on_rank_0(world, lambda: save_resolved(config, out, argv, typed))
            if world.rank == 0 and trainer.step < config.train.steps:
                tell_of_older(out / HF_FOLDER, trainer.step, config.save_hf)
            trainer.run()
            step = trainer.step
    if config.save_hf and world.rank == 0 and step == config.train.steps:  # the other ranks are gone by now
        save_hf(step_path(out / CHECKPOINTS, step), out / HF_FOLDER)


@raised_by_all()
def finished_step(config: TrainConfig, checkpoints: Path, world: World, resume_step: int | None) -> int | None:
    """The step that the run has, where nothing is left to train: then nobody needs its data, nor memory for its model.
    Collective.

    Raises:
        CheckpointError: on every rank, as `Trainer.restore` does.
    """
    looked = together(lambda: world.rank == 0 and is_finished(config, checkpoints, resume_step), world)
    if not any(gather_json(looked, world)):
        return None
    path = choose_checkpoint(checkpoints, world, resume_step, config.checkpoint.verify)
    if path is None or step_of(path) < config.train.steps:  # later ones are damaged
        return None
    together(lambda: check_saved_model(config, checkpoints, resume_step), world)
    if world.rank == 0:
        step, steps = step_of(path), config.train.steps
        logger.info(
            "nothing to train: step %d is done and train.steps is %d; raise it. It is saved in %s", step, steps, path
        )
    return step_of(path)


def save_hf(checkpoint: Path, target: Path) -> None:
    """Writes the model of a checkpoint as a Hugging Face folder, unless it is there already. That of an earlier end, or
    what else is there, is kept beside it."""
    step = step_of(checkpoint)
    if saved_step(target) == step:
        logger.info("%s is there already", target)
        return
    if target.exists():
        aside = free_name(target.with_name(f"{target.name}-previous"))
        with writing(aside):
            target.rename(aside)
        logger.info("the model that an earlier end of the run left is now in %s", aside)
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
    with writing(target), written_whole(target / HF_STEP) as partial:
        partial.write_text(f"{step}\n")
    logger.info("saved the model for Hugging Face in %s", target)


def saved_step(target: Path) -> int | None:
    """The step after which `save_hf` has written `target`; None if it has not, or not to the end."""
    try:
        return int((target / HF_STEP).read_text())
    except (OSError, ValueError):
        return None


def tell_of_older(target: Path, step: int, replaced: bool) -> None:
    """Warns of what `save_hf` wrote at an earlier end, where the run goes on after `step`."""
    if target.exists():
        known = saved_step(target)
        logger.warning(
            "%s holds the model of an earlier end of this run%s, and training goes on after step %d; %s",
            target,
            "" if known is None else f", after step {known}",
            step,
            f"it is {target.name}-previous once this run has ended" if replaced else "it stays as it is",
        )


def on_rank_0(world: World, action: Callable[[], object]) -> None:
    """Does something on rank 0 alone; its error is raised on every rank. Collective."""
    together(lambda: action() if world.rank == 0 else None, world)
