"""What a run writes into its folder, and how it is told from files of others: neither replaced nor read as data."""

import re
from pathlib import Path

from equipoise.files import TEMPORARY

CONFIG_FILE = "config.toml"
RUN_FILE = "run.json"
CHECKPOINTS = "checkpoints"
"""Folder of the checkpoints inside a run folder."""
WRITTEN = (CONFIG_FILE, RUN_FILE, "metrics.jsonl", CHECKPOINTS, "trace", "profile", "tensorboard", "wandb", "hf")
"""All that a run writes into its folder, or may be asked to."""
HEADER_START = "# Resolved settings of this run."
"""How the `config.toml` of a run begins."""
_PREVIOUS = re.compile(r"[.-]previous(-\d+)?")
_CHECKPOINT = re.compile(r"step-\d{8,}(\.tmp)?")


def holds_run(folder: Path) -> bool:
    """Whether a run has written its settings or a checkpoint here. Raises OSError for a folder that cannot be read."""
    config, checkpoints = folder / CONFIG_FILE, folder / CHECKPOINTS
    if config.is_file():
        with config.open("rb") as file:
            if file.read(len(HEADER_START)) == HEADER_START.encode():
                return True
    return checkpoints.is_dir() and any(_CHECKPOINT.fullmatch(path.name) for path in checkpoints.iterdir())


def run_of(path: Path, below: Path | None = None) -> Path | None:
    """The folder of the run that has written `path`, or what it lies in; None if it is of others.

    Args:
        below: only a run's folder that is or lies in this one counts.
    """
    for inner in (path, *path.parents):
        if (
            _is_written(inner.name)
            and (below is None or inner.parent.is_relative_to(below))
            and holds_run(inner.parent)
        ):
            return inner.parent
    return None


def _is_written(name: str) -> bool:
    """Also what is kept of an earlier run or end (`trace-previous-2`), and what a run that died was writing."""
    return (
        name in WRITTEN or _PREVIOUS.sub("", name) in WRITTEN or (name.endswith(TEMPORARY) and name.startswith(WRITTEN))
    )
