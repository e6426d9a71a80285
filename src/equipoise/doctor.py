"""What was found on this machine, what was chosen, and why: `equipoise doctor`.

Each finding is taken by itself: one that fails becomes a line of `problems`, never the end of the report.
"""

import dataclasses
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from typing import Any

import equipoise
from equipoise.errors import EquipoiseError
from equipoise.launch import core_count
from equipoise.train.resolved import installed_version

_REQUIREMENT = re.compile(r"(?P<name>[\w.-]+)(?P<extras>\[[^]]*\])?(?P<needs>[^;]*)")
_EXTRA = re.compile(r"\bextra\s*==\s*['\"]([^'\"]+)['\"]")
_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "OMP_NUM_THREADS", "EQUIPOISE_ACCELERATOR"),
    *("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_NNODES", "SLURM_LOCALID"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
)
_BACKENDS = ("gloo", "nccl", "mpi", "ucc", "xccl")
Report = dict[str, Any]


def collect() -> Report:
    """All findings as data that JSON can hold; sizes are in bytes. `problems` lists what needs attention."""
    problems: dict[str, list[str]] = {}  # error text: the findings that it spoilt
    findings: dict[str, Callable[[], Any]] = {
        "system": _system,
        "packages": _packages_of_metadata,
        "accelerator": _selection,
        "devices": _devices,
        "communication": _communication,
        "kernels": _kernels,
        "launcher": lambda: {name: os.environ[name] for name in _LAUNCHER_VARIABLES if name in os.environ},
    }
    report: Report = {"equipoise": equipoise.__version__}
    for name, find in findings.items():
        try:
            report[name] = find()
        except Exception as error:  # whatever a driver or a broken installation may raise
            report[name] = None
            text = str(error) if isinstance(error, EquipoiseError) else f"{type(error).__name__}: {error}"
            problems.setdefault(text, []).append(name)
    report["problems"] = [f"{', '.join(names)}: {text}" for text, names in problems.items()]
    return report


def _system() -> Report:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "os": platform.platform(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "cores": core_count(),
        "memory": total,
        "folder": str(Path.cwd()),
        "disk_free": shutil.disk_usage(Path.cwd()).free,
    }


def _packages_of_metadata() -> Report | None:
    """None where the package was put on Python's path and not installed: that is fine, and has no list."""
    try:
        return _packages(requires("equipoise") or [])
    except PackageNotFoundError:
        return None


def _packages(requirements: Sequence[str]) -> Report:
    """What the installed package asks for, by extra ("" for none): packages with their versions (None: not there) and
    what is needed, and other extras that it takes in. The requirements are as in `importlib.metadata.requires`."""
    found: Report = {"": {"packages": {}, "takes_in": []}}
    for text in requirements:
        match, extra = _REQUIREMENT.match(text), _EXTRA.search(text)
        assert match is not None, text
        part = found.setdefault(extra[1] if extra else "", {"packages": {}, "takes_in": []})
        name = match["name"]
        if name == "equipoise":
            part["takes_in"] += re.findall(r"[\w.-]+", match["extras"] or "")
        else:
            part["packages"][name] = {"version": installed_version(name), "needs": match["needs"].strip()}
    return found


def _selection() -> Any:
    from equipoise.accelerator import selection_report

    return plain(selection_report())


def _devices() -> list[Report]:
    from equipoise.accelerator import get_accelerator

    accelerator = get_accelerator()
    found, current = [], accelerator.current_device_index()
    try:
        for index in range(accelerator.device_count()):
            accelerator.set_device(index)
            memory = plain(accelerator.memory())
            found.append({"index": index, "name": accelerator.device_name(index), "memory": memory})
    finally:
        accelerator.set_device(current)
    return found


def _communication() -> Report:
    import torch.distributed as dist

    from equipoise.accelerator import get_accelerator

    accelerator = get_accelerator()
    checks = {name: getattr(dist, f"is_{name}_available", None) for name in _BACKENDS}
    return {
        "available": {name: bool(dist.is_available() and check and check()) for name, check in checks.items()},
        "device": accelerator.communication_backend(),
        "world": accelerator.world_backend(),
    }


