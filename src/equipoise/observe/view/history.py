"""The imbalance of every recorded step and layer of a trace, taken up file by file.

Shapes: S recorded steps, L MoE layers.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from equipoise.errors import TraceError
from equipoise.observe.reader import Trace, TraceFile
from equipoise.observe.schema import LAYERS

_COLUMNS = ("step", "layer", "rank_imbalance", "rank_imbalance_after", "copies")


@dataclass(frozen=True)
class History:
    """Means and maxima over microbatches and EP groups; NaN where a layer was not recorded.

    steps_S: ascending. before_SL, after_SL: mean of largest over mean rank load, by the router's choice and as
    delivered. worst_before_SL, worst_after_SL: the largest. rows_SL: how many were averaged. copies_S: replicas
    of all layers, microbatches and EP groups. has_matrices_S: whether the step can be drilled into.
    """

    steps_S: np.ndarray
    before_SL: np.ndarray
    after_SL: np.ndarray
    worst_before_SL: np.ndarray
    worst_after_SL: np.ndarray
    rows_SL: np.ndarray
    copies_S: np.ndarray
    has_matrices_S: np.ndarray


@dataclass(frozen=True)
class _Part:
    """Sums of one file: the arrays of `History`, with sums in place of means."""

    steps: np.ndarray
    sums: np.ndarray  # [2, s, L]
    worst: np.ndarray  # [2, s, L]
    rows: np.ndarray
    copies: np.ndarray
    has_matrices: np.ndarray


_Identity = tuple[Path, int, int, int]
"""Of a file's content: a resumed run cuts files and keeps their names."""


def _identity(path: Path) -> _Identity:
    try:
        status = path.stat()
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    return path, status.st_ino, status.st_mtime_ns, status.st_size


def identities(trace: Trace) -> set[_Identity]:
    """Of the files that a trace knows.

    Raises:
        TraceError: one is gone.
    """
    return {_identity(file.path) for file in trace.files}


class HistoryReader:
    """Keeps what it has read; reads only files that are new."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self._parts: dict[_Identity, _Part] = {}
        self._history: History | None = None

    def read(self) -> History:
        """The history of the trace's present files.

        Raises:
            TraceError: a file cannot be read.
        """
        files = {_identity(file.path): file for file in self.trace.files if file.table == LAYERS}
        if self._history is None or self._parts.keys() != files.keys():
            known = self._parts
            self._parts = {key: known.get(key) or self._part(file) for key, file in files.items()}
            self._history = self._join(list(self._parts.values()))
        return self._history

    def _part(self, file: TraceFile) -> _Part:
        try:
            with pq.ParquetFile(file.path, memory_map=True) as parquet:
                table = parquet.read(list(_COLUMNS), use_threads=False)
                have = self._rows_with_matrices(parquet)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{file.path} cannot be read: {str(error).splitlines()[0]}") from error
        L = self.trace.info.num_layers
        steps, row_step = np.unique(_numpy(table, "step"), return_inverse=True)
        cell = row_step * L + _numpy(table, "layer")
        size = len(steps) * L
        sums, worst = np.zeros((2, size)), np.full((2, size), -np.inf)
        for index, name in enumerate(("rank_imbalance", "rank_imbalance_after")):
            values = _numpy(table, name).astype(np.float64)
            sums[index] = np.bincount(cell, values, size)
            np.maximum.at(worst[index], cell, values)
        with_matrices = np.unique(_numpy(table, "step")[have])
        return _Part(
            steps,
            sums.reshape(2, -1, L),
            worst.reshape(2, -1, L),
            np.bincount(cell, minlength=size).reshape(-1, L),
            np.bincount(row_step, _numpy(table, "copies"), len(steps)),
            np.isin(steps, with_matrices),
        )

    def _rows_with_matrices(self, parquet: pq.ParquetFile) -> slice | np.ndarray:
        """By the size of the column `load`, which is in the file's metadata, unless the file has rows of both kinds."""
        metadata = parquet.metadata
        index = next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path.split(".")[0] == "load")
        groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
        values, rows = sum(group.column(index).num_values for group in groups), metadata.num_rows
        if values == rows * self.trace.info.ep_size * self.trace.info.num_experts:
            return slice(None)
        if values == rows:  # a list that is null counts as one value
            return slice(0)
        valid = parquet.read(["slot_expert"], use_threads=False)["slot_expert"].combine_chunks().is_valid()
        return np.array(valid.to_pylist(), bool)

    def _join(self, parts: list[_Part]) -> History:
        L = self.trace.info.num_layers
        every = [part.steps for part in parts]
        steps = np.unique(np.concatenate(every)) if every else np.empty(0, np.int32)
        S = len(steps)
        sums, worst = np.zeros((2, S, L)), np.full((2, S, L), -np.inf)
        rows, copies = np.zeros((S, L), np.int64), np.zeros(S)
        has_matrices = np.zeros(S, bool)
        for part in parts:  # a part's steps are unique, so plain indexed additions are right
            place = np.searchsorted(steps, part.steps)
            sums[:, place] += part.sums
            worst[:, place] = np.maximum(worst[:, place], part.worst)
            rows[place] += part.rows
            copies[place] += part.copies
            has_matrices[place] |= part.has_matrices
        known = rows > 0
        means = np.where(known, sums / np.maximum(rows, 1), np.nan).astype(np.float32)
        worst = np.where(known, worst, np.nan).astype(np.float32)
        return History(steps, means[0], means[1], worst[0], worst[1], rows, copies, has_matrices)


def _numpy(table: pa.Table, name: str) -> np.ndarray:
    """Not by `to_numpy`, which imports pandas where it is installed."""
    column = table[name].combine_chunks()
    return np.from_dlpack(column) if len(column) else np.empty(0, np.int64)
