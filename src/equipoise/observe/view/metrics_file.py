"""Reads metrics.jsonl, again and again while it grows."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

METRICS_FILE = "metrics.jsonl"


_LISTS = ("rank_imbalance",)
"""Lists by layer that are kept."""


class MetricsFile:
    """The numbers of one file, by record. Lines that are still being written are passed over, as is what a killed run
    left."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._numbers: list[dict[str, float]] = []
        self._lists: list[dict[str, np.ndarray | None]] = []
        self._columns: dict[str, np.ndarray] = {}
        self._offset = 0
        self._identity: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._numbers)

    @property
    def last_step(self) -> int | None:
        """Step of the last record."""
        return int(self._numbers[-1]["step"]) if self._numbers else None

    def refresh(self) -> bool:
        """Takes up lines that have come since; a file that was cut or replaced (a resumed run) is read anew."""
        try:
            with open(self.path, "rb") as file:
                status = os.fstat(file.fileno())
                identity = (status.st_dev, status.st_ino)
                if identity != self._identity or status.st_size < self._offset:
                    self._forget()
                    self._identity = identity
                file.seek(self._offset)
                data = file.read()
        except OSError:
            changed = bool(self._numbers)
            self._forget()
            return changed
        end = data.rfind(b"\n") + 1
        self._offset += end
        before = len(self._numbers)
        for line in data[:end].splitlines():
            self._take(line)
        if len(self._numbers) > before:
            self._columns = {}
        return len(self._numbers) > before

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
        except ValueError:
            return
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            return
        self._numbers.append({name: x for name, x in record.items() if isinstance(x, (int, float))})
        layers = record.get("layers")
        found = {name: layers.get(name) for name in _LISTS} if isinstance(layers, dict) else {}
        self._lists.append({name: _array(row) for name, row in found.items()})

    def column(self, name: str) -> np.ndarray:
        """float64 by record; NaN where a record has no such number."""
        if name not in self._columns:
            nan = float("nan")
            self._columns[name] = np.array([numbers.get(name, nan) for numbers in self._numbers], np.float64)
        return self._columns[name]

    def layers(self, name: str) -> np.ndarray | None:
        """float64 [records, layers] of a list under `layers`; None unless every record has it, all equally long."""
        rows = [row for lists in self._lists if (row := lists.get(name)) is not None]
        if not rows or len(rows) < len(self._lists) or len({len(row) for row in rows}) > 1:
            return None
        return np.stack(rows)


def _array(row: Any) -> np.ndarray | None:
    """float64 of a list of numbers and None; None for anything else."""
    try:
        array = np.array(row, np.float64)
    except (TypeError, ValueError):
        return None
    return array if array.ndim == 1 else None
