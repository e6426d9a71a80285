"""What a run needs to continue, and the check that ranks agree on what is saved once."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.optim import Optimizer

from equipoise.checkpoint import rng
from equipoise.checkpoint import tensors as names
from equipoise.checkpoint.tensors import MODEL, OPTIMIZER, RNG
from equipoise.checkpoint.together import is_distributed
from equipoise.distributed.collectives import group_device
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError


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


def collect(state: TrainingState, world: World) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The live tensors of `state` by name, and what is not a tensor. Waits for the device.

    Raises CheckpointError for what cannot be saved.
    """
    world.accelerator.synchronize()  # optimizer state that lies on the host may still be on its way
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
        # A copy: training goes on, and changes lists and dicts, before this is written.
        train_state = json.loads(json.dumps(train_state, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"the state of step {state.step} cannot be written as JSON: {error}. "
            "The loader's state, the config and extra values must be plain numbers, texts, lists and dicts."
        ) from error
    return tensors, train_state


def check_same_everywhere(tensors: dict[str, torch.Tensor], train_state: dict[str, Any], world: World) -> None:
    """Raises on every rank if names, the loader's state or the contents of a plain tensor differ by rank."""
    if not is_distributed(world):
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
