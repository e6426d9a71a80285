"""Writes a load trace: Parquet files of bounded size, each whole before it gets its name.

A file is written beside its place and renamed, so whatever has a name can be read, also after kill -9. What a killed
run loses is the part since the last file: at most some seconds, or 2 % of the run.
"""

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equipoise.errors import TraceError
from equipoise.files import TEMPORARY, free_name, written_whole
from equipoise.observe.schema import LAYERS, SCHEMAS, SEQUENCES, TraceInfo, read_info
from equipoise.observe.tables import LayerRows, schema_with, sequences_batch

FILE_BYTES = 16 * 2**20
"""A file is closed when its rows take so much memory; compressed it is smaller."""
ROW_GROUP_ROWS = 1024
FIRST_WAIT_S, WAIT_SHARE = 10.0, 0.02
"""A file is written when the last one is so old, in seconds and as a share of the run: files stay few however long it
is."""


class TraceWriter:
    """Writes one EP group's rows, or one rank's sequences, into a trace's folder. For one thread at a time.

    Args:
        directory: the trace's folder; made if missing.
        info: sizes, put into every file.
        name: distinguishes writers of one table in one folder; part of the file names.
        clock: seconds, for tests.

    Raises:
        TraceError: the folder cannot be written; names it and the reason.
    """

    def __init__(
        self, directory: Path, info: TraceInfo, name: str = "0000", clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.directory, self.info, self.name = Path(directory), info, name
        self._clock = clock
        self._started = self._written = clock()
        self._batches: dict[str, list[pa.RecordBatch]] = {LAYERS: [], SEQUENCES: []}
        self._bytes = {LAYERS: 0, SEQUENCES: 0}
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _refused(self.directory, error) from error

    def write_layers(self, rows: LayerRows) -> None:
        """Adds the MoE layers of one step and microbatch. Steps only grow."""
        self._add(LAYERS, rows.batch(self.info))

    def write_sequences(self, step: int, microbatch: int, group: int, rank: int, counts_LBE) -> None:
        """Adds one rank's sequences of one step and microbatch: integer array [L, B, E]."""
        self._add(SEQUENCES, sequences_batch(step, microbatch, group, rank, counts_LBE))

    def _add(self, table: str, batch: pa.RecordBatch) -> None:
        self._batches[table].append(batch)
        self._bytes[table] += batch.nbytes
        now = self._clock()
        if self._bytes[table] >= FILE_BYTES:
            self._write(table)
        elif now - self._written >= max(FIRST_WAIT_S, WAIT_SHARE * (now - self._started)):
            self.flush()

    def flush(self) -> None:
        """Writes what has come since the last file; nothing if there is nothing."""
        for table in self._batches:
            self._write(table)
        self._written = self._clock()

    def _write(self, table: str) -> None:
        batches = self._batches[table]
        if not batches:
            return
        rows = pa.Table.from_batches(batches).replace_schema_metadata(schema_with(self.info, table).metadata)
        first = batches[0]["step"][0].as_py()
        write_file(self._free_path(table, first), rows)
        self._batches[table], self._bytes[table] = [], 0

    def _free_path(self, table: str, step: int) -> Path:
        number = 0
        while (path := self.directory / f"{table}-{self.name}-{step:09d}-{number}.parquet").exists():
            number += 1
        return path

    def close(self) -> None:
        """Writes the rest."""
        self.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def write_file(path: Path, table: pa.Table) -> None:
    """Writes a Parquet file beside its place, flushed to disk, then renames it.

    Raises:
        TraceError: the system refuses; names the path and the reason.
    """
    try:
        with written_whole(path) as partial, open(partial, "wb") as file:
            pq.write_table(
                table,
                file,
                row_group_size=ROW_GROUP_ROWS,
                compression="zstd",
                compression_level=1,
                use_dictionary=False,
            )
    except OSError as error:
        raise _refused(path, error) from error


def _refused(path: Path, error: OSError) -> TraceError:
    return TraceError(
        f"cannot write {path}: {error.strerror or error}; check space and permissions, or leave the [trace] section out"
    )


def prepare_folder(directory: Path, info: TraceInfo, resumed_step: int) -> None:
    """Makes a trace's folder ready for a run that goes on after `resumed_step` (0: starts anew). One process calls it.

    Rows of later steps, which will be trained again, are cut off. What is there of another run, or of a run with other
    sizes, is kept as `trace-previous`, `trace-previous-2`, ...

    Raises:
        TraceError: the folder cannot be written.
    """
    try:
        for partial in directory.glob(f"*{TEMPORARY}"):
            partial.unlink()
        files = sorted(directory.glob("*.parquet"))
        if not files:
            return
        if resumed_step == 0 or not all(_continues(path, info) for path in files):
            directory.rename(free_name(directory.with_name(f"{directory.name}-previous")))
            return
        for path in files:
            _cut(path, resumed_step)
    except OSError as error:
        raise _refused(directory, error) from error


def _continues(path: Path, info: TraceInfo) -> bool:
    try:
        return read_info(pq.read_metadata(path).metadata, str(path))[1] == info
    except (TraceError, pa.ArrowException):
        return False


def _cut(path: Path, last_step: int) -> None:
    table = pq.read_table(path, schema=SCHEMAS[path.name.split("-")[0]])
    kept = table.filter(pc.field("step") <= last_step)
    if kept.num_rows == 0:
        path.unlink()
    elif kept.num_rows < table.num_rows:
        write_file(path, kept.replace_schema_metadata(pq.read_schema(path).metadata))
