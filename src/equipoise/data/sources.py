"""Documents of a source, one string each, always in the same order, with a count of whatever was skipped."""

import json
import logging
import math
import os
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from equipoise.data.config import DataConfig
from equipoise.data.hub import dataset_files
from equipoise.errors import DataError
from equipoise.run_files import run_of

logger = logging.getLogger(__name__)
JSONL = {".jsonl", ".ndjson"}
PARQUET = {".parquet"}
_FOREIGN = {"site-packages", "dist-packages"}
_LISTED = 8  # files named in an error
_CHECKED_BYTES = 64 << 20  # a longer text is not read for `check_documents`


@dataclass
class SourceReport:
    """What reading a source met. `sizes` maps each file to its size in bytes."""

    source: str
    sizes: dict[str, int] = field(default_factory=dict)
    num_documents: int = 0
    num_bytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def note(self, what: str, where: str) -> None:
        """Count an irregularity, and keep the place of the first."""
        self.skipped[what] += 1
        self.first.setdefault(what, where)

    def describe(self) -> str:
        """Files with their sizes, documents and bytes, for messages."""
        files = [f"{path} ({size} bytes)" for path, size in list(self.sizes.items())[:_LISTED]]
        if len(self.sizes) > _LISTED:
            files.append(f"and {len(self.sizes) - _LISTED} more")
        read = f"{self.num_documents} documents with {self.num_bytes} bytes of text"
        return f"{read} in {len(self.sizes)} files: {', '.join(files)}" if files else read

    def log(self) -> None:
        """One line per kind of irregularity: a warning; for the standard library, where they are known, only in a
        debugging log."""
        level = logging.DEBUG if self.source == "stdlib" else logging.WARNING
        for what, count in self.skipped.items():
            logger.log(level, "data.source %s: %d %s (first: %s)", self.source, count, what, self.first[what])


def read_documents(config: DataConfig, report: SourceReport) -> Iterator[str]:
    """Each document of the source that has text, at most `max_documents`, encodable as UTF-8.

    A text file is one document; a JSONL line and a Parquet row are one each. Fills in `report` on the way.
    Raises `DataError` for a missing path, an unreadable or malformed file, a missing column, or no text at
    all.
    """
    yield from _documents(source_files(config, report), config, report)


def _documents(files: Iterable[Path], config: DataConfig, report: SourceReport) -> Generator[str, None, None]:
    for path in files:
        for text, where in _read_file(path, config, report):
            if not text:
                report.note("empty documents were skipped", where)
                continue
            report.num_documents += 1
            report.num_bytes += len(text.encode())
            yield text
            if report.num_documents == config.max_documents:
                return
    if report.num_documents == 0:
        raise DataError(f"data.source {config.source!r} has no text ({report.describe()}); give files that have some")


def check_documents(config: DataConfig) -> None:
    """Raises what `read_documents` would up to the first document, and reads no further; of a long text, which is one
    document, whether it can be opened."""
    report = SourceReport(config.source)
    files = source_files(config, report)
    first = next(files)
    try:
        is_long = first.suffix.lower() not in JSONL | PARQUET and first.stat().st_size > _CHECKED_BYTES
        if is_long:
            first.open("rb").close()
            return
    except OSError as error:
        raise DataError(f"data.source: cannot read {first}: {error.strerror or error}") from error
    with closing(_documents(chain([first], files), config, report)) as documents:
        next(documents, None)


def num_local_bytes(config: DataConfig, limit: int) -> float:
    """Sizes of the source's files, in bytes, as far as they exceed `limit`; infinite for the standard library and the
    hub. Raises `DataError` as `source_files` does."""
    if config.source == "stdlib" or config.source.startswith("hf://"):
        return math.inf
    total = 0
    for path in source_files(config, SourceReport(config.source)):
        try:
            total += path.stat().st_size
        except OSError as error:
            raise DataError(f"data.source: cannot read {path}: {error.strerror or error}") from error
        if total > limit:
            break
    return total


