"""How large a request may be, how slowly it may come, and how long it may take."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prolepsis.serve.asgi import NO_RETRY, header, is_last, refuse
from prolepsis.serve.errors import APIError, retry_after

_LAST_WORDS_S = 1.0  # for a client that does not even read why its answer ends


class HeaderLimit:
    """Refuses headers that are too long. (Those that come bit by bit fail while they come: `connections`.)"""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._size(scope) > self._max_bytes:
            error = APIError(431, "the headers are too long (--max-header)", code="headers_too_long")
            await refuse(error, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    @staticmethod
    def _size(scope: Scope) -> int:
        first_line = len(scope["path"]) + len(scope.get("query_string", b""))
        return first_line + sum(len(name) + len(value) for name, value in scope["headers"])


class BodyLimit:
    """Reads a body whole, before an endpoint is called, and refuses one that is too large, too slow or compressed.

    The server discards what is left of a body that was refused.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, timeout_s: float, logged: bool = False) -> None:
        """`logged`: whether `AccessLog` wants the bodies, which are kept as long as the answer lasts then."""
        self._app, self._max_bytes, self._timeout_s, self._logged = app, max_bytes, timeout_s, logged

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._timeout_s):
                body = await self._read(scope, receive)
        except TimeoutError:
            message = f"the body did not arrive within {self._timeout_s:g} s (--body-timeout)"
            error = APIError(408, message, code="body_timeout", headers={"Connection": "close", **NO_RETRY})
            await refuse(error, scope, receive, send)
            return
        except APIError as error:
            await refuse(error, scope, receive, send)
            return
        if body is not None:
            if self._logged:
                scope.setdefault("state", {})["body"] = body
            receive = _replay(body, receive)
            del body  # a stream may last
            await self._app(scope, receive, send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The body; None where the client has left. Raises APIError."""
        if (header(scope, b"content-encoding") or "identity") != "identity":
            raise APIError(415, "compressed bodies are not read: send it without Content-Encoding")
        if int(header(scope, b"content-length") or 0) > self._max_bytes:
            raise self._too_large()
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> APIError:
        return APIError(413, f"the body is larger than {self._max_bytes} bytes (--max-body)", code="body_too_large")


def _replay(body: bytes, receive: Receive) -> Receive:
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


class OpenRequests:
    """The requests that are being answered, so that the server can end them."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Timeout, str] = {}
        self._reasons: dict[asyncio.Timeout, str] = {}

    def __len__(self) -> int:
        return len(self._open)

    def end(self, reason: str, only: Callable[[str], bool] = lambda method: True) -> None:
        """Have every request whose method `only` accepts end now; a stream says `reason` last."""
        now = asyncio.get_running_loop().time()
        for timeout, method in self._open.items():
            if only(method) and timeout not in self._reasons and not timeout.expired():
                self._reasons[timeout] = reason
                timeout.reschedule(now)

    @contextmanager
    def holding(self, timeout: asyncio.Timeout, method: str) -> Iterator[None]:
        """While the request is answered."""
        self._open[timeout] = method
        try:
            yield
        finally:
            del self._open[timeout]

    def reason(self, timeout: asyncio.Timeout) -> str | None:
        """Why a request was ended; None where its time was up."""
        return self._reasons.pop(timeout, None)


class TimeLimit:
    """Ends a request that takes too long, or that the server has to end, in a way its client understands."""

    def __init__(self, app: ASGIApp, timeout_s: float, requests: OpenRequests) -> None:
        """`timeout_s` holds for POST: what only looks may do so for as long as it likes."""
        self._app, self._timeout_s, self._requests = app, timeout_s, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send)
        limit = self._timeout_s if scope["method"] == "POST" else None
        timeout = asyncio.timeout(limit)
        try:
            async with timeout:
                with self._requests.holding(timeout, scope["method"]):
                    await self._app(scope, receive, answer.send)
        except TimeoutError:
            if not timeout.expired():
                raise
            reason = self._requests.reason(timeout)
            await answer.end(_server_ends(reason) if reason else _time_is_up(self._timeout_s))


class _Answer:
    """What of an answer was sent, and how to end it early."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._started = self._is_stream = self._ended = False

    async def send(self, message: Message) -> None:
        """Send on a part of it."""
        if message["type"] == "http.response.start":
            self._started = True
            types = [value for name, value in message.get("headers", []) if name.lower() == b"content-type"]
            self._is_stream = bool(types) and types[0].startswith(b"text/event-stream")
        self._ended = self._ended or is_last(message)
        await self._send(message)

    async def end(self, error: APIError) -> None:
        """Say why it ends, where that can still be said, and to the log."""
        self._scope.setdefault("state", {})["ended"] = error.code
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                if not self._started:
                    await refuse(error, self._scope, self._receive, self._send)
                elif self._is_stream and not self._ended:
                    body = b"data: " + msgspec.json.encode(error.body()) + b"\n\ndata: [DONE]\n\n"
                    await self._send({"type": "http.response.body", "body": body})


def _time_is_up(timeout_s: float) -> APIError:
    message = f"the request took longer than {timeout_s:g} s (--request-timeout): ask for fewer tokens"
    return APIError(504, message, code="request_timeout", headers=NO_RETRY)


def _server_ends(reason: str) -> APIError:
    return APIError(503, reason, code="draining", headers=retry_after(10))