def _kernels() -> list[Report]:
    import torch

    from equipoise.accelerator import get_accelerator
    from equipoise.kernels import describe_choice

    device = get_accelerator().device()
    return [
        {"device": str(device), "dtype": str(dtype).removeprefix("torch."), "choice": plain(choice)}
        for dtype in (torch.float32, torch.bfloat16)
        for choice in [describe_choice(device, dtype)]
    ]


def plain(value: Any) -> Any:
    """`value` as data that JSON can hold: dataclasses and mappings become dicts, unknown objects text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (Sequence, set, frozenset)):
        return [plain(item) for item in value]
    return str(value)


def to_json(report: Report) -> str:
    """The report as indented JSON."""
    return json.dumps(report, indent=2)


def to_words(report: Report) -> str:
    """The report for a person to read."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    with console.capture() as capture:
        for title, rows in _pages(report):
            console.print(Text(title, style="bold"))
            table = Table(show_header=False, box=None, padding=(0, 2))
            for name, text in rows:
                table.add_row(Text(name), Text(text))
            console.print(table)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()).rstrip()


def _pages(report: Report) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Titles, each with its rows of name and text."""
    system = report["system"] or {}
    yield (
        f"equipoise {report['equipoise']}",
        [(name, _size(v) if name in ("memory", "disk_free") else str(v)) for name, v in system.items()],
    )
    unknown = [("not known", "equipoise is not installed, only importable: its list of packages comes with it")]
    packages = report["packages"] or {}
    yield "Packages", [(extra or "always", _package_words(extra, p)) for extra, p in packages.items()] or unknown
    yield "Accelerator", list(_selection_rows(report["accelerator"]))
    yield "Devices", [(f"{d['index']}  {d['name']}", _memory(d["memory"])) for d in report["devices"] or []]
    if (communication := report["communication"]) is not None:
        available = [name for name, there in communication["available"].items() if there]
        yield (
            "Communication",
            [
                ("available", ", ".join(available) or "none"),
                ("used for devices", communication["device"]),
                ("used for the world", communication["world"]),
            ],
        )
    yield (
        "Expert kernels",
        [(f"{k['device']} {k['dtype']}", _words(k["choice"])) for k in report["kernels"] or []],
    )
    yield "Launcher variables", list((report["launcher"] or {}).items()) or [("none", "")]
    if report["problems"]:
        yield "Problems", [("!", text) for text in report["problems"]]


def _package_words(extra: str, part: Report) -> str:
    packages = part["packages"]
    there = [f"{name} {item['version']}" for name, item in packages.items() if item["version"]]
    missing = [f"{name}{item['needs']}" for name, item in packages.items() if not item["version"]]
    words = [*there, *(f"all of {name}" for name in part["takes_in"])]
    if missing:
        command = f"pip install 'equipoise[{extra}]'" if extra else "pip install equipoise"
        words.append(f"not installed: {', '.join(missing)} ({command})")
    return ", ".join(words)


def _selection_rows(selection: Any) -> Iterator[tuple[str, str]]:
    """The selection report in words, whatever keys it has; the list of candidates one row each."""
    if not isinstance(selection, Mapping):
        yield "report", _words(selection)
        return
    for key, value in selection.items():
        if isinstance(value, list) and value and all(isinstance(v, Mapping) for v in value):
            yield from ((f"{key} {item.get('name', '')}".rstrip(), _candidate(item)) for item in value)
        elif value not in (None, [], {}):
            yield key.replace("_", " "), _words(value)


def _candidate(item: Mapping[str, Any]) -> str:
    available = {True: "available", False: "not available", None: "not asked"}.get(item.get("available"), "")
    return f"{available}: {item['reason']}" if "reason" in item else _words(item)


def _words(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key.replace('_', ' ')} {_words(item)}" for key, item in value.items())
    if isinstance(value, list):
        return "; ".join(_words(item) for item in value)
    return {True: "yes", False: "no", None: "none"}.get(value, str(value)) if not isinstance(value, str) else value


def _memory(memory: Mapping[str, Any] | None) -> str:
    if not memory or not memory.get("total"):
        return "memory unknown"
    return f"{_size(memory['free'])} free of {_size(memory['total'])}"


def _size(count: int | None) -> str:
    return "unknown" if count is None else f"{count / 2**30:.1f} GiB"
