"""The engine's API over HTTP. Starlette and uvicorn are imported late, so that everything else does without."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from typing import TYPE_CHECKING, Any, Self

from equipoise.errors import ConfigError
from equipoise.serve.api import Api, Reply, RouteSpec
from equipoise.serve.loop import EngineLoop

if TYPE_CHECKING:
    from starlette.applications import Starlette

MAX_BODY = 256 * 2**20


def build_app(api: Api) -> "Starlette":
    """The ASGI application.

    Raises:
        ConfigError: starlette is missing.
    """
    try:
        from starlette.applications import Starlette
        from starlette.exceptions import HTTPException
        from starlette.requests import ClientDisconnect, Request
        from starlette.responses import JSONResponse
        from starlette.routing import Route
    except ImportError as error:
        raise ConfigError(f"serving needs the package {error.name} (pip install 'equipoise[serve]')") from None

    gone = Reply(400, {"success": False, "message": "the client went away"})

    def respond(reply: Reply) -> JSONResponse:
        return JSONResponse(reply.body, reply.status, reply.headers)

    def route(method: str, path: str, spec: RouteSpec) -> Route:
        async def handle(request: Request) -> JSONResponse:
            size, parts = 0, []
            try:
                async for part in request.stream():
                    size += len(part)
                    if size > MAX_BODY:
                        return respond(Reply(413, {"success": False, "message": f"more than {MAX_BODY} bytes"}))
                    parts.append(part)
            except ClientDisconnect:
                return respond(gone)
            answer = api.answer(spec, request.headers.get("authorization", ""), b"".join(parts))
            return respond(await (_while_listening(answer, request.receive, gone) if spec.ends_with_client else answer))

        return Route(path, handle, methods=[method], name=f"{method} {path}")

    async def http_error(request: Any, error: Any) -> JSONResponse:
        return respond(Reply(error.status_code, {"success": False, "message": str(error.detail)}))

    routes = [route(method, path, spec) for (method, path), spec in api.routes.items()]
    return Starlette(routes=routes, exception_handlers={HTTPException: http_error})


async def _while_listening(
    answer: Coroutine[Any, Any, Reply], receive: Callable[[], Awaitable[Any]], otherwise: Reply
) -> Reply:
    """The answer, or `otherwise` as soon as the client is gone; then the answer's work is cancelled."""

    async def until_gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            continue

    work, absence = asyncio.ensure_future(answer), asyncio.ensure_future(until_gone())
    try:
        await asyncio.wait({work, absence}, return_when=asyncio.FIRST_COMPLETED)
        return work.result() if work.done() else otherwise
    finally:
        work.cancel()
        absence.cancel()


@contextlib.contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A listening socket. Raises ConfigError when the address is taken or is none of this machine's."""
    sock = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(128)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    try:
        yield sock
    finally:
        sock.close()


class Server:
    """HTTP in a thread of this process, for the time of the block. Starts and ends the loop."""

    def __init__(self, loop: EngineLoop, api: Api, sock: socket.socket) -> None:
        try:
            import uvicorn
        except ImportError:
            raise ConfigError("serving needs the package uvicorn (pip install 'equipoise[serve]')") from None
        self.loop = loop
        self._sock = sock
        settings: dict[str, Any] = {"timeout_keep_alive": 5, "timeout_graceful_shutdown": 5, "lifespan": "off"}
        self._server = uvicorn.Server(uvicorn.Config(build_app(api), log_level="warning", access_log=False, **settings))
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._sock]))

    def __enter__(self) -> Self:
        self.loop.start()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self.loop.close()
        self._thread.join(10)
