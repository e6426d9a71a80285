"""Results files: JSON with the command, commit, hardware and versions beside the rows and their summary."""

import argparse
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

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import free_name, written_whole
from equipoise.outputs import check_out

SOURCE = Path(__file__).resolve().parents[3]
"""Root of the source checkout, when the package runs from one."""


def results_folder() -> Path:
    """`benchmarks/results` of the source checkout, or of the current folder when the package is installed."""
    root = SOURCE if (SOURCE / "benchmarks").is_dir() else Path.cwd()
    return root / "benchmarks" / "results"


def parse_options(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The options of a benchmark, with `--out` and `--replace` beside its own: see `results_file`. Ends the program
    with a message where `--out` cannot be written, or is there already."""
    parser.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="results file; by default the one named above, or where that is there NAME-2.json, NAME-3.json, ...",
    )
    parser.add_argument("--replace", action="store_true", help="write over the results file that is there")
    options = parser.parse_args(arguments)
    if options.out is not None:
        try:
            check_out(options.out, "results.json", options.replace)
        except ConfigError as error:
            parser.error(str(error))
    return options


def results_file(options: argparse.Namespace, name: str) -> Path:
    """Where a benchmark with `parse_options` writes: `--out`, or a file in `results_folder` that nothing is lost by.

    Ask once, before the first writing: the file of an earlier one would no longer be free.
    """
    return options.out or free_unless(options.replace, results_folder() / name)


def free_unless(replace: bool, path: Path) -> Path:
    """`path`, or the first free name like it where `replace` is not set."""
    return path if replace else free_name(path)


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")
    except OSError as error:
        raise EquipoiseError(f"cannot write the results to {path}: {error.strerror or error}") from error
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
