"""Saving and resuming the whole training state, with `torch.distributed.checkpoint` for the tensors.

Every rank writes its own shards into `step-<n>.tmp`; when all are done rank 0 adds what is not a tensor and
the manifest, renames the folder, and only then deletes old ones. So, whatever dies, a complete one
exists at each moment. Names and shapes are global, so a checkpoint loads at any world size and mesh.
All functions that take a world are collective: every rank calls them, and an error on one is raised on all.
"""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from equipoise.checkpoint import layout, rng
from equipoise.checkpoint import tensors as names
from equipoise.checkpoint.tensors import MODEL, OPTIMIZER, RNG, Stored
from equipoise.distributed.agree import gather_json
from equipoise.distributed.collectives import group_device
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError

logger = logging.getLogger(__name__)


@dataclass
class TrainingState:
    """What a run needs to continue. `model` and `optimizer` are the live objects, sharded; the rest is data.

    `loader`, `config` and `extra` are JSON-able and equal on every rank; random state is the process's own.
    """

    model: nn.Module
    optimizer: Optimizer
    step: int = 0  # optimizer steps that are finished
    seed: int = 0  # the run's seed; seeds of ranks are derived from it when the number of ranks has changed
    loader: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics_position: int = 0  # bytes of metrics.jsonl written so far
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RestoredMeta:
    """What `load_checkpoint` found beside the tensors, which it has put into the model and the optimizer."""

    path: Path
    step: int
    seed: int
    loader: dict[str, Any]
    config: dict[str, Any]  # of the run that saved; the caller's own settings stay in force
    metrics_position: int
    extra: dict[str, Any]
    world_size: int  # of the run that saved
    rng_restored: bool  # False: the number of ranks has changed and this rank got a fresh seed


def save_checkpoint(directory: Path, state: TrainingState, world: World, keep_last: int = 0) -> Path:
    """Saves `state` as `directory/step-<step>` and returns that path once it is complete and on storage.

    Older ones are then deleted down to the newest `keep_last` (0 = keep all). Raises CheckpointError on every
    rank, with the earlier checkpoints untouched, if the step is saved already, the folder can't be written
    (full, read-only, not shared between nodes), or what is saved once for all differs between ranks.
    """
    directory = Path(directory)
    final = layout.step_path(directory, state.step)
    failure = f"cannot write checkpoint {final}"
    kept = "Earlier checkpoints are untouched. Check space and permissions, or choose another run folder."
    with world.operation(f"step {state.step}: save checkpoint"):
        with _together(world, failure, kept):
            if world.rank == 0:
                layout.prepare_partial(final)
        partial = layout.partial_path(final)
        try:
            with _together(world, failure, kept):
                if not partial.is_dir():
                    raise CheckpointError(
                        f"rank {world.rank} does not see {partial}, which rank 0 has made. "
                        "The run folder has to be on storage that all nodes share."
                    )
                tensors, train_state = _collect(state, world)
            _check_same_everywhere(tensors, train_state, world)
            with _shards(failure, kept):
                dcp.save(
                    tensors,
                    storage_writer=dcp.FileSystemWriter(partial, sync_files=True),
                    planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
                    process_group=world.group if _is_distributed(world) else None,
                    no_dist=not _is_distributed(world),
                )
            with _together(world, failure, kept):
                if world.rank == 0:
                    layout.write_json(partial / layout.TRAIN_STATE, train_state)
                    layout.publish(partial, final, state.step, world.size)
        except CheckpointError:
            if world.rank == 0:
                layout.discard_partial(final)
            raise
        if world.rank == 0:
            layout.delete_old(directory, keep_last, state.step)
    return final


def find_latest(directory: Path, world: World | None = None) -> Path | None:
    """Newest complete checkpoint in `directory`, or None; incomplete newer ones are logged and ignored.

    With `world`, rank 0 looks and every rank gets its answer, so that all take the same.
    """
    directory = Path(directory)
    if world is None:
        return layout.newest_complete(directory)
    step = -1
    with _together(world, f"cannot read checkpoints in {directory}", "Check the folder's permissions."):
        if world.rank == 0:
            path = layout.newest_complete(directory)
            step = -1 if path is None else layout.step_of(path)
    if _is_distributed(world):
        step = gather_json(step, world)[0]
    return None if step < 0 else layout.step_path(directory, step)


