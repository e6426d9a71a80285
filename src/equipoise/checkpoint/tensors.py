"""The tensors of a training state under names that are the same at any world size, mesh and compile setting.

    model.<name>              parameters and persistent buffers (a tied tensor once, under its first name)
    optimizer.<name>.<slot>   optimizer state of the parameter <name>, e.g. slot exp_avg, exp_avg_sq, step
    rng.<rank>.<part>         random state of one rank

A plain tensor has to hold the same on every rank; what differs between ranks has to be a DTensor.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from equipoise.errors import CheckpointError

MODEL, OPTIMIZER, RNG = "model.", "optimizer.", "rng."
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
_CHECK_WORDS = 1 << 20  # 8-byte words that one step of a checksum reads


class Stored(NamedTuple):
    """Shape and dtype of one tensor of a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def model_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Live parameters and persistent buffers by name, without the prefix; FSDP's in sharded form.

    They are looked up anew at each call, so a buffer that was replaced rather than changed is seen.
    """
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.state_dict(keep_vars=True).items():  # hooks of FSDP reshard what was gathered
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(f"cannot save {name!r} of the model: expected a tensor, got {type(value).__name__}")
        if id(value) in seen:
            continue
        seen.add(id(value))
        for wrapper in _WRAPPERS:
            name = name.replace(wrapper, "")
        tensors[name] = value
    return tensors


def optimizer_parameters(
    model: Mapping[str, torch.Tensor], optimizer: Optimizer
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Index in the optimizer's state dict, name and tensor of each parameter that the optimizer updates."""
    names = {id(tensor): name for name, tensor in model.items()}
    index = 0
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            name = names.get(id(parameter))
            if name is None:
                raise CheckpointError(
                    f"parameter group {number} of the optimizer holds a parameter of shape "
                    f"{list(parameter.shape)} that is not in the model. Make the optimizer from the model's "
                    "parameters, after the model is sharded."
                )
            yield index, name, parameter
            index += 1


def optimizer_tensors(
    model: Mapping[str, torch.Tensor], optimizer: Optimizer
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """State of the optimizer by `<name>.<slot>`, and the names of parameters that have none (yet)."""
    tensors: dict[str, torch.Tensor] = {}
    stateless: list[str] = []
    for _, name, parameter in optimizer_parameters(model, optimizer):
        slots = {slot: v for slot, v in optimizer.state.get(parameter, {}).items() if v is not None}
        if not slots:
            stateless.append(name)
        for slot, value in slots.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(
                    f"cannot save slot {slot!r} of the optimizer for {name!r}: expected a tensor, "
                    f"got {type(value).__name__}. Use an optimizer whose state is tensors, such as AdamW."
                )
            tensors[f"{name}.{slot}"] = value
    return tensors, stateless


def check_model(model: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> None:
    """Raises CheckpointError unless both have the same names, shapes and dtypes."""
    problems = [f"{name!r} of the model is missing in the checkpoint" for name in model if name not in stored]
    problems += [f"{name!r} of the checkpoint is not in the model" for name in stored if name not in model]
    for name, tensor in model.items():
        have = Stored(tuple(tensor.shape), tensor.dtype)
        if name in stored and stored[name] != have:
            problems.append(
                f"{name!r} has shape {list(stored[name].shape)} ({stored[name].dtype}) in the checkpoint "
                f"and {list(have.shape)} ({have.dtype}) in the model"
            )
    _raise_for(problems)


def optimizer_targets(
    model: Mapping[str, torch.Tensor],
    optimizer: Optimizer,
    stored: Mapping[str, Stored],
    stateless: Iterable[str],
) -> dict[str, torch.Tensor]:
    """Zero tensors by `<name>.<slot>`, laid out like the parameters, into which stored state can be read.

    A fresh optimizer has no state of its own to be filled. One that keeps its state elsewhere than the parameters are
    has a method `new_state(parameter, dtype)`. `stateless` are the parameters that had none when
    saved. Raises CheckpointError if the state of any parameter is missing, left over, or of another shape.
    """
    slots_of: dict[str, dict[str, Stored]] = {}
    for key, value in stored.items():
        name, slot = key.rsplit(".", 1)
        slots_of.setdefault(name, {})[slot] = value
    targets: dict[str, torch.Tensor] = {}
    problems, known, without = [], set(), set(stateless)
    new_state = getattr(optimizer, "new_state", _zeros_like)
    for _, name, parameter in optimizer_parameters(model, optimizer):
        known.add(name)
        if name not in slots_of and name not in without:
            problems.append(f"optimizer state of {name!r} is missing in the checkpoint")
        for slot, (shape, dtype) in slots_of.get(name, {}).items():
            if shape == tuple(parameter.shape):
                targets[f"{name}.{slot}"] = new_state(parameter, dtype)
            elif shape == ():
                targets[f"{name}.{slot}"] = torch.zeros((), dtype=dtype)
            else:
                problems.append(
                    f"optimizer state {slot!r} of {name!r} has shape {list(shape)} in the checkpoint; "
                    f"the parameter has {list(parameter.shape)}"
                )
    problems += [
        f"optimizer state of {name!r} in the checkpoint belongs to no parameter that is trained"
        for name in slots_of
        if name not in known
    ]
    _raise_for(problems)
    return targets


def set_optimizer_tensors(
    model: Mapping[str, torch.Tensor], optimizer: Optimizer, values: Mapping[str, torch.Tensor]
) -> None:
    """Makes `values` (by `<name>.<slot>`) the whole state of the optimizer; its own hyperparameters stay."""
    slots_of: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in values.items():
        name, slot = key.rsplit(".", 1)
        slots_of.setdefault(name, {})[slot] = value
    state: dict[int, Any] = {}
    for index, name, _ in optimizer_parameters(model, optimizer):
        if name in slots_of:
            state[index] = slots_of[name]
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def checksums(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """One int64 per tensor, [tensors] on CPU: a position-dependent sum of its bits, equal if they are."""
    sums = [_checksum(tensor) for tensor in tensors]
    return torch.stack([s.cpu() for s in sums]) if sums else torch.zeros(0, dtype=torch.int64)


def digest(text: str) -> int:
    """A non-negative int64 that depends on `text`; the same on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def is_replicated(tensor: torch.Tensor) -> bool:
    """Whether it is a plain tensor, which every rank holds in full."""
    return not isinstance(tensor, DTensor)


def _zeros_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    total = torch.full((), data.numel(), dtype=torch.int64, device=data.device)
    for start in range(0, data.numel(), 8 * _CHECK_WORDS):
        chunk = data[start : start + 8 * _CHECK_WORDS]
        chunk = nn.functional.pad(chunk, (0, -chunk.numel() % 8))
        words = chunk.clone().view(torch.int64)
        weights = torch.arange(words.numel(), device=data.device) * 2 + (2 * (start // 8) + 1)
        total = total * 31 + (words * weights).sum()
    return total


def _raise_for(problems: list[str]) -> None:
    if problems:
        more = f"; and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(
            "; ".join(problems[:5]) + more + ". No parameter was changed. Resume with the model and optimizer "
            "settings of the run that saved it (they are in its train_state.json)."
        )
