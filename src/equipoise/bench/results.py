"""Results files: JSON with the command, commit, hardware and versions beside the rows and their summary."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from equipoise.files import written_whole

SOURCE = Path(__file__).resolve().parents[3]
"""Root of the source checkout, when the package runs from one."""


def results_folder() -> Path:
    """`benchmarks/results` of the source checkout, or of the current folder when the package is installed."""
    root = SOURCE if (SOURCE / "benchmarks").is_dir() else Path.cwd()
    return root / "benchmarks" / "results"


def device_word(name: str) -> str:
    """What a device's results files are called by: the first word of its name with a digit ("NVIDIA H200": h200)."""
    return next((word.lower() for word in name.split() if any(c.isdigit() for c in word)), "gpu")


def _commit() -> str:
    """The commit of the measured tree, marked when the tree had changes; "unknown" outside a source checkout."""
    git = ["git", "-C", str(SOURCE)]
    paths = ["--", ":/src", ":/benchmarks/*.py"]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        status = [*git, "status", "--porcelain", *paths]
        changed = subprocess.run(status, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{commit}+changes" if changed else commit


def _command() -> str:
    program = Path(sys.argv[0])
    if program.stem in ("equipoise", "__main__"):
        return shlex.join(["equipoise", *sys.argv[1:]])
    return shlex.join(["python", os.path.relpath(program, SOURCE), *sys.argv[1:]])


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []:
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found


def write_results(
    path: Path,
    rows: list[dict[str, Any]],
    summary: Mapping[str, Any],
    packages: Sequence[str],
    hardware: Mapping[str, Any] | None = None,
) -> Path:
    """Writes the file, whole or not at all, and returns its path; makes its folder, replaces an earlier file.

    `hardware` adds to the processor and the number of cores (an accelerator's name, say).
    """
    content = {
        "command": _command(),
        "commit": _commit(),
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), **(hardware or {})},
        "versions": _versions(packages),
        "rows": rows,
        "summary": dict(summary),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as partial:
        partial.write_text(json.dumps(content, indent=1) + "\n")
    return path


def update_results(
    path: Path,
    parts: Sequence[str],
    rows: list[dict[str, Any]],
    summary: Mapping[str, Any],
    packages: Sequence[str],
) -> Path:
    """Writes some parts of a file that several measurements share: rows whose `part` is one of `parts` are replaced,
    and so are the keys of the summary; all else stays. Command, commit and versions are those of the last one."""
    earlier = json.loads(path.read_text()) if path.exists() else {"rows": [], "summary": {}}
    kept = [row for row in earlier["rows"] if row.get("part") not in parts]
    return write_results(path, kept + rows, earlier["summary"] | dict(summary), packages)
