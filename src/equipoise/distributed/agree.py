"""Agreement between ranks: an error of one is raised by all; values are exchanged as JSON, never pickled."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed as dist

from equipoise.distributed.collectives import group_device
from equipoise.distributed.status import LISTED
from equipoise.distributed.watch import describe
from equipoise.distributed.world import World
from equipoise.errors import RankFailure

Scope = World | dist.ProcessGroup


def raise_together(error: BaseException | None, scope: Scope) -> None:
    """Raises on every rank of `scope` if any of them has an error; collective, one number on the happy path.

    A rank's own error is raised as it is, with a note of the others'; a rank without one raises RankFailure
    that names the ranks and their errors.
    """
    with _group(scope, "agree on errors") as group:
        failed = torch.tensor([int(error is not None)], device=group_device(group))
        dist.all_reduce(failed, group=group)
        if failed.item() == 0:
            return
        texts = gather_json(None if error is None else describe(error), group)
        ranks = dist.get_process_group_ranks(group)
        own = dist.get_rank(group)
    errors = [(rank, text) for i, (rank, text) in enumerate(zip(ranks, texts)) if text is not None and i != own]
    listed = "\n".join(f"  rank {rank}: {text}" for rank, text in errors[:LISTED])
    if len(errors) > LISTED:
        listed += f"\n  and {len(errors) - LISTED} more ranks"
    if error is None:
        raise RankFailure(f"{len(errors)} of {len(ranks)} ranks failed:\n{listed}")
    if errors:
        error.add_note(f"{len(errors)} other ranks of {len(ranks)} failed as well:\n{listed}")
    raise error


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
