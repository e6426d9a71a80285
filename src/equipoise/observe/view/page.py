"""The page's files: markup, style and scripts of our own, and plotly's script from its package."""

import importlib.util
import json
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("format.js", "theme.js", "charts.js", "overview.js", "layer.js", "compare.js", "app.js")
"""In the order in which the page needs them."""
FILES = {
    "style.css": "text/css",
    **dict.fromkeys(SCRIPTS, "text/javascript"),
}


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


def served_page() -> str:
    """The page that asks a server for its data. It loads plotly's script by itself, beside its first data."""
    head = ['<link rel="stylesheet" href="style.css">', '<link rel="preload" href="plotly.js" as="script">']
    scripts = [f'<script src="{name}"></script>' for name in SCRIPTS]
    return _page("\n".join(head), "\n".join(scripts))


def whole_page(data: dict[str, Any]) -> str:
    """The page in one file with all of its data: {request: answer}."""
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    scripts = [f'<script type="application/json" id="embedded">{embedded}</script>']
    sources = [plotly_script(), *(STATIC / name for name in SCRIPTS)]
    for source in sources:
        text = source.read_text(encoding="utf-8").replace("</script", "<\\/script")
        scripts.append(f"<script>{text}</script>")
    return _page(f"<style>{(STATIC / 'style.css').read_text()}</style>", "\n".join(scripts))


def _page(style: str, scripts: str) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    return page.replace("<!-- style -->", style).replace("<!-- scripts -->", scripts)
