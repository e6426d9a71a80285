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

RESULTS = Path(__file__).resolve().parent / "results"


def _commit() -> str:
    """The commit of the measured tree, marked when the tree had changes."""
    git = ["git", "-C", str(RESULTS)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
    paths = ["--", ":/src", ":/benchmarks/*.py"]
    changed = subprocess.run([*git, "status", "--porcelain", *paths], capture_output=True, text=True, check=True).stdout
    return f"{commit}+changes" if changed else commit


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
    name: str,
    rows: list[dict[str, Any]],
    summary: Mapping[str, Any],
    packages: Sequence[str],
    hardware: Mapping[str, Any] | None = None,
) -> Path:
    """Writes `results/<name>.json`, whole or not at all, and returns its path.

    `hardware` adds to the processor and the number of cores (an accelerator's name, say).
    """
    content = {
        "command": shlex.join(["python", os.path.relpath(sys.argv[0], RESULTS.parents[1]), *sys.argv[1:]]),
        "commit": _commit(),
        "hardware": {"processor": _processor(), "cores": os.cpu_count(), **(hardware or {})},
        "versions": _versions(packages),
        "rows": rows,
        "summary": dict(summary),
    }
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    partial = path.with_suffix(".tmp")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    os.replace(partial, path)
    return path
