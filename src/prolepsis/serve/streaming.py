"""Answers as server-sent events, written as they come."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

import msgspec
from fastapi import Response
from starlette.types import Receive, Scope, Send

from prolepsis.engine.completion import Delta
from prolepsis.serve.answers import Head, details_of, usage_of
from prolepsis.serve.errors import as_api_error, log_failure
from prolepsis.serve.generation import Generation, News
from prolepsis.serve.presence import disconnected, ended

SILENCE_S = 15.0
"""A comment is written after so many seconds without news, lest a proxy takes the connection for dead."""

DONE = b"data: [DONE]\n\n"
_ALIVE = b": alive\n\n"
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx passes on what it gets
]


class Writer(Protocol):
    """Makes the choices of chunks, each encoded, in one kind of completions."""

    def begin(self) -> Sequence[bytes]:
        """What comes before any news."""

    def write(self, news: News) -> Sequence[bytes]:
        """What becomes of the news; nothing, where there is nothing to show yet."""


class Held:
    """Tokens that have no text to show yet: they are within a character, or may begin a stop text."""

    def __init__(self, choices: int) -> None:
        self._deltas: list[list[Delta]] = [[] for _ in range(choices)]

    def with_earlier(self, news: News) -> News:
        """The news and what was held before them of that choice; without deltas while there is no text and no end."""
        deltas = self._deltas[news.choice] + news.deltas
        shown = news.finish_reason is not None or any(delta.text for delta in news.deltas)
        self._deltas[news.choice] = [] if shown else deltas
        return News(news.choice, deltas if shown else [])


class EventStream(Response):
    """The chunks of a generation; the last event is always [DONE], after an error too.

    The generation is closed as soon as the client is gone.
    """

    def __init__(self, generation: Generation, head: Head, writer: Writer, *, include_usage: bool) -> None:
        super().__init__(media_type="text/event-stream")
        self._generation, self._writer, self._include_usage = generation, writer, include_usage
        self._head = b"data: " + msgspec.json.encode(head)[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._writes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        work = asyncio.create_task(self._run(send))
        tasks = (work, asyncio.create_task(disconnected(receive)), asyncio.create_task(self._keep_alive(send)))
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            self._generation.close()
            if not work.done():
                await ended(*tasks)
            await ended(*tasks[1:])
        if not work.cancelled():
            work.result()

    async def _run(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._write(send, self._chunks(self._writer.begin()))
        try:
            while news := await self._generation.read():
                choices = [choice for each in news for choice in self._writer.write(each)]
                if choices:
                    await self._write(send, self._chunks(choices))
        except Exception as error:
            last = _error_event(error)
        else:
            last = self._last_chunk() if self._include_usage else b""
        await send({"type": "http.response.body", "body": last + DONE, "more_body": False})

    async def _write(self, send: Send, body: bytes) -> None:
        self._writes += 1
        await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _keep_alive(self, send: Send) -> None:
        while True:
            before = self._writes
            await asyncio.sleep(SILENCE_S)
            if before == self._writes:
                await self._write(send, _ALIVE)

    def _chunks(self, choices: Sequence[bytes]) -> bytes:
        return b"".join([self._head + choice + self._tail for choice in choices])

    def _last_chunk(self) -> bytes:
        extra: dict[str, Any] = {
            "usage": usage_of(self._generation),
            "prolepsis": details_of(self._generation.completions),
        }
        return self._head + b"]," + msgspec.json.encode(extra)[1:] + b"\n\n"


def _error_event(error: Exception) -> bytes:
    log_failure(error)
    return b"data: " + msgspec.json.encode(as_api_error(error).body()) + b"\n\n"
