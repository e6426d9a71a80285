"""Reads metrics.jsonl, again and again while it grows."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

METRICS_FILE = "metrics.jsonl"


class MetricsFile:
    """The records of one file. Lines that are still being written are passed over, as is what a killed run left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Takes up lines that have come since; a file that was cut or replaced (a resumed run) is read anew."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._offset:
                    self.records, self._offset, self._identity = [], 0, identity
                file.seek(self._offset)
                data = file.read()
        except OSError:
            changed = bool(self.records)
            self.records, self._offset, self._identity = [], 0, None
            return changed
        end = data.rfind(b"\n") + 1
        self._offset += end
        new = [record for line in data[:end].splitlines() if (record := _record(line)) is not None]
        self.records += new
        return bool(new)

    def column(self, name: str) -> np.ndarray:
        """float64 by record; NaN where a record has no such number."""
        return np.array([_number(record.get(name)) for record in self.records], np.float64)

    def layers(self, name: str) -> np.ndarray | None:
        """float64 [records, layers] of a list under `layers`; None unless every record has it, all equally long."""
        found = [(record.get("layers") or {}).get(name) for record in self.records]
        rows = [row for row in found if isinstance(row, list)]
        if not rows or len(rows) < len(found) or len({len(row) for row in rows}) > 1:
            return None
        return np.array([[_number(x) for x in row] for row in rows], np.float64)


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _number(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else float("nan")
