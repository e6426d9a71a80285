"""The page's files: markup, style and scripts of our own, and plotly's script from its package."""

import base64
import hashlib
import importlib.util
import json
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("format.js", "theme.js", "sketch.js", "charts.js", "overview.js", "layer.js", "compare.js", "app.js")
"""In the order in which the page needs them."""


def plotly_script() -> Path:
    """The script of the installed plotly package, so that the page works without a network.

    Raises:
        ConfigError: plotly is not installed, or carries no script.
    """
    found = importlib.util.find_spec("plotly")
    folders = [] if found is None else list(found.submodule_search_locations or [])
    for folder in folders:
        script = Path(folder) / "package_data" / "plotly.min.js"
        if script.is_file():
            return script
    raise ConfigError(
        "the viewer draws with plotly, which is not installed: pip install 'equipoise[view]'"
        if found is None
        else f"the plotly package in {folders} carries no package_data/plotly.min.js: install plotly from PyPI"
    )


def own_script() -> str:
    """The page's own scripts as one, fit to stand inside a page."""
    text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return _inside(text)


def script_source() -> str:
    """What a Content-Security-Policy calls `own_script`."""
    digest = hashlib.sha256(own_script().encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def served_page() -> str:
    """The page that asks a server for its data, and for plotly's script when somebody points at a figure."""
    return _page(f"<script>{own_script()}</script>")


def whole_page(data: dict[str, Any]) -> str:
    """The page in one file with all of its data: {request: answer}. Plotly's script starts when it is needed."""
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    plotly = (
        f'<script type="text/plain" id="plotly-script">{_inside(plotly_script().read_text(encoding="utf-8"))}</script>'
    )
    data_script = f'<script type="application/json" id="embedded">{embedded}</script>'
    return _page(f"{data_script}\n{plotly}\n<script>{own_script()}</script>")


def _inside(script: str) -> str:
    return script.replace("</script", "<\\/script")


def _page(scripts: str) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    return page.replace("<!-- head -->", f"<style>{style}</style>").replace("<!-- scripts -->", scripts)
