"""Choosing the checkpoint that a run continues from, and reading it into a model and an optimizer.

All functions that take a world are collective: every rank calls them, and an error on one is raised on all. None
writes anything.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from equipoise.checkpoint import layout, rng
from equipoise.checkpoint import tensors as names
from equipoise.checkpoint.manifest import damage, incomplete_reason
from equipoise.checkpoint.state import RestoredMeta, TrainingState
from equipoise.checkpoint.tensors import MODEL, OPTIMIZER, RNG, Stored
from equipoise.checkpoint.together import is_distributed, together, torch_checkpoint
from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError
from equipoise.models.config import OF_WEIGHTS, describe_changes, model_changes

logger = logging.getLogger(__name__)


def find_latest(directory: Path, world: World | None = None) -> Path | None:
    """Newest complete checkpoint in `directory`, or None; incomplete newer ones are logged and ignored.

    With `world`, rank 0 looks and every rank gets its answer, so that all take the same. Contents are not read: see
    `choose_checkpoint`.
    """
    directory = Path(directory)
    if world is None:
        return layout.newest_complete(directory)
    return _rank_0_finds(directory, world, lambda: layout.newest_complete(directory))


def choose_checkpoint(
    directory: Path, world: World, resume_step: int | None = None, verify: bool = True
) -> Path | None:
    """The checkpoint that a run continues from: the newest complete one, or that of `resume_step`; None where the
    directory has no complete one.

    With `verify` all its files are compared with their checksums, a part of them by each rank, and a damaged
    checkpoint is passed over with a warning. Once a run has gone back to `resume_step` and saved again, later calls
    take what it has saved since, so that a command which is started again loses nothing.

    Raises CheckpointError on every rank if `resume_step` is not there or damaged, or if all complete ones are damaged.
    """
    directory = Path(directory)
    path = _rank_0_finds(directory, world, lambda: layout.wanted(directory, resume_step))
    damaged: list[str] = []
    while path is not None and verify:
        reason = _damage_together(path, world)
        if reason is None:
            break
        step = layout.step_of(path)
        if step == resume_step:
            raise CheckpointError(f"cannot resume from step {step}: {path} is damaged: {reason}. Choose another step.")
        if world.rank == 0:
            logger.warning("checkpoint of step %d is damaged and ignored: %s: %s", step, path, reason)
        damaged.append(path.name)
        path = _rank_0_finds(directory, world, lambda: layout.newest_complete(directory, below=step))  # noqa: B023
    if path is None and damaged:
        raise CheckpointError(
            f"every complete checkpoint in {directory} is damaged ({', '.join(damaged)}): their files differ from the "
            "checksums in COMPLETE. Restore them from a copy, or start anew in another run folder with --out."
        )
    return path


def _rank_0_finds(directory: Path, world: World, find: Callable[[], Path | None]) -> Path | None:
    """What rank 0 finds in `directory`, on every rank."""
    step = -1
    with together(world, f"cannot read checkpoints in {directory}", "Check the folder's permissions."):
        if world.rank == 0:
            path = find()
            step = -1 if path is None else layout.step_of(path)
    if is_distributed(world):
        step = gather_json(step, world)[0]
    return None if step < 0 else layout.step_path(directory, step)


def _damage_together(path: Path, world: World) -> str | None:
    """How a complete checkpoint differs from its manifest, on every rank; None if it does not."""
    reason = None
    with (
        world.operation(f"verify checkpoint {path.name}"),
        together(world, f"cannot read checkpoint {path}", "Check the file system, or set --no-checkpoint.verify."),
    ):
        missing = incomplete_reason(path)  # rank 0 has seen it complete
        if missing is not None:
            raise CheckpointError(f"cannot load checkpoint {path} on rank {world.rank}: {missing}.")
        reason = damage(path, world.rank, world.size)
    reasons = gather_json(reason, world) if is_distributed(world) else [reason]
    return next((r for r in reasons if r is not None), None)


def refuse_existing(directory: Path, world: World) -> None:
    """For a run that starts anew: raises CheckpointError on every rank if `directory` holds a checkpoint."""
    layout.refuse_any(directory, find_latest(directory, world))


def other_model(path: Path, changes: dict[str, tuple[Any, Any]]) -> CheckpointError:
    """The error of a checkpoint whose model differs from the run's in the settings `changes` (see `model_changes`)."""
    if OF_WEIGHTS & changes.keys():
        return CheckpointError(
            f"{path}: the checkpoint is of a model with other weights: {describe_changes(changes)}. No parameter was "
            "changed. Use the settings of config.toml in the run folder, or choose another run folder with --out"
        )
    return CheckpointError(
        f"{path}: the checkpoint is of a model that computes something else: {describe_changes(changes)}. Use the "
        "settings of config.toml in the run folder, choose another --out, or set --checkpoint.allow_other_model to go "
        "on with the same weights"
    )