def source_files(config: DataConfig, report: SourceReport) -> Iterator[Path]:
    """The files of a source, in order, without what runs of ours have written, which changes while they train.

    Raises:
        DataError: there are none.
    """
    if config.source == "stdlib":
        yield from _stdlib_files()
    elif config.source.startswith("hf://"):
        yield from dataset_files(config.source.removeprefix("hf://"), config.include)
    else:
        root = Path(config.source).expanduser()
        if not root.exists():
            raise DataError(
                f"data.source {config.source!r} does not exist (looked for {root.absolute()}); give "
                "'stdlib', 'random', a text, .jsonl or .parquet file, a folder, or hf://owner/name"
            )
        _refuse_of_run(config.source, root)
        if not root.is_dir():
            if config.include is not None:
                raise DataError(
                    f"data.include {config.include!r} needs a folder, and data.source {config.source!r} is a "
                    "file; leave it unset"
                )
            yield root
            return
        pattern = config.include or "**/*"
        found = [path for path in root.glob(pattern) if path.is_file()]
        if config.include is None:
            found = [path for path in found if not _is_hidden(path.relative_to(root))]
        kept = [path for path in _in_order(found, root) if not _is_of_run(path, root, report)]
        if not kept:
            num_files = sum(path.is_file() for path in root.rglob("*"))
            but = f" but {len(found)} that training runs have written" if found else ""
            raise DataError(
                f"data.source {config.source!r}: no file matches data.include {pattern!r} among the "
                f"{num_files} files of {root.absolute()}{but}; change the pattern or the folder"
            )
        yield from kept


def _refuse_of_run(source: str, root: Path) -> None:
    run = _run_of(root.resolve())
    if run is not None:
        raise DataError(
            f"data.source {source!r} is what a training run has written into its folder {run}, and not text to train "
            "on; give a text, .jsonl or .parquet file, or a folder of such files"
        )


def _is_of_run(path: Path, root: Path, report: SourceReport) -> bool:
    is_written = _run_of(path, root) is not None
    if is_written:
        report.note("files that training runs have written were skipped", str(path))
    return is_written


def _run_of(path: Path, below: Path | None = None) -> Path | None:
    try:
        return run_of(path, below)
    except OSError as error:
        raise DataError(f"data.source: cannot read {error.filename or path}: {error.strerror or error}") from error


def _stdlib_files() -> Iterator[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in _FOREIGN]
        found += [Path(folder, name) for name in names if name.endswith(".py")]
    if not found:
        raise DataError(f"data.source 'stdlib': this Python has no .py files in {root}; set data.source to a folder")
    yield from _in_order(found, root)


def _in_order(paths: list[Path], root: Path) -> list[Path]:
    return sorted(paths, key=lambda path: path.relative_to(root).as_posix())


def _is_hidden(relative: Path) -> bool:
    return any(part.startswith(".") for part in relative.parts)


def _read_file(path: Path, config: DataConfig, report: SourceReport) -> Iterator[tuple[str, str]]:
    """(text, place) of each document of a file; the text is empty where a document has none."""
    try:
        size = path.stat().st_size
        report.sizes[str(path)] = size
        if size == 0:
            report.note("empty files were skipped", str(path))
        elif path.suffix.lower() in PARQUET:
            yield from _read_parquet(path, config.column_name, report)
        elif path.suffix.lower() in JSONL:
            yield from _read_jsonl(path, config.column_name, report)
        else:
            yield from _read_text(path, config, report)
    except OSError as error:
        raise DataError(f"data.source: cannot read {path}: {error.strerror or error}") from error


