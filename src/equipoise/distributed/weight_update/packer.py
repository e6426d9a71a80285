"""The trainer's side of the bytes: from parameters, sharded as they may be, to filled buckets.

A bucket whose bytes are all on one rank is filled there. Otherwise every rank puts its shards into zeros and a sum
over the ranks brings them together (sums of integers with one term that is not zero: exact for every bit pattern), so
that no rank ever holds more than a bucket beside its shards, whatever the sharding. Casting to the dtype of the wire
is part of the copy into the bucket, and so is its checksum where one rank has all of it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from equipoise.distributed.agree import gather_json
from equipoise.distributed.local import local_part
from equipoise.distributed.weight_update.manifest import Bucket, TensorSpec
from equipoise.errors import WeightUpdateError
from equipoise.kernels.checksum import add_checksum, copy_with_checksum


def _no_phase(_: str) -> AbstractContextManager[None]:
    return nullcontext()


class Region(NamedTuple):
    """A part of one of the trainer's tensors: `size` elements from `start`, in each dimension. Under its own name the
    first `dropped` dimensions, of size 1, are not there: one expert of a stack."""

    tensor: str
    start: tuple[int, ...]
    size: tuple[int, ...]
    dropped: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Under its own name."""
        return self.size[self.dropped :]


class _Copy(NamedTuple):
    """Elements of a local shard that go to one place of a bucket: a box of the shard, a box of the rows there."""

    offset: int  # of the rows, in bytes
    rows_shape: tuple[int, ...]
    dtype: torch.dtype
    name: str
    source: tuple[slice, ...]
    target: tuple[slice, ...]


class _Run(NamedTuple):
    """Consecutive elements of a contiguous local shard that are consecutive in the bucket."""

    offset: int
    dtype: torch.dtype
    name: str
    start: int
    numel: int


class Packer:
    """Fills buckets from live tensors. Collective over `group` where several ranks hold a bucket's bytes.

    Args:
        tensors: gives the parameters and buffers by the trainer's names; DTensors, or plain ones that every rank holds
            in full. Asked for by `refresh`, since sharding libraries make new ones.
        regions: for each name of the wire, where its elements are.
        specs: shape and dtype on the wire.
        group: gives the group of the trainer's ranks (another one after parking); None for one rank.
    """

    def __init__(
        self,
        tensors: Callable[[], Mapping[str, torch.Tensor]],
        regions: Mapping[str, Region],
        specs: Mapping[str, TensorSpec],
        group: Callable[[], dist.ProcessGroup] | None = None,
    ) -> None:
        self._live, self._regions, self._specs, self._group = tensors, regions, specs, group
        self.rank = 0 if group is None else dist.get_rank(group())
        self._tensors = tensors()
        self._shards = {name: _local_box(tensor, self.rank) for name, tensor in self._tensors.items()}
        mine = "".join("01"[self._holds(name)] for name in specs)
        everyone = [mine] if group is None else gather_json(mine, group())
        columns = zip(specs, zip(*everyone))
        self.holders = {name: tuple(r for r, bit in enumerate(bits) if bit == "1") for name, bits in columns}
        """The ranks that have some of each tensor's bytes."""
        self.buckets: Sequence[Bucket] = ()
        self._work: list[list[_Copy | _Run]] = []
        self._bucket_holders: list[list[int]] = []
        self._one_sender = False

    def plan(self, buckets: Sequence[Bucket], one_sender: bool = False) -> None:
        """Takes a layout, the same on every rank. `one_sender`: rank 0 owns every bucket."""
        self.buckets, self._one_sender = buckets, one_sender
        self._work = [sorted(self._plan(bucket), key=_size, reverse=True) for bucket in buckets]
        self._bucket_holders = [self._find_holders(bucket) for bucket in buckets]

    def _holds(self, name: str) -> bool:
        region = self._regions[name]
        box = self._shards[region.tensor]
        return box is not None and all(
            max(a, b) < min(a + n, b + m) for a, n, b, m in zip(region.start, region.size, *box)
        )

    def refresh(self) -> None:
        """Looks the tensors up again, at the start of an update."""
        self._tensors = self._live()

    def bucket_holders(self, index: int) -> list[int]:
        """The ranks that have some of a bucket's bytes; the first of them owns it."""
        return self._bucket_holders[index]

    def _find_holders(self, bucket: Bucket) -> list[int]:
        ranks = {rank for piece in bucket.pieces for rank in self.holders[piece.name]}
        return sorted(ranks | {0} if self._one_sender else ranks) or [0]

    def pack(
        self,
        index: int,
        out: torch.Tensor,
        total: torch.Tensor | None = None,
        *,
        everywhere: bool = False,
        phase: Callable[[str], AbstractContextManager[None]] = _no_phase,
    ) -> None:
        """Fills `out` (uint8, at least the bucket) on the owner, or on every rank: then, and where there are several
        holders, every rank calls it. Adds the bucket's checksum to `total`. Puts work on the current stream; `phase`
        surrounds its parts: pack (convert, flatten and, without a gather, sum), gather, checksum."""
        bucket, holders, work = self.buckets[index], self.bucket_holders(index), self._work[index]
        data = out[: bucket.num_bytes]
        collective = self._group is not None and (len(holders) > 1 or everywhere)
        if collective:  # what other ranks hold is added to zeros
            data.zero_()
        in_one_pass = not collective and all(isinstance(copy, _Run) for copy in work)
        with torch.no_grad(), phase("pack"):
            for copy in work:
                self._copy(copy, data, total if in_one_pass else None)
        if collective:
            words = data.view(torch.int32) if data.numel() % 4 == 0 else data
            assert self._group is not None
            group = self._group()
            with phase("gather"):
                if everywhere:
                    dist.all_reduce(words, group=group)
                else:
                    dist.reduce(words, dist.get_process_group_ranks(group)[holders[0]], group=group)
        if total is not None and not in_one_pass:
            with phase("checksum"):
                for offset, size in bucket.spans(self._specs):
                    add_checksum(data[offset : offset + size], offset, total)

    def local_box(self, tensor: str) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """Start and size of this rank's part of one of the trainer's tensors; None where another rank of the same copy
        stands for it."""
        return self._shards[tensor]

    def local(self, tensor: str) -> torch.Tensor:
        """That part itself."""
        return local_part(self._tensors[tensor]).detach()

    def _copy(self, copy: "_Copy | _Run", data: torch.Tensor, total: torch.Tensor | None) -> None:
        local = local_part(self._tensors[copy.name])
        if isinstance(copy, _Run):
            source = local.detach().view(-1)[copy.start : copy.start + copy.numel]
            _place(data, copy.offset, copy.dtype, source, total)
            return
        source = local.detach()[copy.source]
        end = copy.offset + math.prod(copy.rows_shape) * copy.dtype.itemsize
        rows = data[copy.offset : end].view(copy.dtype).view(copy.rows_shape)
        rows[copy.target].copy_(source.reshape(rows[copy.target].shape))

    def _plan(self, bucket: Bucket) -> "list[_Copy | _Run]":
        work: list[_Copy | _Run] = []
        for name, row, count, offset in bucket.pieces:
            region, spec = self._regions[name], self._specs[name]
            box = self._shards[region.tensor]
            if box is None or not count:
                continue
            lead = region.dropped
            start, size = list(region.start), list(region.size)
            if spec.shape:
                start[lead], size[lead] = start[lead] + row, count
            local = local_part(self._tensors[region.tensor])
            here = [begin - low for begin, low in zip(start, box[0])]
            inside = all(begin >= 0 and begin + n <= m for begin, n, m in zip(here, size, box[1]))
            if inside and local.is_contiguous() and _is_run(size, box[1]):
                _append_run(work, _Run(offset, spec.torch_dtype, region.tensor, _flat(here, box[1]), math.prod(size)))
                continue
            lows = [max(a, b) for a, b in zip(start, box[0])]
            highs = [min(a + n, b + m) for a, n, b, m in zip(start, size, *box)]
            if any(low >= high for low, high in zip(lows, highs)):
                continue
            source = tuple(slice(low - b, high - b) for low, high, b in zip(lows, highs, box[0]))
            target = tuple(slice(low - a, high - a) for low, high, a in zip(lows, highs, start))
            work.append(_Copy(offset, tuple(size[lead:]), spec.torch_dtype, region.tensor, source, target[lead:]))
        return work


