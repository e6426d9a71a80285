"""Errors of one rank raised on all, as CheckpointError that says what failed, where, and what to do."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.checkpoint.api import CheckpointException

from equipoise.distributed.agree import gather_json
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError


def is_distributed(world: World) -> bool:
    """Whether there are others to agree with; a world of one may have no process groups at all."""
    return world.size > 1


@contextmanager
def together(world: World, failure: str, remedy: str) -> Iterator[None]:
    """Raises a CheckpointError on every rank if the block raised on any. No collectives inside the block."""
    error: CheckpointError | None = None
    try:
        yield
    except CheckpointError as raised:
        error = raised
    except Exception as raised:
        error = CheckpointError(f"{failure}: rank {world.rank}: {type(raised).__name__}: {raised}. {remedy}")
        error.__cause__ = raised
    texts = gather_json(None if error is None else str(error), world) if is_distributed(world) else []
    first = next((rank for rank, text in enumerate(texts) if text is not None), None)
    if error is None and first is not None:
        error = CheckpointError(texts[first])
    if error is not None:
        error.told_by = first
        raise error


@contextmanager
def torch_checkpoint(failure: str, remedy: str) -> Iterator[None]:
    """For calls of torch.distributed.checkpoint, which itself raises the error of one rank on all."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as raised:  # not a subclass of Exception
        rank, (cause, _) = min(raised.failures.items(), key=lambda item: item[0])
        raise CheckpointError(f"{failure}: rank {rank}: {type(cause).__name__}: {cause}. {remedy}") from raised
