"""Requests to an ASGI app in this process, and the least app there is."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send


class Echo:
    """Answers every request with its body, and keeps the scope of the last."""

    def __init__(self) -> None:
        self.scope: Scope = {}
        self.calls = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope = scope
        self.calls += 1
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": body})


Asked = Coroutine[Any, Any, httpx.Response]


def ask(app: ASGIApp, method: str, path: str, **request: Any) -> httpx.Response:
    """The answer to one request."""
    return ask_with(app, lambda client: client.request(method, path, **request))


def ask_with(app: ASGIApp, request: Callable[[httpx.AsyncClient], Asked]) -> httpx.Response:
    """The answer to what `request` asks."""

    async def run() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await request(client)

    return asyncio.run(run())


async def chunks(parts: Iterator[bytes]) -> AsyncIterator[bytes]:
    """A body without a known length."""
    for part in parts:
        yield part


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """OpenAI's error object, which every refusal has."""
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error, dict)
    return error
