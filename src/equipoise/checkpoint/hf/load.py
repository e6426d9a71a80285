"""Reads a folder's weights into a live model, sharded or not: every rank reads only what it holds."""

from collections.abc import Iterator
from pathlib import Path

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
"""Bytes per second below which reading counts as hanging."""


def load_weights(
    model: nn.Module, config: ModelConfig, path: Path, world: World, progress: Progress | None = None
) -> int:
    """Fills the parameters and buffers of `model` from the folder at `path`; returns the bytes that this rank filled.

    Collective. Values are cast to the dtypes of the model. `progress` is called with this rank's bytes.

    Raises:
        CheckpointError, RankFailure: on every rank; before a parameter changes unless a file changes while being read.
    """
    source, error = None, None
    regions: list[Region] = []
    try:
        source = FolderSource(Path(path), config)
        regions = list(_regions(model, source))
        if world.rank == 0:  # it reads tensors that are there twice: once is enough
            source.check_contents()
    except CheckpointError as raised:
        error = raised
    total = sum(region.target.numel() * region.target.itemsize for region in regions)
    try:
        raise_together(error, world)
        assert source is not None
        deadline_s = 10 * world.timeout_s + total / SLOWEST_READ
        with world.operation(f"load weights from {path}", deadline_s=deadline_s):
            try:
                _fill(source, regions, total, progress or (lambda done, total: None))
            except (CheckpointError, OSError) as raised:
                error = CheckpointError(f"cannot load weights from {path} on rank {world.rank}: {raised}")
        raise_together(error, world)
    finally:
        if source is not None:
            source.close()
    return total


class Region:
    """What this rank holds of one parameter: where it starts in the whole, and the tensor to be filled."""

    def __init__(self, name: str, start: tuple[int, ...], target: torch.Tensor) -> None:
        self.name, self.start, self.target = name, start, target


def _regions(model: nn.Module, source: FolderSource) -> Iterator[Region]:
    tensors = model_tensors(model)
    problems = [f"{name!r} of the model is not in the folder" for name in tensors if name not in source.tensors]
    problems += [f"{name!r} of the folder is not in the model" for name in source.tensors if name not in tensors]
    for name, tensor in tensors.items():
        if name in source.tensors and tuple(tensor.shape) != source.tensors[name].shape:
            have, want = list(source.tensors[name].shape), list(tensor.shape)
            problems.append(f"{name!r} has shape {have} in the folder and {want} in the model")
    if problems:
        raise CheckpointError(f"{source.path}: {'; '.join(problems[:5])}. No parameter was changed")
    for name, tensor in tensors.items():
        tensor = tensor.detach()
        if not isinstance(tensor, DTensor):
            yield Region(name, (0,) * tensor.dim(), tensor)
            continue
        local = tensor.to_local()
        if local.numel() == 0:
            continue
        (chunk,) = tensor.__create_chunk_list__()  # of DTensor's protocol for checkpoints
        assert chunk.sizes == local.shape, (name, chunk, local.shape)
        yield Region(name, tuple(chunk.offsets), local)


@torch.no_grad()
def _fill(source: FolderSource, regions: list[Region], total: int, progress: Progress) -> None:
    done = 0
    for region in regions:
        target = region.target
        step = max(1, ROWS_BYTES // max(1, target[:1].numel() * target.itemsize))
        for first in range(0, target.shape[0], step):
            rows = target[first : first + step]
            start = (region.start[0] + first, *region.start[1:])
            rows.copy_(source.read(region.name, start, tuple(rows.shape), rows.dtype))
            done += rows.numel() * rows.itemsize
            progress(done, total)
