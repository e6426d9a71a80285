"""Headless Chromium, two sample runs, and a viewer of them on a free port.

`pytest tests/browser --screenshots docs/images` also renews the pictures of the documents.
"""

import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn

from browser.sample import SampleRun, make_run, write_profile
from equipoise.observe.view.runs import Runs
from equipoise.observe.view.server import address_of, make_app, open_socket

playwright_api = pytest.importorskip("playwright.sync_api")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--screenshots", metavar="FOLDER", type=Path, help="renew the pictures of the documents there")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Playwright's own Chromium if it is installed, else the system's."""
    with playwright_api.sync_playwright() as playwright:
        own = Path(playwright.chromium.executable_path)
        system = next(
            (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
        )
        if not own.exists() and system is None:
            pytest.skip("no Chromium: apt-get install chromium, or python -m playwright install chromium")
        launched = playwright.chromium.launch(
            executable_path=None if own.exists() else system, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SampleRun]:
    """The same loads without balancing and with it."""
    folder = tmp_path_factory.mktemp("sample") / "runs"
    steps = list(range(1, 81))
    made = {"off": make_run(folder / "off", steps, balanced=False), "balanced": make_run(folder / "balanced", steps)}
    write_profile(made["balanced"].path)
    return made


@contextmanager
def viewing(*paths: Path) -> Iterator[str]:
    """The address of a viewer of these runs, which ends with the block. In a thread: starting the command takes longer
    than most tests."""
    server = uvicorn.Server(
        uvicorn.Config(make_app(Runs(paths), None), log_level="warning", timeout_graceful_shutdown=1)
    )
    with open_socket("localhost", 0) as listening:
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
        thread.start()
        try:
            yield address_of(listening, "localhost", None)
        finally:
            server.should_exit = True
            thread.join(60)


@pytest.fixture(scope="session")
def address(runs: dict[str, SampleRun]) -> Iterator[str]:
    """Of the command itself."""
    folder = runs["off"].path.parent
    command = [sys.executable, "-m", "equipoise", "view", "--port", "0"]
    paths = [f"{folder.name}/balanced", f"{folder.name}/off"]
    process = subprocess.Popen([*command, *paths], stdout=subprocess.PIPE, text=True, cwd=folder.parent)
    deadline = threading.Timer(200, process.kill)
    deadline.start()
    try:
        assert process.stdout is not None
        opened = next(line for line in process.stdout if line.startswith("http")).strip()
        deadline.cancel()
        yield opened
    finally:
        deadline.cancel()
        process.terminate()
        process.wait(60)


class Looker:
    """A page with what went wrong on it, and where it asked for anything."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requested: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))

    def open(self, address: str) -> "Looker":
        self.page.goto(address)
        self.wait()
        return self

    def wait(self, drawn: int = 0) -> None:
        """Until more than `drawn` views have been drawn."""
        self.page.wait_for_function(f"() => Number(document.body.dataset.drawn || 0) > {drawn}", timeout=90_000)

    def leave(self) -> None:
        """Before the server ends, which the page would report."""
        self.page.goto("about:blank")

    @property
    def drawn(self) -> int:
        return int(self.page.evaluate("() => Number(document.body.dataset.drawn || 0)"))

    def go(self, fragment: str) -> None:
        drawn = self.drawn
        self.page.evaluate("(fragment) => { location.hash = fragment }", fragment)
        self.wait(drawn)

    def point(self) -> None:
        """Points at a figure and waits until plotly has taken the view's figures over."""
        self.page.locator("section:not([hidden]) .chart").first.hover()
        taken = "() => document.body.dataset.interactive === document.body.dataset.drawn"
        self.page.wait_for_function(taken, timeout=90_000)

    def data(self, figure: str) -> list[dict[str, Any]]:
        """The series of a figure as plotly has them."""
        self.point()
        plain = "(k, v) => ArrayBuffer.isView(v) ? [...v] : v"
        script = f"(id) => JSON.parse(JSON.stringify(document.getElementById(id).data, {plain}))"
        return self.page.evaluate(script, figure)

    def tile(self, name: str) -> float:
        return float(self.page.locator(f'section:not([hidden]) [data-name="{name}"]').get_attribute("data-value"))

    def table(self, name: str) -> list[list[str]]:
        return self.page.locator(f"#{name} tbody tr").evaluate_all(
            "(rows) => rows.map((row) => [...row.cells].map((cell) => cell.textContent))"
        )


@pytest.fixture(scope="session")
def context(browser: Any) -> Iterator[Any]:
    """One for all tests, so that scripts are compiled once."""
    made = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="light", reduced_motion="reduce")
    made.set_default_timeout(90_000)
    yield made
    made.close()


@pytest.fixture
def look(context: Any) -> Iterator[Looker]:
    """A page of 1280 x 900 in light colours. The test fails if anything is reported on its console."""
    looker = Looker(context.new_page())
    yield looker
    looker.page.close()
    assert looker.errors == []


@pytest.fixture
def picture(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Takes a screenshot of the whole page; returns its bytes, and renews the documents' where that was asked for."""
    folder = request.config.getoption("--screenshots", default=None)

    def take(looker: Looker, name: str | None) -> bytes:
        looker.page.mouse.move(0, 0)
        looker.page.wait_for_timeout(500)  # plotly's buttons fade away
        looker.page.evaluate("() => window.scrollTo(0, 0)")
        looker.page.add_style_tag(content="header { position: static !important } #status { visibility: hidden }")
        content = looker.page.screenshot(full_page=True)
        if folder is not None and name is not None:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.png").write_bytes(content)
        return content

    return take
