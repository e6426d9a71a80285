"""One HTML file with everything that a viewer shows of some runs, to hand on."""

import json
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.files import written_whole
from equipoise.observe.view.page import whole_page
from equipoise.observe.view.runs import Runs

LAYERS_EXPORTED = 8
STEPS_EXPORTED = 12
_LARGEST_DETAIL = 64 << 20


def exported_data(runs: Runs) -> dict[str, Any]:
    """Answers by request. All of each overview; details of some layers, the worst first, in steps evenly spread and in
    each layer's worst."""
    data: dict[str, Any] = {"runs": runs.answer("runs", {})}
    room = _LARGEST_DETAIL
    for number, run in enumerate(runs.runs):
        overview = run.overview()
        details: dict[str, Any] = {}
        spread = run.steps_to_export(STEPS_EXPORTED)
        for row in overview["worst"][:LAYERS_EXPORTED] if spread else []:
            for step in sorted({*spread, row["worst_step"]}):
                detail = run.detail(step, row["layer"])
                room -= len(json.dumps(detail))
                if room < 0:
                    break
                details[f"{row['layer']}/{detail['step']}"] = detail
        data[f"overview/{number}"] = overview
        data[f"details/{number}"] = details
    return data


def export(runs: Runs, path: Path) -> int:
    """Writes the file, whole or not at all; returns its size in bytes.

    Raises:
        ConfigError: it is there already.
        EquipoiseError: it cannot be written.
    """
    if path.exists():
        raise ConfigError(f"{path} is there already; remove it, or choose another --export FILE.html")
    content = whole_page(exported_data(runs)).encode()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with written_whole(path) as partial:
            partial.write_bytes(content)
    except OSError as error:
        raise EquipoiseError(
            f"cannot write {path}: {error.strerror or error}; choose another --export FILE.html"
        ) from error
    return len(content)
