"""Files of tensors in the format of `torch.distributed.checkpoint`, planned now and written later."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from equipoise.checkpoint.manifest import FileEntry, describe_file, write_json


class LaterWriter(dcp.FileSystemWriter):
    """A storage writer for `dcp.save` that only takes down the plan. `write` then writes this rank's shards, without
    any communication, and once all ranks have, `write_index` on rank 0 the index.

    Each rank leaves a file `written-<rank>.json` for rank 0: what lies where, and the checksums.
    """

    def __init__(self, folder: Path, rank_number: int) -> None:
        super().__init__(folder, sync_files=True, per_thread_copy_ahead=0)  # 0: no streams of a device
        self._folder, self._number = folder, rank_number
        self._plan = SavePlan([])
        self._planner: SavePlanner | None = None
        self._index: Metadata | None = None  # on rank 0
        self._size = 0

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Called by `dcp.save`; writes nothing."""
        self._plan, self._planner = plan, planner
        nothing: Future[list[WriteResult]] = Future()
        nothing.set_result([])
        return nothing

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Called by `dcp.save` on rank 0; writes nothing."""
        self._index = metadata

    def tensors(self) -> dict[MetadataIndex, torch.Tensor]:
        """The live tensors that this rank is to write, on their device."""
        assert self._planner is not None, "tensors() before dcp.save"
        found = {item.index: self._planner.resolve_data(item) for item in self._plan.items}
        return {index: value for index, value in found.items() if isinstance(value, torch.Tensor)}

    def write(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        """Writes this rank's shards from `tensors`, which may be copies of the live ones. Returns when they are on
        storage. Raises OSError."""
        self._planner = None  # lets go of the live tensors
        written = super().write_data(self._plan, _Given(tensors)).wait()
        names = sorted({result.storage_data.relative_path for result in written})
        report = {
            "results": [_to_json(result) for result in written],
            "files": {name: describe_file(self._folder / name) for name in names},
        }
        write_json(self._report(self._number), report)

    def write_index(self, num_ranks: int) -> dict[str, FileEntry]:
        """On rank 0: reads what all ranks have left, writes the index, and returns the shards' entries for the
        manifest."""
        assert self._index is not None, "write_index() on a rank other than 0"
        results: list[list[WriteResult]] = []
        files: dict[str, FileEntry] = {}
        for rank in range(num_ranks):
            report = json.loads(self._report(rank).read_text())
            results.append([_from_json(result) for result in report["results"]])
            files |= {name: FileEntry(*entry) for name, entry in report["files"].items()}
        super().finish(self._index, results)
        for rank in range(num_ranks):
            self._report(rank).unlink()
        return files

    def has_grown(self) -> bool:
        """Whether this rank's files have grown since the last call."""
        before = self._size
        self._size = sum(path.stat().st_size for path in self._folder.glob(f"__{self._number}_*"))
        return self._size > before

    def _report(self, rank: int) -> Path:
        return self._folder / f"written-{rank}.json"


class _Given(dcp.DefaultSavePlanner):
    """Answers with given tensors."""

    def __init__(self, tensors: Mapping[MetadataIndex, torch.Tensor]) -> None:
        super().__init__()
        self._tensors = tensors

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._tensors[write_item.index]


def _to_json(result: WriteResult) -> list[Any]:
    index, place = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    return [index.fqn, offset, index.index, result.size_in_bytes, place.relative_path, place.offset, place.length]


def _from_json(values: list[Any]) -> WriteResult:
    name, offset, number, size, *place = values
    return WriteResult(MetadataIndex(name, offset, number), size, _StorageInfo(*place))
