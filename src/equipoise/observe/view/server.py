"""The viewer's web server: the page, its files, and JSON for what it asks. Starlette and uvicorn are imported late.

On localhost only programs of this machine can reach it, and requests for other host names are refused (a page elsewhere
could otherwise make a browser read it). On any other address each request has to carry the token.
"""

import ipaddress
import secrets
import socket
from typing import TYPE_CHECKING, Any

from equipoise.errors import ConfigError, EquipoiseError
from equipoise.observe.view.page import plotly_script, script_source, served_page
from equipoise.observe.view.runs import Runs

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response as AnyResponse

COOKIE = "equipoise_view"
_HEADERS = {
    "Content-Security-Policy": f"default-src 'self'; script-src 'self' {script_source()}; img-src 'self' data: blob:; "
    "style-src 'self' 'unsafe-inline'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def is_local(host: str) -> bool:
    """Whether an address is of this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def make_app(runs: Runs, token: str | None) -> "Starlette":
    """The application. With a token it is asked for, without one only local host names are answered.

    Raises:
        ConfigError: a package is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.gzip import GZipMiddleware
        from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, RedirectResponse, Response
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(
            f"the viewer needs {error.name}, which is not installed: pip install 'equipoise[view]'"
        ) from error
    script, page = plotly_script().read_bytes(), served_page()

    def refused(request: "Request") -> "AnyResponse | None":
        """The answer to a request without the token, or one that brings it in its address for the first time."""
        if token is None:
            if is_local(request.url.hostname or ""):
                return None
            return PlainTextResponse("Open this page as http://localhost.\n", 421, headers=_HEADERS)
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer = RedirectResponse(request.url.path, 303)
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return answer
        if secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode()):
            return None
        message = "Open the address that `equipoise view` printed, with its token.\n"
        return PlainTextResponse(message, 401, headers=_HEADERS)

    def root(request: "Request") -> "AnyResponse":
        return refused(request) or HTMLResponse(page, headers=_HEADERS)

    def plotly(request: "Request") -> "AnyResponse":
        kept = _HEADERS | {"Cache-Control": "max-age=600"}
        return refused(request) or Response(script, media_type="text/javascript", headers=kept)

    def data(request: "Request") -> "AnyResponse":
        if answer := refused(request):
            return answer
        try:
            return JSONResponse(runs.answer(request.path_params["name"], request.query_params), headers=_HEADERS)
        except ConfigError as error:
            return JSONResponse({"error": str(error)}, 400, headers=_HEADERS)
        except EquipoiseError as error:
            return JSONResponse({"error": str(error)}, 404, headers=_HEADERS)

    # Within one machine, packing takes longer than it saves.
    middleware = [] if token is None else [Middleware(GZipMiddleware, minimum_size=2000, compresslevel=1)]
    routes = [Route("/", root), Route("/api/{name}", data), Route("/plotly.js", plotly)]
    return Starlette(routes=routes, middleware=middleware)


def open_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes any free one.

    Raises:
        ConfigError: no such address, or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ConfigError(f"--host {host!r} is not an address of this machine: {error.strerror}") from error
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(64)
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another --port (0 takes a free one)"
        ) from error
    return listening


def address_of(listening: socket.socket, host: str, token: str | None) -> str:
    """What to open in a browser."""
    if host in ("0.0.0.0", "::"):
        host = socket.gethostname()
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listening.getsockname()[1]}/" + (f"?token={token}" if token else "")


def serve(app: Any, listening: socket.socket) -> None:
    """Answers until SIGINT or SIGTERM.

    Raises:
        ConfigError: uvicorn is missing.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise ConfigError("the viewer needs uvicorn, which is not installed: pip install 'equipoise[view]'") from error
    config = uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=2)
    uvicorn.Server(config).run(sockets=[listening])
