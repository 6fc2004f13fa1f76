"""Connections that misbehave: those that send no request, or do not read their answer."""

import asyncio
from http import HTTPStatus

import msgspec
from uvicorn.protocols.http.h11_impl import H11Protocol

from prolepsis.serve.errors import APIError


def limited_protocol(max_connections: int, header_timeout_s: float, send_timeout_s: float) -> type[H11Protocol]:
    """Uvicorn's HTTP/1.1 with limits that it lacks.

    max_connections: more get 503 and are closed. header_timeout_s: for a request's line and headers, from its first
    byte (or the connection) on. send_timeout_s: for a client that has stopped reading.
    """

    class Limited(_Limited):
        limits = (max_connections, header_timeout_s, send_timeout_s)

    return Limited


class _Limited(H11Protocol):
    limits: tuple[int, float, float]
    _unsent: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits[0]:
            message = f"too many connections, {self.limits[0]} are allowed (--max-connections)"
            transport.write(_raw_answer(APIError(503, message, code="too_many_connections")))
            transport.close()
        else:
            self._await_request()

    def data_received(self, data: bytes) -> None:
        if not self._answering:
            self._await_request()
        super().data_received(data)
        if self._answering:
            self._stop_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        self.resume_writing()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(self.limits[2], self.transport.abort)

    def resume_writing(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        too_long = len(self.conn.trailing_data[0]) > (self.config.h11_max_incomplete_event_size or 0)
        error = APIError(400, "this is no HTTP/1.1 request", code="bad_http")
        if too_long:
            error = APIError(431, "the headers are too long (--max-header)", code="headers_too_long")
        self.transport.write(_raw_answer(error))
        self.transport.close()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _await_request(self) -> None:
        if self._unsent is None:
            self._unsent = self.loop.call_later(self.limits[1], self.transport.close)

    def _stop_waiting(self) -> None:
        if self._unsent is not None:
            self._unsent.cancel()
            self._unsent = None


def _raw_answer(error: APIError) -> bytes:
    body = msgspec.json.encode(error.body())
    head = f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body