def _place(
    data: torch.Tensor, offset: int, dtype: torch.dtype, source: torch.Tensor, total: torch.Tensor | None
) -> None:
    place = data[offset : offset + source.numel() * dtype.itemsize]
    if (data.storage_offset() + offset) % dtype.itemsize:  # layouts of servers that do not align
        source, dtype = source.to(dtype).contiguous().view(torch.uint8), torch.uint8
    if total is None:
        place.view(dtype).copy_(source)
    else:
        copy_with_checksum(source, place.view(dtype), offset, total)


def _append_run(work: "list[_Copy | _Run]", run: _Run) -> None:
    """Joins it to the last one where it goes on there, in the shard and in the bucket."""
    last = work[-1] if work else None
    if isinstance(last, _Run) and last.name == run.name and last.dtype == run.dtype:
        goes_on = last.offset + last.numel * last.dtype.itemsize == run.offset
        if goes_on and last.start + last.numel == run.start:
            work[-1] = last._replace(numel=last.numel + run.numel)
            return
    work.append(run)


def _size(copy: "_Copy | _Run") -> int:
    """Elements. The largest comes first: others are launched while it runs."""
    return copy.numel if isinstance(copy, _Run) else math.prod(part.stop - part.start for part in copy.source)


def _flat(start: Sequence[int], shape: Sequence[int]) -> int:
    """Number of an element in a contiguous tensor."""
    number = 0
    for begin, extent in zip(start, shape):
        number = number * extent + begin
    return number


def _is_run(size: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a box is consecutive in a contiguous tensor: whole in every dimension behind the first that is not of
    size 1."""
    wide = next((dim for dim, extent in enumerate(size) if extent != 1), len(size))
    return all(size[dim] == shape[dim] for dim in range(wide + 1, len(size)))


def _local_box(tensor: torch.Tensor, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Start and size of what this rank contributes of a tensor; None where another rank of the same copy does."""
    if not isinstance(tensor, DTensor):
        return None if rank else ((0,) * tensor.dim(), tuple(tensor.shape))
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    for axis, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise WeightUpdateError(f"a tensor of shape {tuple(tensor.shape)} holds partial sums: reduce it first")
        if not isinstance(placement, Shard) and not placement.is_shard() and coordinate[axis]:
            return None
    size, start = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
    return tuple(start), tuple(size)
