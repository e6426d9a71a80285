"""JSON over HTTP with a deadline for the whole of a call, and errors that say which engine and what it said."""

import http.client
import json
import time
from typing import Any
from urllib.parse import urlencode, urlsplit

from equipoise.errors import WeightUpdateError


class EngineError(WeightUpdateError):
    """An engine answered with an error, or not at all. `status`: of HTTP; None without an answer."""

    def __init__(self, message: str, status: int | None) -> None:
        super().__init__(message)
        self.status = status


class JsonClient:
    """One connection for each call, so calls of several threads never wait for each other."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 300.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise EngineError(f"{url!r} is no address of an engine: expected http://HOST:PORT", None)
        self.url, self.timeout_s = f"{parts.scheme}://{parts.netloc}", timeout_s
        self._parts, self._token = parts, token

    def get(self, path: str, **query: Any) -> Any:
        """The parsed answer; {} for an empty one."""
        return self._ask("GET", f"{path}?{urlencode(query)}" if query else path, None)

    def post(self, path: str, body: dict[str, Any] | None = None, query: dict[str, Any] | None = None) -> Any:
        """The same for a JSON object."""
        return self._ask("POST", f"{path}?{urlencode(query)}" if query else path, body or {})

    def delete(self, path: str) -> Any:
        """The same without a body."""
        return self._ask("DELETE", path, None)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None) -> Any:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self.timeout_s)
        headers = {} if self._token is None else {"Authorization": f"Bearer {self._token}"}
        data = None
        if body is not None:
            data, headers["Content-Type"] = json.dumps(body, allow_nan=False).encode(), "application/json"
        where = f"{method} {self.url}{path.partition('?')[0]}"
        try:
            connection.request(method, self._parts.path.rstrip("/") + path, data, headers)
            response = connection.getresponse()
            text = self._read(connection, response)
        except (OSError, http.client.HTTPException) as error:
            raise EngineError(
                f"{where}: no answer ({type(error).__name__}: {error}); is the engine running?", None
            ) from None
        finally:
            connection.close()
        answer = _parse(text)
        if response.status >= 400 or (isinstance(answer, dict) and answer.get("success") is False):
            raise EngineError(f"{where} answered {response.status}: {_message(answer, text)}", response.status)
        return answer

    def _read(self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse) -> bytes:
        limit, parts = time.monotonic() + self.timeout_s, []
        while part := response.read1(1 << 20):
            parts.append(part)
            if time.monotonic() > limit:
                raise TimeoutError(f"the answer was not complete after {self.timeout_s:g} s")
        return b"".join(parts)


def _parse(text: bytes) -> Any:
    try:
        return json.loads(text) if text.strip() else {}
    except ValueError:
        return {"text": text.decode(errors="replace")}


def _message(answer: Any, text: bytes) -> str:
    found = answer
    if isinstance(answer, dict):
        found = answer.get("message") or answer.get("error") or answer.get("detail") or answer.get("text")
        if isinstance(found, dict):
            found = found.get("message", found)
    return str(found or text.decode(errors="replace"))[:2000]