def refuse_existing(directory: Path, world: World) -> None:
    """For a run that starts anew: raises CheckpointError on every rank if `directory` holds a checkpoint."""
    latest = find_latest(directory, world)
    if latest is not None:
        raise CheckpointError(
            f"{directory} holds {latest.name} of an earlier run, and checkpoints are never overwritten. "
            "Continue it with --resume, or choose another run folder with --out."
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
        with _together(world, failure, remedy):
            reason = layout.incomplete_reason(path)
            if reason is not None:
                raise CheckpointError(f"cannot load checkpoint {path} on rank {world.rank}: {reason}.")
            saved = json.loads((path / layout.TRAIN_STATE).read_text())
            stored = _read_index(path)
            model = names.model_tensors(state.model)
            names.check_model(model, stored[MODEL])
            moments = names.optimizer_targets(model, state.optimizer, stored[OPTIMIZER], saved["optimizer_stateless"])
            randoms = _rng_targets(stored[RNG], saved["world_size"], world)
        with _shards(failure, remedy):
            dcp.load(
                {
                    **{MODEL + name: tensor.detach() for name, tensor in model.items()},
                    **{OPTIMIZER + name: tensor for name, tensor in moments.items()},
                    **{f"{RNG}{world.rank}.{part}": tensor for part, tensor in randoms.items()},
                },
                storage_reader=dcp.FileSystemReader(path),
                planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
                process_group=world.group if _is_distributed(world) else None,
                no_dist=not _is_distributed(world),
            )
        with _together(world, failure, remedy):
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


def _collect(state: TrainingState, world: World) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    model = names.model_tensors(state.model)
    moments, stateless = names.optimizer_tensors(model, state.optimizer)
    randoms = rng.capture_rng(world.accelerator)
    tensors = {MODEL + name: tensor.detach() for name, tensor in model.items()}
    tensors |= {OPTIMIZER + name: tensor for name, tensor in moments.items()}
    tensors |= {f"{RNG}{world.rank}.{part}": tensor for part, tensor in randoms.items()}
    train_state = {
        "step": state.step,
        "seed": state.seed,
        "world_size": world.size,
        "loader": state.loader,
        "metrics_position": state.metrics_position,
        "extra": state.extra,
        "optimizer_stateless": stateless,
        "config": state.config,
        "torch": torch.__version__,
    }
    try:
        json.dumps(train_state, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of step {state.step} cannot be written as JSON: {error}. "
            "The loader's state, the config and extra values must be plain numbers, texts, lists and dicts."
        ) from error
    return tensors, train_state


def _check_same_everywhere(tensors: dict[str, torch.Tensor], train_state: dict[str, Any], world: World) -> None:
    """Raises on every rank if names, the loader's state or the contents of a plain tensor differ by rank."""
    if not _is_distributed(world):
        return
    shared = [name for name in tensors if not name.startswith(RNG)]
    plain = [name for name in shared if names.is_replicated(tensors[name])]
    facts = ["step", "seed", "loader", "extra", "optimizer_stateless"]
    values = [
        names.digest(json.dumps([(name, name in plain) for name in shared])),
        *(names.digest(json.dumps(train_state[fact], sort_keys=True)) for fact in facts),
    ]
    same = _equal_on_all(torch.tensor(values), world)
    if not same[0]:
        raise CheckpointError("cannot save: ranks have different parameters, buffers or optimizer state.")
    for fact, equal in zip(facts, same[1:], strict=True):
        if not equal:
            raise CheckpointError(
                f"cannot save: {fact!r} of the training state differs between ranks; it is saved once."
            )
    same = _equal_on_all(names.checksums(tensors[name] for name in plain), world)
    differing = [name for name, equal in zip(plain, same, strict=True) if not equal]
    if differing:
        raise CheckpointError(
            f"cannot save {', '.join(map(repr, differing[:5]))}: a plain tensor holds different values on "
            "different ranks, and only one would be kept. Make it a DTensor, keep it equal on all ranks, or "
            "exclude it (a non-persistent buffer)."
        )


def _equal_on_all(values: torch.Tensor, world: World) -> list[bool]:
    """Which of the int64 `values` [n] are equal on all ranks."""
    values = values.to(group_device(world.group))
    low, high = values.clone(), values.clone()
    dist.all_reduce(low, dist.ReduceOp.MIN, group=world.group)
    dist.all_reduce(high, dist.ReduceOp.MAX, group=world.group)
    return (low == high).tolist()


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


def _is_distributed(world: World) -> bool:
    return world.size > 1


@contextmanager
def _together(world: World, failure: str, remedy: str) -> Iterator[None]:
    """Raises a CheckpointError on every rank if the block raised on any. No collectives inside the block."""
    error: Exception | None = None
    try:
        yield
    except CheckpointError as raised:
        error = raised
    except Exception as raised:
        error = CheckpointError(f"{failure}: rank {world.rank}: {type(raised).__name__}: {raised}. {remedy}")
        error.__cause__ = raised
    texts = gather_json(None if error is None else str(error), world) if _is_distributed(world) else []
    if error is not None:
        raise error
    for text in texts:
        if text is not None:
            raise CheckpointError(text)


@contextmanager
def _shards(failure: str, remedy: str) -> Iterator[None]:
    """For calls of torch.distributed.checkpoint, which itself raises the error of one rank on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as raised:  # not a subclass of Exception
        rank, (cause, _) = min(raised.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{failure}: rank {rank}: {type(cause).__name__}: {cause}. {remedy}") from raised
