"""The engine's side of an update: begin, buckets in any order, commit. One per engine rank; it moves no bytes itself.

The version changes at commit and at no other time. An update that fails before anything was written leaves the old
weights in service; one that fails later leaves the engine dirty: it refuses to generate until an update succeeds.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import torch

from equipoise.distributed.weight_update.manifest import Bucket, Manifest, TensorSpec
from equipoise.errors import WeightUpdateError
from equipoise.kernels.checksum import add_checksum, copy_with_checksum, new_totals


class Target(NamedTuple):
    """Where a tensor lives on this rank: elements from `start` of a flat view of the parameter that holds it."""

    flat: torch.Tensor
    start: int


class Copy(NamedTuple):
    """Bytes of a bucket that go to consecutive elements of one parameter."""

    offset: int
    flat: torch.Tensor
    start: int
    numel: int


class WeightReceiver:
    """See the module docstring.

    specs: every tensor of the model by its name in Hugging Face checkpoints. targets: those that this rank holds.
    dirty: why the weights are neither the old nor the new ones; None while they are.
    """

    def __init__(self, specs: Mapping[str, TensorSpec], targets: Mapping[str, Target]) -> None:
        self.specs, self.targets = specs, targets
        self.dirty: str | None = None
        self.manifest: Manifest | None = None
        self._sums: dict[int, torch.Tensor] = {}
        self._copied: set[int] = set()
        self._is_written = False
        self._known: Manifest | None = None
        self._plans: dict[int, tuple[list[Copy], list[tuple[int, int]]]] = {}

    def knows(self, digest: str) -> Manifest | None:
        """The layout of that digest, if it is the one of the last update that fitted."""
        return self._known if self._known is not None and self._known.digest == digest else None

    def begin(self, manifest: Manifest) -> None:
        """Opens an update. Raises WeightUpdateError, with nothing changed, for one that does not fit this engine."""
        if self.manifest is not None:
            raise WeightUpdateError(f"an update to version {self.manifest.version!r} is under way: end it first")
        if self.knows(manifest.digest) is None:
            manifest.check_layout()
            manifest.check_against(self.specs)
            self._known, self._plans = manifest, {}
        if self.dirty is not None and manifest.partial:
            raise WeightUpdateError(f"the weights are dirty ({self.dirty}): a partial update cannot repair them")
        self.manifest, self._sums, self._is_written = manifest, {}, False
        self._copied = set()

    def load(self, index: int, data: torch.Tensor) -> None:
        """Puts the pieces of a bucket that belong here into the parameters; uint8, at least as long as the bucket. Each
        byte is read once: the copy computes the checksum as well.

        On an accelerator it puts work on the current stream and does not wait. `data` may be reused behind it. Threads
        may load different buckets at a time: they share nothing.
        """
        bucket = self._open().buckets[index]
        if index in self._sums:
            raise WeightUpdateError(f"bucket {index} has arrived twice")
        if index not in self._plans:
            self._plans[index] = self._copies(bucket), bucket.spans(self._open().tensors, without=self.targets)
        copies, others = self._plans[index]
        self._is_written |= bool(copies)
        (total,) = new_totals(1, data.device)
        self._sums[index] = total
        with torch.no_grad():
            for offset, flat, start, numel in copies:
                source = data[offset : offset + numel * flat.itemsize]
                if (source.storage_offset()) % flat.itemsize:  # a sender that does not align its buckets
                    source = source.clone()
                copy_with_checksum(source.view(flat.dtype), flat[start : start + numel], offset, total)
            for offset, size in others:
                add_checksum(data[offset : offset + size], offset, total)

    def copy(self, indices: Collection[int], pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """In place of `load` where the sender's tensors are in this process: (parameter, source) pairs, which together
        are all that these buckets hold. No checksum, since nothing lies between. Does not wait for the device."""
        self._open()
        if not self._copied.isdisjoint(indices) or not self._sums.keys().isdisjoint(indices):
            raise WeightUpdateError(f"of the buckets {sorted(indices)[:5]} some have arrived twice")
        self._is_written |= bool(indices)
        self._copied.update(indices)
        with torch.no_grad():
            for parameter, source in pairs:
                parameter.copy_(source)

    def give_up_memory(self, reason: str) -> None:
        """Keeps no view of a parameter, since their memory is about to go. Dirty until an update after
        `take_memory`."""
        self.abandon(reason)
        self.targets, self._plans = {}, {}
        self.dirty = reason

    def take_memory(self, targets: Mapping[str, Target]) -> None:
        """New places of the tensors that this rank holds."""
        self.targets, self._plans = targets, {}

    def commit(self, checksums: Mapping[int, int]) -> str:
        """Closes the update; returns the version that the weights are now. `checksums`: the sender's, by bucket.

        Raises:
            WeightUpdateError: buckets are missing or arrived with other bytes than were sent; the engine is dirty then.
        """
        manifest = self._open()
        totals = torch.stack(list(self._sums.values())).tolist() if self._sums else []
        arrived = dict(zip(self._sums, totals))
        try:
            for index, bucket in enumerate(manifest.buckets):
                needed = any(piece.name in self.targets for piece in bucket.pieces)
                if index in self._copied:
                    continue
                if index not in arrived:
                    if needed:
                        raise WeightUpdateError(f"bucket {index} ({_contents(bucket)}) has not arrived")
                elif index not in checksums:
                    raise WeightUpdateError(f"the sender gave no checksum of bucket {index}")
                elif arrived[index] != checksums[index]:
                    raise WeightUpdateError(
                        f"bucket {index} ({_contents(bucket)}) arrived with other bytes than were sent"
                    )
        except WeightUpdateError as error:
            self.abandon(str(error))
            raise
        self.manifest, self.dirty = None, None
        return manifest.version

    def abandon(self, reason: str) -> None:
        """Ends an open update without a commit; harmless without one."""
        if self.manifest is not None and self._is_written:
            self.dirty = f"the update to version {self.manifest.version!r} failed: {reason}"
        self.manifest, self._sums = None, {}

    def _open(self) -> Manifest:
        if self.manifest is None:
            raise WeightUpdateError("no update is under way: begin one first")
        return self.manifest

    def _copies(self, bucket: Bucket) -> list[Copy]:
        """One for each run of pieces that are neighbours both in the bucket and in a parameter."""
        manifest, copies = self._open(), list[Copy]()
        for name, row, count, offset in bucket.pieces:
            target = self.targets.get(name)
            if target is None or not count:
                continue
            row_numel = manifest.tensors[name].row_numel
            start, numel = target.start + row * row_numel, count * row_numel
            if copies:
                last = copies[-1]
                if (
                    last.flat is target.flat
                    and last.start + last.numel == start
                    and last.offset + last.numel * last.flat.itemsize == offset
                ):
                    copies[-1] = last._replace(numel=last.numel + numel)
                    continue
            copies.append(Copy(offset, target.flat, start, numel))
        return sorted(copies, key=lambda copy: -copy.numel)  # others are launched while the largest runs


def _contents(bucket: Bucket) -> str:
    names = [piece.name for piece in bucket.pieces]
    return "empty" if not names else names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
