"""The page's files: markup, style and scripts of our own, and plotly's script, so that it works without a network."""

import base64
import hashlib
import json
from pathlib import Path
from typing import Any

STATIC = Path(__file__).parent / "static"
SCRIPTS = ("format.js", "theme.js", "charts.js", "overview.js", "layer.js", "compare.js", "app.js")
"""In the order in which the page needs them."""
PLOTLY = STATIC / "plotly-cartesian.min.js"
"""plotly.js 4.1.1 (MIT, plotly-LICENSE.txt), unchanged from its npm package plotly.js-cartesian-dist-min. The script in
plotly's Python package has all kinds of figures: it is three times as large, and a browser takes a second longer."""


def own_script() -> str:
    """The page's own scripts as one, fit to stand inside a page."""
    text = "\n".join((STATIC / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return _inside(text)


def script_source() -> str:
    """What a Content-Security-Policy calls `own_script`."""
    digest = hashlib.sha256(own_script().encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def served_page() -> str:
    """The page that asks a server for its data. It loads plotly's script by itself, beside its first data."""
    return _page('<link rel="preload" href="plotly.js" as="script">', f"<script>{own_script()}</script>")


def whole_page(data: dict[str, Any]) -> str:
    """The page in one file with all of its data: {request: answer}."""
    embedded = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    plotly = _inside(PLOTLY.read_text(encoding="utf-8"))
    data_script = f'<script type="application/json" id="embedded">{embedded}</script>'
    return _page("", f"{data_script}\n<script>{plotly}</script>\n<script>{own_script()}</script>")


def _inside(script: str) -> str:
    return script.replace("</script", "<\\/script")


def _page(head: str, scripts: str) -> str:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    return page.replace("<!-- head -->", f"<style>{style}</style>\n{head}").replace("<!-- scripts -->", scripts)
