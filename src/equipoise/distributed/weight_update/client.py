"""One engine as an update sees it: what a client of a serving engine has to offer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from equipoise.distributed.weight_update.manifest import ALIGNMENT, Manifest, TensorSpec


@dataclass(frozen=True)
class Layout:
    """How an engine takes its bytes.

    alignment, split: of buckets; see `plan_buckets`. flattened: a bucket is broadcast as one message; otherwise each
    tensor is. checks: the engine compares checksums at commit. one_sender: everything comes from the trainer's rank 0,
    since the engine takes one request after another and two senders could wait for each other.
    """

    alignment: int = ALIGNMENT
    split: bool = True
    flattened: bool = True
    checks: bool = True
    one_sender: bool = False


@dataclass(frozen=True)
class EngineInfo:
    """num_ranks: processes of the engine, which all join a weight-update group. tensors: what it has, by names of
    Hugging Face checkpoints; None where the engine does not say. experts: for each rank the first and the number of its
    experts, where it says."""

    num_ranks: int
    version: str
    tensors: Mapping[str, TensorSpec] | None = None
    experts: Sequence[tuple[int, int]] = field(default_factory=tuple)


class BroadcastGroup(Protocol):
    """The trainer's side of a weight-update group; it is rank 0."""

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Starts to send; returns work with `is_completed` and `wait`."""
        ...

    def close(self, *, abort: bool = False) -> None:
        """Ends the group. Twice is harmless."""
        ...


EngineSeconds = Sequence[Mapping[str, float]] | None
"""Seconds by phase of each engine rank; None where the engine does not say."""

GroupMaker = Callable[[str, int, int, torch.device], BroadcastGroup]
"""From address, port, number of ranks and the trainer's device; meets the engines."""


class EngineClient(Protocol):
    """Blocking calls, each bounded in time. An error is a WeightUpdateError that says what the engine has now."""

    layout: Layout
    address: str
    """Of the engine, for errors."""

    @property
    def group_maker(self) -> "GroupMaker | None":
        """Makes the trainer's side of a weight-update group, where the engine does not make its own with torch."""
        ...

    def describe(self) -> EngineInfo:
        """Asks the engine."""
        ...

    def pause(self) -> None:
        """Lets no request be computed until `resume`. Twice is harmless."""
        ...

    def resume(self) -> None:
        """Goes on generating. Twice is harmless."""
        ...

    def join_group(self, address: str, port: int, rank_offset: int, size: int, name: str, backend: str) -> None:
        """Lets the engine's ranks join a weight-update group; returns when they have."""
        ...

    def leave_group(self, name: str) -> None:
        """Ends the engine's part of a group; harmless if there is none."""
        ...

    def begin(self, manifest: Manifest) -> None:
        """Opens an update; refuses one that does not fit before anything is sent."""
        ...

    def receive(self, manifest: Manifest, group: str, indices: Sequence[int]) -> EngineSeconds:
        """Lets the engine receive buckets, in this order, through a group; returns when they are in place."""
        ...

    def load(self, manifest: Manifest, offers: Sequence[dict[str, Any]]) -> EngineSeconds:
        """Lets the engine take buckets from memory of this machine: for each engine rank an offer; returns when they
        are in place."""
        ...

    def commit(self, manifest: Manifest, checksums: Mapping[int, int]) -> None:
        """Closes the update: the version is visible from now on."""
        ...

    def abandon(self, reason: str) -> None:
        """Gives an open update up; harmless without one."""
        ...
