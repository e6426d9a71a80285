"""Reads load traces: of a run that has ended, was killed, or is still writing.

Shapes: P ranks of an EP group, E logical experts, M masters and R replica slots per rank, L layers, F phases.
"""

import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from equipoise.errors import TraceError
from equipoise.observe.schema import (
    LAYERS,
    LAYERS_SCHEMA,
    MATRIX_COLUMNS,
    SCHEMAS,
    SEQUENCES,
    SEQUENCES_SCHEMA,
    TRACE_FOLDER,
    TraceInfo,
    read_info,
)

LAST_STEP = 2**31
"""Past every step: they are int32."""


@dataclass(frozen=True)
class TraceFile:
    """One complete file: its table, its sizes, how many rows, and the first and last step in it."""

    path: Path
    table: str
    info: TraceInfo
    num_rows: int
    first_step: int
    last_step: int


@dataclass(frozen=True)
class LayerLoad:
    """One layer, microbatch and EP group of a recorded step. int32 arrays; None where not recorded.

    rank_load_P, rank_load_after_P: rows by the router's choice, and as delivered.
    load_PE: rows of each source rank for each logical expert.
    slot_expert_PR: logical expert in each replica slot, -1 free. quota_Pm, delivered_Pm [P, M+R]: rows of each physical
    expert as planned and as they arrived. seconds_PF: float32, phases in the order of `schema.PHASES`.
    """

    step: int
    microbatch: int
    layer: int
    group: int
    copies: int
    copied_bytes: int
    rank_load_P: np.ndarray
    rank_load_after_P: np.ndarray
    seconds_PF: np.ndarray | None
    load_PE: np.ndarray | None
    slot_expert_PR: np.ndarray | None
    quota_Pm: np.ndarray | None
    delivered_Pm: np.ndarray | None


