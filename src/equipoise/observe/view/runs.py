"""The runs that a viewer shows, and the answers to what its page asks."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError, TraceError
from equipoise.observe.schema import TRACE_FOLDER
from equipoise.observe.view.metrics_file import METRICS_FILE
from equipoise.observe.view.run import RUN_FILE, Run

_SIGNS_OF_A_RUN = (METRICS_FILE, RUN_FILE, TRACE_FOLDER)


class Runs:
    """Runs by number, in the order in which they were named; names are unique."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.runs = [Run(path) for path in find_runs(paths)]
        seen: dict[str, int] = {}
        for run in self.runs:
            seen[run.name] = seen.get(run.name, 0) + 1
            if seen[run.name] > 1:
                run.name = f"{run.name} ({seen[run.name]})"

    def read_ahead(self) -> None:
        """Reads the traces, and one layer, before anybody asks. What is wrong with one is told to who asks."""
        for run in self.runs:
            with contextlib.suppress(TraceError):
                run.overview()
                run.detail(None, 0)

    def answer(self, request: str, parameters: Mapping[str, str]) -> Any:
        """What the page asked: "runs", "overview" (run) or "detail" (run, step, layer, microbatch, group).

        Raises:
            ConfigError: an unknown request, or a parameter that is no number or names no run.
            TraceError: a trace cannot be read, or has no such row.
        """
        if request == "runs":
            for run in self.runs:
                run.refresh()
            return {"runs": [run.describe() for run in self.runs]}
        number = _integer(parameters, "run", 0)
        if not 0 <= number < len(self.runs):
            raise ConfigError(
                f"there is no run {number}: the viewer was started with {len(self.runs)}, numbered from 0"
            )
        run = self.runs[number]
        if request == "overview":
            return run.overview()
        if request == "detail":
            step = _integer(parameters, "step", -1)
            layer, microbatch, group = (_integer(parameters, name, 0) for name in ("layer", "microbatch", "group"))
            return run.detail(None if step < 0 else step, layer, microbatch, group)
        raise ConfigError(f"unknown request {request!r}: runs, overview and detail are known")


def _integer(parameters: Mapping[str, str], name: str, default: int) -> int:
    value = parameters.get(name, "")
    if not value:
        return default
    try:
        return int(value)
    except ValueError:
        raise ConfigError(f"{name} is {value!r}, not a whole number") from None


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The paths; a folder that is no run but has runs in it stands for all of these.

    Raises:
        TraceError: a path that is not there.
    """
    found: list[Path] = []
    for path in paths:
        if not path.exists():
            raise TraceError(f"{path}: there is no such file or folder; give run folders, such as runs/demo")
        inside = [] if path.is_file() or _is_run(path) else sorted(p for p in path.iterdir() if _is_run(p))
        found += inside or [path]
    return found


def _is_run(path: Path) -> bool:
    return path.is_dir() and (any((path / name).exists() for name in _SIGNS_OF_A_RUN) or any(path.glob("*.parquet")))
