"""Agreement between ranks: an error of one is raised by all; values are exchanged as JSON, never pickled."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import distributed as dist

from equipoise.distributed.collectives import group_device
from equipoise.distributed.status import LISTED, shorten_ranks
from equipoise.distributed.watch import describe
from equipoise.distributed.world import World
from equipoise.errors import CheckpointError, ConfigError, DataError, EquipoiseError, RankFailure

Scope = World | dist.ProcessGroup
Returned = TypeVar("Returned")


def raise_together(error: BaseException | None, scope: Scope) -> None:
    """Raises on every rank of `scope` if any of them has an error; collective, one number on the happy path.

    A rank's own error is raised as it is, with a note of the others'; a rank without one raises RankFailure
    that names the ranks and their errors. The first rank that has one is to tell it (`EquipoiseError.told_by`).
    """
    with _group(scope, "agree on errors") as group:
        failed = torch.tensor([int(error is not None)], device=group_device(group))
        dist.all_reduce(failed, group=group)
        if failed.item() == 0:
            return
        texts = gather_json(None if error is None else describe(error), group)
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
    by_text: dict[str, list[int]] = {}
    for rank, text in zip(ranks, texts):
        if text is not None:
            by_text.setdefault(text, []).append(rank)
    failing = [rank for those in by_text.values() for rank in those]
    alike = by_text.pop(texts[own], [])
    lines = [f"  rank{'s' * (len(those) > 1)} {shorten_ranks(those)}: {text}" for text, those in by_text.items()]
    if len(lines) > LISTED:
        lines[LISTED:] = [f"  and {len(lines) - LISTED} more"]
    if error is None:
        error = RankFailure("\n".join([f"{len(failing)} of {len(ranks)} ranks failed:", *lines]))
    else:
        if len(alike) > 1:
            error.add_note(f"(the same on ranks {shorten_ranks(alike)} of {len(ranks)})")
        if lines:
            error.add_note("\n".join([f"Other ranks of {len(ranks)} failed otherwise:", *lines]))
    if isinstance(error, EquipoiseError):
        error.told_by = min(failing)
    raise error


def together(action: Callable[[], Returned], scope: Scope) -> Returned:
    """What `action` returns, which each rank calls alone; an error of one is raised on all, by `raise_together`."""
    value, error = None, None
    try:
        value = action()
    except Exception as e:
        error = e
    raise_together(error, scope)
    return cast(Returned, value)


@contextlib.contextmanager
def raised_by_all() -> Iterator[None]:
    """For a block that raises its errors of settings, checkpoints and data on every rank of the world by itself: rank 0
    is to tell them."""
    try:
        yield
    except (CheckpointError, ConfigError, DataError) as error:  # of others, such as a missing rank, each tells its own
        error.told_by = 0 if error.told_by is None else error.told_by
        raise


def gather_json(value: Any, scope: Scope) -> list[Any]:
    """Every rank's value, by rank of the group; collective. Values are sent as JSON text.

    Raises on every rank: the rank's own TypeError or ValueError where a value cannot be written as JSON (NaN
    cannot), RankFailure on the others.
    """
    failure: Exception | None = None
    data = b""
    try:
        data = json.dumps(value, allow_nan=False).encode()
    except (TypeError, ValueError) as e:
        failure = e
    with _group(scope, "exchange values") as group:
        device = group_device(group)
        length = torch.tensor([-1 if failure else len(data)], device=device)
        lengths = [torch.empty_like(length) for _ in range(group.size())]
        dist.all_gather(lengths, length, group=group)
        sizes = [int(n) for n in torch.cat(lengths).tolist()]
        if failure is not None:
            raise failure
        if min(sizes) < 0:
            ranks = [r for r, n in zip(dist.get_process_group_ranks(group), sizes) if n < 0]
            raise RankFailure(f"ranks {ranks} have a value that cannot be written as JSON; see their logs")
        text = torch.zeros(max(sizes), dtype=torch.uint8)
        text[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        texts = [torch.empty_like(text, device=device) for _ in sizes]
        dist.all_gather(texts, text.to(device), group=group)
    return [json.loads(bytes(t.cpu()[:n].tolist())) for t, n in zip(texts, sizes)]


@contextlib.contextmanager
def _group(scope: Scope, what: str) -> Iterator[dist.ProcessGroup]:
    """The scope's group; within a World also as an operation, so that a missing rank is named."""
    if isinstance(scope, World):
        with scope.operation(what, scope.group):
            yield scope.group
    else:
        yield scope