class Trace:
    """A trace's files, as they were when it was opened or last refreshed. Reads only what is asked for."""

    def __init__(self, directory: Path, files: Sequence[TraceFile]) -> None:
        self.directory = directory
        self.files = list(files)
        self.info = files[0].info

    def refresh(self) -> bool:
        """Takes up files that have come or gone since; whether there are any."""
        found = _scan(self.directory, {f.path: f for f in self.files})
        changed = found != self.files
        self.files = found or self.files
        return changed and bool(found)

    def layers(
        self,
        columns: Sequence[str] | None = None,
        steps: tuple[int, int] | None = None,
        layer: int | None = None,
        microbatch: int | None = None,
        group: int | None = None,
    ) -> pa.Table:
        """Rows of the table `layers`; those of one EP group in order of step, microbatch, layer.

        columns: default all but the matrices. steps: first and last, both included.
        """
        if columns is None:
            columns = [name for name in LAYERS_SCHEMA.names if name not in MATRIX_COLUMNS]
        wanted = {"layer": layer, "microbatch": microbatch, "group": group}
        return self._read(LAYERS, LAYERS_SCHEMA, columns, steps, wanted)

    def sequences(
        self, steps: tuple[int, int] | None = None, layer: int | None = None, group: int | None = None
    ) -> pa.Table:
        """Rows of the table `sequences`; empty when none were sampled."""
        wanted = {"layer": layer, "group": group}
        return self._read(SEQUENCES, SEQUENCES_SCHEMA, SEQUENCES_SCHEMA.names, steps, wanted)

    def load(self, step: int, layer: int, microbatch: int = 0, group: int = 0) -> LayerLoad:
        """One layer of one step, with its matrices if they were recorded.

        Raises:
            TraceError: no such row; says which steps are near.
        """
        table = self.layers(LAYERS_SCHEMA.names, (step, step), layer, microbatch, group)
        if table.num_rows == 0:
            near = sorted(self.steps(), key=lambda s: abs(s - step))[:3]
            raise TraceError(
                f"{self.directory}: no row of step {step}, layer {layer}, microbatch {microbatch}, EP group {group}; "
                f"there are {self.info.num_layers} layers and {self.info.num_groups} groups, and recorded steps near "
                f"that are {', '.join(map(str, sorted(near)))}"
            )
        return self._load(table.slice(0, 1).to_pylist()[0])

    def loads(self, steps: tuple[int, int] | None = None, layer: int | None = None) -> Iterator[LayerLoad]:
        """All rows with matrices; those of one EP group in order of step, microbatch, layer. One file in memory at a
        time."""
        for file in self._of(LAYERS, steps):
            table = _read_file(file, LAYERS_SCHEMA.names, LAYERS_SCHEMA)
            table = _select(table, steps, {"layer": layer})
            table = table.filter(pc.is_valid(table["load"]))
            for batch in table.to_batches(max_chunksize=256):
                yield from map(self._load, batch.to_pylist())

    def steps(self, with_matrices: bool = False, table: str = LAYERS) -> list[int]:
        """Recorded steps, ascending; those with matrices only, or those with sequences (table="sequences")."""
        if with_matrices:
            rows = self._read(LAYERS, LAYERS_SCHEMA, ["step", "load"], None, {})
            rows = rows.filter(pc.is_valid(rows["load"]))
        else:
            rows = self._read(table, SCHEMAS[table], ["step"], None, {})
        return sorted(pc.unique(rows["step"]).to_pylist())

    def _of(self, table: str, steps: tuple[int, int] | None) -> list[TraceFile]:
        first, last = steps or (0, LAST_STEP)
        return [f for f in self.files if f.table == table and f.first_step <= last and f.last_step >= first]

    def _read(
        self, table: str, schema: pa.Schema, columns: Sequence[str], steps: tuple[int, int] | None, wanted: dict
    ) -> pa.Table:
        needed = [*columns, *(n for n in ("step", *wanted) if n not in columns)]
        parts = [_select(_read_file(f, needed, schema, steps), steps, wanted) for f in self._of(table, steps)]
        if not parts:
            return pa.schema([schema.field(name) for name in columns]).empty_table()
        return pa.concat_tables(parts).select(list(columns))

    def _load(self, row: dict[str, Any]) -> LayerLoad:
        P = self.info.ep_size

        def matrix(name: str, dtype: type = np.int32) -> np.ndarray | None:
            values = row[name]
            return None if values is None else np.array(values, dtype).reshape(P, len(values) // P)

        return LayerLoad(
            row["step"],
            row["microbatch"],
            row["layer"],
            row["group"],
            row["copies"],
            row["copied_bytes"],
            np.array(row["rank_load"], np.int32),
            np.array(row["rank_load_after"], np.int32),
            matrix("seconds", np.float32),
            matrix("load"),
            matrix("slot_expert"),
            matrix("quota"),
            matrix("delivered"),
        )


def open_trace(path: str | Path) -> Trace:
    """A trace from a run folder, a trace's folder, or one of its files.

    Files that are being written, or that a killed run left unfinished (`*.tmp`), are passed over.

    Raises:
        TraceError: nothing there, or a file that is cut, foreign, of another version, or lacks columns.
    """
    path = Path(path)
    if (path / TRACE_FOLDER).is_dir():
        path = path / TRACE_FOLDER
    if not path.exists():
        raise TraceError(
            f"{path}: there is no such file or folder; give a run folder, its folder trace/, or a file of it"
        )
    files = _scan(path, {})
    if not files:
        where = path if path.name == TRACE_FOLDER else path / TRACE_FOLDER
        raise TraceError(
            f"{path}: there is no file of a load trace (*.parquet) with rows in it. A run writes one if its "
            "settings have a [trace] section, the first some seconds after its first recorded step; see docs/traces.md"
            f"{say_earlier(where)}"
        )
    if not any(f.table == LAYERS for f in files):
        raise TraceError(f"{path}: there are sequences, but no file of the table {LAYERS!r}; give the whole folder")
    return Trace(path, files)


def say_earlier(directory: Path) -> str:
    """Continues an error about a trace's folder: the earlier traces that were set aside beside it; empty if none."""
    beside = directory.parent.glob(f"{directory.name}-previous*")
    earlier = sorted((p for p in beside if any(p.glob("*.parquet"))), key=lambda p: (len(p.name), p.name))
    if not earlier:
        return ""
    listed = ", ".join(map(str, earlier))
    return (
        f". What was recorded before a restart, or before a resume with another number of ranks, lies in {listed}: "
        f"give that folder, such as `equipoise simulate {shlex.quote(str(earlier[-1]))}`"
    )


def _scan(path: Path, known: dict[Path, TraceFile]) -> list[TraceFile]:
    """Complete files in order of table, step, name; all of the same sizes."""
    paths = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    files: list[TraceFile] = []
    for candidate in paths:
        try:
            files.append(known.get(candidate) or _inspect(candidate))
        except FileNotFoundError:  # a resumed run has cut it off meanwhile
            continue
    for file in files:
        if file.info != files[0].info:
            raise TraceError(
                f"{file.path} is of another trace than {files[0].path.name} in the same folder ({file.info}, not "
                f"{files[0].info}): keep traces in folders of their own"
            )
    return sorted((f for f in files if f.num_rows), key=lambda f: (f.table, f.first_step, f.path.name))


def _inspect(path: Path) -> TraceFile:
    if not path.stat().st_size:
        raise TraceError(f"{path} is empty: 0 bytes. Remove it, or copy the file again")
    try:
        metadata = pq.read_metadata(path)
        schema = metadata.schema.to_arrow_schema()
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError) as error:
        raise TraceError(
            f"{path} is not a whole Parquet file ({str(error).splitlines()[0]}): it was cut, perhaps in copying, or is "
            "something else. Remove it, or copy it again"
        ) from error
    table, info = read_info(metadata.metadata, str(path))
    expected = SCHEMAS[table]
    missing = [name for name in expected.names if name not in schema.names]
    if missing:
        raise TraceError(f"{path} lacks columns of the table {table!r}: {', '.join(missing)}; it has {schema.names}")
    wrong = [f"{f.name} is {schema.field(f.name).type}, not {f.type}" for f in expected if not _fits(schema, f)]
    if wrong:
        raise TraceError(f"{path} has columns of other types than the table {table!r}: {'; '.join(wrong)}")
    bounds = [_step_bounds(metadata, schema.names, i) for i in range(metadata.num_row_groups)]
    first, last = min((low for low, _ in bounds), default=0), max((high for _, high in bounds), default=-1)
    return TraceFile(path, table, info, metadata.num_rows, first, last)


