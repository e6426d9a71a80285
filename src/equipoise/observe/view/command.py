"""What `equipoise view` does."""

import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from equipoise.errors import ConfigError
from equipoise.observe.view.export import export
from equipoise.observe.view.runs import Runs
from equipoise.observe.view.server import address_of, is_local, make_app, open_socket, serve

TOKEN_LENGTH = 16


def view(
    paths: Sequence[Path],
    host: str,
    port: int,
    token: str | None,
    export_to: Path | None,
    say: Callable[[str], None],
) -> None:
    """Serves a page of the runs until it is stopped, or writes it into a file.

    Raises:
        ConfigError: a port that is taken, a token that is too short, a missing package, a file that is there already.
        TraceError: a path that is no run, or a trace that cannot be read.
    """
    if token is not None and len(token) < TOKEN_LENGTH:
        raise ConfigError(f"--token has {len(token)} characters: choose at least {TOKEN_LENGTH}, or let one be made")
    runs = Runs(paths)
    if export_to is not None:
        size = export(runs, export_to)
        say(f"wrote {export_to} ({size / 1e6:.1f} MB)")
        return
    if token is None and not is_local(host):
        token = secrets.token_urlsafe(24)
    app = make_app(runs, token)
    with open_socket(host, port) as listening:
        named = ", ".join(run.name for run in runs.runs)
        say(f"showing {named}\n{address_of(listening, host, token)}\nCtrl-C ends it")
        threading.Thread(target=runs.read_ahead, daemon=True).start()
        serve(app, listening)
