"""What a conversion or a load reads: parameters under our names, region by region.

A Hugging Face folder, one of our own with the same kind of files, or a checkpoint of a training run.
"""

import json
import logging
from bisect import bisect_right
from functools import reduce
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from equipoise.checkpoint import layout
from equipoise.checkpoint.hf.folder import HFFolder, beside, original_config
from equipoise.checkpoint.hf.mapping import Piece
from equipoise.checkpoint.manifest import MANIFEST, incomplete_reason
from equipoise.checkpoint.tensors import MODEL, Stored
from equipoise.errors import CheckpointError
from equipoise.models.config import ModelConfig

logger = logging.getLogger(__name__)

COMPARED_BYTES = 32 << 20


class Source(Protocol):
    """Parameters of one model."""

    path: Path
    config: ModelConfig
    tensors: dict[str, Stored]
    """By our names, a tied one once; the dtype is the one that fits what is stored (BF16 for fewer bits)."""
    hf_config: dict[str, Any] | None
    """The `config.json` of the family that the weights came from, if it is known."""

    def read(
        self, name: str, start: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A region of a parameter, contiguous, on the CPU; None is the dtype in `tensors`."""

    def check_contents(self, share: int = 0, shares: int = 1) -> None:
        """Raises CheckpointError if tensors that have to be equal are not. Reads those, or this rank's share."""

    def files_beside(self) -> list[Path]:
        """Files of the folder that belong to the model and hold no tensors: tokenizer, chat template, ..."""

    def close(self) -> None: ...


class FolderSource:
    """A folder of safetensors files, all of whose names, shapes and sizes have been checked.

    Raises:
        CheckpointError: a file or tensor is missing, left over, cut short, there twice, or of the wrong shape; or the
            folder is of a model or a quantization that cannot be read.
    """

    def __init__(self, path: Path, config: ModelConfig | None = None) -> None:
        self.path = Path(path)
        self.folder = HFFolder(self.path, config)
        self.config, self.mapping = self.folder.config, self.folder.mapping
        self.hf_config = self.folder.hf_config
        self.tensors = {name: Stored(stored.shape, self._dtype(name)) for name, stored in self.mapping.tensors.items()}
        self._pieces: dict[str, tuple[list[int], list[Piece]]] = {}

    def _dtype(self, name: str) -> torch.dtype:
        return reduce(torch.promote_types, [self.folder.dtype(piece.key) for piece in self.mapping.pieces(name)])

    def read(
        self, name: str, start: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `Source.read`."""
        out = torch.empty(size, dtype=dtype or self.tensors[name].dtype)
        for piece in self._pieces_from(name, start[0]):
            if piece.start[0] >= start[0] + size[0]:
                break
            low = [max(a, b) for a, b in zip(start, piece.start)]
            high = [min(a + n, b + m) for a, n, b, m in zip(start, size, piece.start, piece.size)]
            if all(a < b for a, b in zip(low, high)):
                target = out[tuple(slice(a - s, b - s) for a, b, s in zip(low, high, start))]
                inside = [slice(a - s, b - s) for a, b, s in zip(low, high, piece.start)]
                self._read_piece(piece, inside, target)
        return out

    def _pieces_from(self, name: str, leading: int) -> list[Piece]:
        """Pieces of a parameter that may hold something from index `leading` of its leading dim on, in order."""
        if name not in self._pieces:
            pieces = sorted(self.mapping.pieces(name), key=lambda piece: piece.start)
            self._pieces[name] = ([piece.start[0] for piece in pieces], pieces)
        starts, pieces = self._pieces[name]
        last = bisect_right(starts, leading) - 1  # the last piece that starts at or before it
        while last > 0 and starts[last - 1] == starts[last]:
            last -= 1
        return pieces[last:]

    def _read_piece(self, piece: Piece, inside: list[slice], target: torch.Tensor) -> None:
        """Copies the region `inside` of a piece into `target`, both in our layout."""
        rows = inside[1] if piece.is_slice else inside[0]
        if self.folder.is_quantized(piece.key):
            stored = self.folder.decode(piece.key, rows)
        else:
            reader, entry = self.folder.reader(piece.key), self.folder.entry(piece.key)
            others = [s for i, s in enumerate(inside) if i != (1 if piece.is_slice else 0)]
            sizes = [n for i, n in enumerate(piece.size) if i != (1 if piece.is_slice else 0)]
            whole_rows = all(s.start == 0 and s.stop == n for s, n in zip(others, sizes))
            if whole_rows and not piece.transposed and entry.dtype == target.dtype and target.is_contiguous():
                reader.read_rows(piece.key, rows.start, target.view(rows.stop - rows.start, *entry.shape[1:]))
                return
            stored = self.folder.read_rows(piece.key, rows.start, rows.stop - rows.start)
        ours = piece.as_ours(stored)
        kept = [slice(None) if i == (1 if piece.is_slice else 0) else s for i, s in enumerate(inside)]
        target.copy_(ours[tuple(kept)])

    def check_contents(self, share: int = 0, shares: int = 1) -> None:
        """Tensors that repeat another have to be equal to it: what they hold is not kept. And matrices in fewer bits
        have to have the shape that they say."""
        self.folder.check_quantized(share, shares)
        for copy, original in list(self.mapping.copies.items())[share::shares]:
            parts, others = self.folder.parts(copy), self.folder.parts(original)
            if not parts or (len(parts) == len(others) and all(map(self._equal, parts, others))):
                continue
            raise CheckpointError(
                f"{copy!r} in {self.folder.reader(parts[0]).path} differs from {original!r} in "
                f"{self.folder.reader(others[0]).path}; the model has one tensor for both"
            )

    def _equal(self, a: str, b: str) -> bool:
        entry, other = self.folder.entry(a), self.folder.entry(b)
        if (entry.dtype, entry.shape) != (other.dtype, other.shape):
            return False
        step = max(1, COMPARED_BYTES // entry.row_bytes)
        for start in range(0, entry.shape[0], step):
            count = min(step, entry.shape[0] - start)
            x, y = self.folder.read_rows(a, start, count), self.folder.read_rows(b, start, count)
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):  # bits: a NaN is equal to itself
                return False
        return True

    def files_beside(self) -> list[Path]:
        """See `Source.files_beside`."""
        return beside(self.path)

    def close(self) -> None:
        """Closes the files."""
        self.folder.close()


class TrainingSource:
    """The parameters of a training checkpoint (`step-<n>`); one whole parameter is held at a time.

    Its `.metadata` is a pickle, as torch.distributed.checkpoint writes it: read only folders that you trust.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        reason = incomplete_reason(self.path)
        if reason is not None:
            raise CheckpointError(f"cannot read checkpoint {self.path}: {reason}.")
        saved = json.loads((self.path / layout.TRAIN_STATE).read_text())
        self.config = ModelConfig.model_validate(saved["config"]["model"])
        self._origin = self.config.load_from
        """Where the run's weights came from, which may be gone by now."""
        self.hf_config: dict[str, Any] | None = original_config(self._origin) if self._origin else None
        self._reader = dcp.FileSystemReader(self.path)
        self._metadata = self._reader.read_metadata()
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        self._stored: dict[str, TensorStorageMetadata] = {}
        for key, entry in self._metadata.state_dict_metadata.items():
            if key.startswith(MODEL) and isinstance(entry, TensorStorageMetadata):
                self._stored[key.removeprefix(MODEL)] = entry
        self.tensors = {name: Stored(tuple(e.size), e.properties.dtype) for name, e in self._stored.items()}
        self._held: tuple[str, torch.Tensor] | None = None

    def read(
        self, name: str, start: tuple[int, ...], size: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """See `Source.read`."""
        if self._held is None or self._held[0] != name:
            self._held = None
            self._held = (name, self._read_whole(name))
        region = self._held[1][tuple(slice(a, a + n) for a, n in zip(start, size))]
        return region.to(dtype or region.dtype).contiguous()

    def _read_whole(self, name: str) -> torch.Tensor:
        stored = self._stored[name]
        out = torch.empty(stored.size, dtype=stored.properties.dtype)
        whole = ChunkStorageMetadata(torch.Size([0] * len(stored.size)), stored.size)
        items = create_read_items_for_chunk_list(MODEL + name, stored, [whole])
        self._reader.read_data(LoadPlan(items), _OneTensor(out)).wait()
        return out

    def check_contents(self, share: int = 0, shares: int = 1) -> None:
        """Nothing is stored twice."""

    def files_beside(self) -> list[Path]:
        """Those of the folder that the run's weights came from, if it is still there."""
        return beside(self._origin) if self._origin is not None and self._origin.is_dir() else []

    def close(self) -> None:
        """Lets go of the parameter that is held."""
        self._held = None


class _OneTensor(dcp.DefaultLoadPlanner):
    """Reads the items of a plan into one tensor."""

    def __init__(self, out: torch.Tensor) -> None:
        super().__init__()
        self.out = out

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        spans = zip(read_item.dest_offsets, read_item.lengths)
        return self.out[tuple(slice(a, a + n) for a, n in spans)]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The target was written in place."""


def open_source(path: Path) -> Source:
    """The model at `path`: a Hugging Face or native folder, a training checkpoint, or a run (its newest one).

    Raises:
        CheckpointError: there is nothing that can be read, or it is not whole.
    """
    path = Path(path)
    if (path / layout.TRAIN_STATE).exists() or (path / MANIFEST).exists():
        return TrainingSource(path)
    if (path / "config.json").exists():
        return FolderSource(path)
    for folder in (path, path / "checkpoints"):
        newest = layout.newest_complete(folder)
        if newest is not None:
            return TrainingSource(newest)
    if not path.exists():
        raise CheckpointError(f"there is no folder {path}. A model on the Hub has to be downloaded first")
    raise CheckpointError(
        f"{path} holds no model: expected a folder with config.json and safetensors files, a checkpoint "
        "(step-<n>), or a run folder with checkpoints"
    )
