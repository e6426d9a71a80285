"""The profiler's summaries in a run folder."""

import json
import re
from pathlib import Path
from typing import Any

PROFILE_FOLDER = "profile"
SUMMARY = ".summary.json"


def read_profiles(run: Path) -> list[dict[str, Any]]:
    """What each profiled window said, in order of its steps; files that are not summaries are passed over."""
    found = []
    for path in sorted((run / PROFILE_FOLDER).glob(f"*{SUMMARY}")):
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            continue
        if isinstance(content, dict) and isinstance(content.get("phases"), dict):
            found.append({"name": path.name.removesuffix(SUMMARY), **content})
    return sorted(found, key=lambda profile: [int(number) for number in re.findall(r"\d+", profile["name"])])