def load_checkpoint(path: Path, state: TrainingState, world: World) -> RestoredMeta:
    """Reads the checkpoint at `path` into `state.model` and `state.optimizer`, and restores random states.

    World size and mesh may differ from those of the save; with another world size every rank gets a fresh
    seed, derived from the saved run's, and a warning says so. Raises CheckpointError on every rank, before
    anything is changed, if the checkpoint is incomplete or differs in a name, shape or dtype.
    """
    path = Path(path)
    failure, remedy = f"cannot load checkpoint {path}", "Choose another checkpoint, or check the file system."
    with world.operation(f"load checkpoint {path.name}"):
        with together(world, failure, remedy):
            reason = incomplete_reason(path)
            if reason is not None:
                raise CheckpointError(f"cannot load checkpoint {path} on rank {world.rank}: {reason}.")
            saved = json.loads((path / layout.TRAIN_STATE).read_text())
            stored = _read_index(path)
            model = names.model_tensors(state.model)
            _check_model(path, model, stored[MODEL], saved["config"], state.config)
            moments = names.optimizer_targets(model, state.optimizer, stored[OPTIMIZER], saved["optimizer_stateless"])
            randoms = _rng_targets(stored[RNG], saved["world_size"], world)
        with torch_checkpoint(failure, remedy):
            dcp.load(
                {
                    **{MODEL + name: tensor.detach() for name, tensor in model.items()},
                    **{OPTIMIZER + name: tensor for name, tensor in moments.items()},
                    **{f"{RNG}{world.rank}.{part}": tensor for part, tensor in randoms.items()},
                },
                storage_reader=dcp.FileSystemReader(path),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=world.group if is_distributed(world) else None,
                no_dist=not is_distributed(world),
            )
        with together(world, failure, remedy):
            names.set_optimizer_tensors(model, state.optimizer, moments)
            rng_restored = _restore_random_state(randoms, saved, world)
    return RestoredMeta(
        path=path,
        step=saved["step"],
        seed=saved["seed"],
        loader=saved["loader"],
        config=saved["config"],
        metrics_position=saved["metrics_position"],
        extra=saved["extra"],
        world_size=saved["world_size"],
        rng_restored=rng_restored,
    )


def _check_model(
    path: Path,
    model: dict[str, torch.Tensor],
    stored: dict[str, Stored],
    saved: dict[str, Any],
    present: dict[str, Any],
) -> None:
    """As `tensors.check_model`; where the configurations say why tensors differ, they are named instead of these."""
    try:
        names.check_model(model, stored)
    except CheckpointError as error:
        changes = model_changes(saved.get("model", {}), present.get("model", {}))
        if OF_WEIGHTS & changes.keys():
            raise other_model(path, changes) from error
        raise


def _read_index(path: Path) -> dict[str, dict[str, Stored]]:
    """Shapes and dtypes of the checkpoint's tensors by prefix, then by name without it."""
    stored: dict[str, dict[str, Stored]] = {MODEL: {}, OPTIMIZER: {}, RNG: {}}
    for key, entry in dcp.FileSystemReader(path).read_metadata().state_dict_metadata.items():
        prefix = key.split(".", 1)[0] + "."
        if not isinstance(entry, TensorStorageMetadata) or prefix not in stored:
            raise CheckpointError(f"{path} holds {key!r}, which is no part of a training state.")
        stored[prefix][key.removeprefix(prefix)] = Stored(tuple(entry.size), entry.properties.dtype)
    return stored


def _rng_targets(stored: dict[str, Stored], saved_world_size: int, world: World) -> dict[str, torch.Tensor]:
    """Where this rank's random state is read to, by part; nothing if the number of ranks has changed."""
    if saved_world_size != world.size:
        return {}
    prefix = f"{world.rank}."
    found = {
        key.removeprefix(prefix): torch.zeros(value.shape, dtype=value.dtype)
        for key, value in stored.items()
        if key.startswith(prefix)
    }
    if not {rng.TORCH, rng.HOST} <= found.keys():
        raise CheckpointError(f"the random state of rank {world.rank} is missing in the checkpoint.")
    return found


def _restore_random_state(randoms: dict[str, torch.Tensor], saved: dict[str, Any], world: World) -> bool:
    """Restores this rank's random state, or seeds what the checkpoint lacks. True if all was restored."""
    needs_device = world.accelerator.device_type != "cpu"
    complete = bool(randoms) and (rng.DEVICE in randoms or not needs_device)
    if not complete:
        rng.seed_rng(rng.derived_seed(saved["seed"], saved["step"], world.size, world.rank), world.accelerator)
    if randoms:
        rng.restore_rng(randoms, world.accelerator)
    if world.rank == 0 and not randoms:
        logger.warning(
            "the checkpoint was saved by %d ranks and is resumed by %d: each rank starts from a fresh random "
            "seed, derived from seed %d, step %d and its rank",
            saved["world_size"],
            world.size,
            saved["seed"],
            saved["step"],
        )
    elif world.rank == 0 and not complete:
        logger.warning("the checkpoint holds no random state of a device: the device's was seeded afresh")
    return complete
