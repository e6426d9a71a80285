"""Reads a folder's weights into a live model, sharded or not: every rank reads only what it holds."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equipoise.checkpoint.hf.source import FolderSource
from equipoise.checkpoint.hf.write import ROWS_BYTES, Progress
from equipoise.checkpoint.tensors import model_tensors
from equipoise.distributed.agree import raise_together
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError
from equipoise.models.config import ModelConfig

SLOWEST_READ = 10e6
"""Bytes per second and rank below which reading counts as hanging."""
BETWEEN_AGREEMENTS = 2e9
"""Bytes that each rank reads, about, before all agree that they are well: none runs far ahead of a slow one."""


def load_weights(
    model: nn.Module, config: ModelConfig, path: Path, world: World, progress: Progress | None = None
) -> int:
    """Fills the parameters and buffers of `model` from the folder at `path`; returns the bytes that this rank filled.

    Collective. Values are cast to the dtypes of the model. `progress` is called with this rank's bytes.

    Raises:
        CheckpointError, RankFailure: on every rank; before a parameter changes unless a file changes while being read.
    """
    deadline_s = 10 * world.timeout_s + BETWEEN_AGREEMENTS / SLOWEST_READ
    with ExitStack() as opened:
        source: FolderSource | None = None
        batches: list[list[Region]] = []

        def prepare() -> None:
            nonlocal source, batches
            source = opened.enter_context(closing(FolderSource(Path(path), config)))
            batches = _batches(model, source, BETWEEN_AGREEMENTS * world.size)
            source.check_contents(world.rank, world.size)

        with world.operation(f"check the weights in {path}", deadline_s=deadline_s):
            _together(prepare, path, world)
        assert source is not None
        total = sum(region.num_bytes for batch in batches for region in batch)
        done, tell = 0, progress or (lambda done, total: None)
        for batch in batches:
            with world.operation(f"load weights from {path}", deadline_s=deadline_s):
                _together(partial(_fill, source, batch, done, total, tell), path, world)
            done += sum(region.num_bytes for region in batch)
    return total


def _together(action: Callable[[], None], path: Path, world: World) -> None:
    """Does something on every rank; an error of one is raised on all."""
    error: Exception | None = None
    try:
        action()
    except CheckpointError as raised:
        error = raised
    except Exception as raised:
        error = CheckpointError(f"cannot load weights from {path} on rank {world.rank}: {raised}")
        error.__cause__ = raised
    raise_together(error, world)


class Region(NamedTuple):
    """What this rank holds of one parameter: where it starts in the whole, and the tensor to be filled."""

    name: str
    start: tuple[int, ...]
    target: torch.Tensor

    @property
    def num_bytes(self) -> int:
        return self.target.numel() * self.target.itemsize


def _batches(model: nn.Module, source: FolderSource, batch_bytes: float) -> list[list[Region]]:
    """What this rank has to fill, in batches of about so many bytes over all ranks; as many batches on every rank."""
    tensors = model_tensors(model)
    problems = [f"{name!r} of the model is not in the folder" for name in tensors if name not in source.tensors]
    problems += [f"{name!r} of the folder is not in the model" for name in source.tensors if name not in tensors]
    for name, tensor in tensors.items():
        if name in source.tensors and tuple(tensor.shape) != source.tensors[name].shape:
            have, want = list(source.tensors[name].shape), list(tensor.shape)
            problems.append(f"{name!r} has shape {have} in the folder and {want} in the model")
    if problems:
        raise CheckpointError(f"{source.path}: {'; '.join(problems[:5])}. No parameter was changed")
    batches: list[list[Region]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if size >= batch_bytes:
            batches.append([])
            size = 0
        size += tensor.numel() * tensor.itemsize
        region = _region(name, tensor.detach())
        if region.target.numel():
            batches[-1].append(region)
    return batches


def _region(name: str, tensor: torch.Tensor) -> Region:
    if not isinstance(tensor, DTensor):
        return Region(name, (0,) * tensor.dim(), tensor)
    local = tensor.to_local()
    if local.numel() == 0:
        return Region(name, (0,) * tensor.dim(), local)
    (chunk,) = tensor.__create_chunk_list__()  # of DTensor's protocol for checkpoints
    assert chunk.sizes == local.shape, (name, chunk, local.shape)
    return Region(name, tuple(chunk.offsets), local)


@torch.no_grad()
def _fill(source: FolderSource, batch: list[Region], done: int, total: int, progress: Progress) -> None:
    for region in batch:
        target = region.target
        step = max(1, ROWS_BYTES // (target[:1].numel() * target.itemsize))
        for first in range(0, target.shape[0], step):
            rows = target[first : first + step]
            start = (region.start[0] + first, *region.start[1:])
            rows.copy_(source.read(region.name, start, tuple(rows.shape), rows.dtype))
            done += rows.numel() * rows.itemsize
            progress(done, total)