def _step_bounds(metadata: pq.FileMetaData, names: list[str], group: int) -> tuple[int, int]:
    """The first and last step that a row group can hold; any where another program wrote the file without them."""
    found = metadata.row_group(group).column(names.index("step")).statistics
    return (found.min, found.max) if found is not None and found.has_min_max else (0, LAST_STEP)


def _fits(schema: pa.Schema, field: pa.Field) -> bool:
    found = schema.field(field.name).type
    if pa.types.is_list(field.type):
        return pa.types.is_list(found) and found.value_type == field.type.value_type
    return found == field.type


def _read_file(
    file: TraceFile, columns: Iterable[str], schema: pa.Schema, steps: tuple[int, int] | None = None
) -> pa.Table:
    """Some columns of a file: of the row groups that can hold the steps."""
    try:
        with pq.ParquetFile(file.path) as parquet:
            groups = list(range(parquet.num_row_groups))
            if steps is not None:
                names = parquet.schema_arrow.names
                bounds = [_step_bounds(parquet.metadata, names, i) for i in groups]
                groups = [i for i in groups if bounds[i][0] <= steps[1] and bounds[i][1] >= steps[0]]
            return parquet.read_row_groups(groups, columns=list(columns)).replace_schema_metadata(None)
    except (pa.ArrowException, OSError) as error:
        raise TraceError(f"{file.path} cannot be read: {str(error).splitlines()[0]}") from error


def _select(table: pa.Table, steps: tuple[int, int] | None, wanted: dict[str, int | None]) -> pa.Table:
    conditions = [pc.field(name) == value for name, value in wanted.items() if value is not None]
    if steps is not None:
        conditions += [pc.field("step") >= steps[0], pc.field("step") <= steps[1]]
    for condition in conditions:
        table = table.filter(condition)
    return table
