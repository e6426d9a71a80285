"""Conversations of a source: lists of messages from JSONL lines or Parquet rows, checked."""

import json
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from equipoise.data.chat import Conversation
from equipoise.data.config import DataConfig
from equipoise.data.sources import JSONL, PARQUET, SourceReport, jsonl_rows, parquet_rows, source_files
from equipoise.errors import DataError

TOOLS = "tools"
"""Field or column with the functions that the assistant may call: JSON schemas, or a text of JSON."""


def read_conversations(config: DataConfig, report: SourceReport) -> Generator[Conversation, None, None]:
    """Each conversation of the source, at most `max_documents`, in order. Fills in `report` on the way.

    Raises:
        DataError: a missing or unreadable file, one of another kind, a row without messages, or a malformed message;
            names its place.
    """
    column = config.column_name
    for path in source_files(config, report):
        for row, where in _rows(path, column, report):
            if not row.get(column):
                report.note("empty conversations were skipped", where)
                continue
            conversation = Conversation(
                check_messages(row[column], column, where), _tools(row.get(TOOLS), where), where
            )
            report.num_documents += 1
            report.num_bytes += sum(len(str(m.get("content") or "").encode()) for m in conversation.messages)
            yield conversation
            if report.num_documents == config.max_documents:
                return
    if report.num_documents == 0:
        raise DataError(
            f"data.source {config.source!r} has no conversations ({report.describe()}); give files that have some"
        )


def check_conversations(config: DataConfig) -> None:
    """Raises what `read_conversations` would up to the first conversation, and reads no further."""
    with closing(read_conversations(config, SourceReport(config.source))) as conversations:
        next(conversations, None)


def _rows(path: Path, column: str, report: SourceReport) -> Iterator[tuple[dict[str, Any], str]]:
    kind = path.suffix.lower()
    try:
        report.sizes[str(path)] = path.stat().st_size
        if report.sizes[str(path)] == 0:
            report.note("empty files were skipped", str(path))
        elif kind in JSONL:
            yield from jsonl_rows(path, column, report)
        elif kind in PARQUET:
            for row, where, _ in parquet_rows(path, [column, TOOLS]):
                yield _without_none(row), where
        else:
            raise DataError(
                f"data.source {path}: conversations are read from .jsonl and .parquet files; narrow a folder by "
                "data.include, such as '**/*.jsonl'"
            )
    except OSError as error:
        raise DataError(f"data.source: cannot read {path}: {error.strerror or error}") from error


def _without_none(value: Any) -> Any:
    """Without the fields that a Parquet structure has for the sake of other rows."""
    if isinstance(value, dict):
        return {key: _without_none(v) for key, v in value.items() if v is not None}
    return [_without_none(v) for v in value] if isinstance(value, list) else value


def check_messages(value: Any, column: str, where: str, setting: str = "data.source") -> list[dict[str, Any]]:
    """The value, a list of messages. Raises `DataError` for anything else, which names the setting and the place."""
    if not isinstance(value, list):
        raise DataError(
            f"{setting} {where}: {column!r} holds {type(value).__name__}, not a list of messages; expected "
            '[{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
        )
    for number, message in enumerate(value):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            found = f"the fields {', '.join(message)}" if isinstance(message, dict) else type(message).__name__
            raise DataError(
                f"{setting} {where}: message {number} has {found}; expected an object with 'role' and 'content'"
            )
        content = message.get("content")
        if isinstance(content, str) or (content is None and message.get("tool_calls")):
            continue
        parts = content if isinstance(content, list) else None
        if parts is None or any(not isinstance(p, dict) or p.get("type") != "text" for p in parts):
            kinds = sorted({str(p.get("type")) if isinstance(p, dict) else type(p).__name__ for p in parts or []})
            found = f"parts of the kinds {', '.join(kinds)}" if parts else type(content).__name__
            raise DataError(
                f"{setting} {where}: the content of message {number} ({message['role']}) is {found}; expected text"
            )
    return value


def _tools(value: Any, where: str) -> list[dict[str, Any]] | None:
    try:
        tools = json.loads(value) if isinstance(value, str) and value else value
    except ValueError as error:
        raise DataError(f"data.source {where}: {TOOLS!r} is a text that is not JSON: {error}") from error
    if tools and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise DataError(f"data.source {where}: {TOOLS!r} holds {type(tools).__name__}, not a list of JSON schemas")
    return tools or None