def _read_text(path: Path, config: DataConfig, report: SourceReport) -> Iterator[tuple[str, str]]:
    raw = path.read_bytes()
    if b"\0" not in raw[:8192]:
        yield _decode(raw, str(path), report), str(path)
    elif path == Path(config.source).expanduser():
        raise DataError(
            f"data.source {path} ({len(raw)} bytes) is not UTF-8 text: it has NUL bytes, as compressed, "
            "binary and UTF-16 files do; decompress or convert it"
        )
    else:
        report.note("binary files (with NUL bytes) were skipped", str(path))


def _read_jsonl(path: Path, column: str, report: SourceReport) -> Iterator[tuple[str, str]]:
    for row, where in jsonl_rows(path, column, report):
        text = row[column]
        if not isinstance(text, str | None):
            raise DataError(
                f"data.source {where}: {column!r} holds {type(text).__name__}, not text; "
                + _set_column([name for name, value in row.items() if isinstance(value, str)])
            )
        yield _encodable(text or "", where, report), where


def jsonl_rows(
    path: Path, column: str, report: SourceReport, setting: str = "data.source", column_setting: str = "data.column"
) -> Iterator[tuple[dict[str, Any], str]]:
    """Each line's object, which has `column`, and its place. Raises `DataError` for anything else, which names the two
    settings."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            where = f"{path}, line {number}"
            if not line.strip():
                continue
            try:
                row = json.loads(_decode(line, where, report))
            except ValueError as error:
                raise DataError(f"{setting} {where} is not JSON: {error}. Each line must be one JSON object") from error
            if not isinstance(row, dict):
                raise DataError(f"{setting} {where}: expected a JSON object, got {type(row).__name__}")
            if column not in row:
                raise no_column(column, where, list(row), setting, column_setting)
            yield row, where


def _read_parquet(path: Path, column: str, report: SourceReport) -> Iterator[tuple[str, str]]:
    for row, where, schema in parquet_rows(path, [column]):
        text = row[column]
        if not isinstance(text, str | None):
            raise DataError(
                f"data.source {path}: column {column!r} has type {schema.field(column).type}, not text; "
                + _set_column([name for name in schema.names if _is_text(schema.field(name).type)])
            )
        yield text or "", where


def parquet_rows(path: Path, columns: list[str]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Each row, its place, and the file's schema. The first of the columns has to be there; others are read if they
    are. Raises `DataError`."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"data.source {path}: Parquet needs the package pyarrow (pip install 'equipoise[train]')"
        ) from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            if columns[0] not in schema.names:
                raise no_column(columns[0], str(path), schema.names)
            number = 0
            for batch in file.iter_batches(batch_size=1024, columns=[c for c in columns if c in schema.names]):
                for row in batch.to_pylist():
                    number += 1
                    yield row, f"{path}, row {number}", schema
    except pyarrow.ArrowException as error:
        raise DataError(f"data.source {path} is not readable as Parquet: {error}") from error


def _is_text(arrow_type: Any) -> bool:
    return str(arrow_type) in ("string", "large_string", "string_view")


def _set_column(texts: list[str]) -> str:
    """What to do where the column is of another type; `texts` are the columns that hold text."""
    return f"set data.column to one of {', '.join(texts)}" if texts else "no other column holds text"


def no_column(
    column: str, where: str, available: list[str], setting: str = "data.source", column_setting: str = "data.column"
) -> DataError:
    """The error of a row without the column."""
    return DataError(
        f"{setting} {where}: no column {column!r}; set {column_setting} to one of "
        f"{', '.join(available) or '(none there)'}"
    )


def _decode(raw: bytes, where: str, report: SourceReport) -> str:
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = "documents with bytes that are not UTF-8, each replaced by U+FFFD"
        report.note(what, f"{where}, byte {error.start}")
        return raw.decode("utf-8-sig", errors="replace")


def _encodable(text: str, where: str, report: SourceReport) -> str:
    """The text, with lone surrogates (JSON can escape them) replaced: UTF-8 has no form for them."""
    try:
        text.encode()
    except UnicodeEncodeError:
        report.note("documents with lone surrogates, each replaced by U+FFFD", where)
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", errors="replace")
    return text
