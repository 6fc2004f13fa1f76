"""Nothing is done for clients that have left."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.serve.app import create_app
from prolepsis.serve.errors import APIError
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.presence import while_there
from prolepsis.serve.state import ServerState
from prolepsis.store import MemoryTier, Tiers

MESSAGES = [{"role": "user", "content": "Hi"}]


class Encoder(ThreadPoolExecutor):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__(1)
        self.given: list[Future[Any]] = []
        self.has_some = asyncio.Event()

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.given.append(super().submit(fn, *args, **kwargs))
        self.has_some.set()
        return self.given[-1]


class Client:
    """One request to an app, whose client can leave."""

    def __init__(self, app: Any, path: str, body: bytes) -> None:
        self._read, self._left, self._body = asyncio.Event(), asyncio.Event(), body
        headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def leave(self) -> None:
        """Returns when the server has let go of the request."""
        self._left.set()
        await self.task

    async def _receive(self) -> Message:
        if not self._read.is_set():
            self._read.set()
            return {"type": "http.request", "body": self._body}
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        pass


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "Hi"}),
        ("/detokenize", {"tokens": [1]}),
        ("/v1/completions", {"prompt": "Hi"}),
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/sessions", {"id": "x", "prompt": "Hi"}),
    ],
)
def test_what_waits_to_be_encoded_goes_with_its_client(tiny_llm: LLM, path: str, body: Any) -> None:
    async def work() -> None:
        encoder, go_on = Encoder(), threading.Event()
        state = ServerState(ServeOptions(model="tiny"), encoder=encoder)
        async with AsyncEngine(tiny_llm, KVStore(tiny_llm, Tiers([MemoryTier(1 << 20)]))) as engine:
            state.ready(engine, StoredSessions(engine))
            first = encoder.submit(go_on.wait, 60)
            encoder.has_some.clear()
            try:
                async with asyncio.timeout(30):
                    client = Client(create_app(state), path, json.dumps(body).encode())
                    await encoder.has_some.wait()
                    await client.leave()
                assert [each.cancelled() for each in encoder.given] == [False, True]
            finally:
                go_on.set()
                state.close()
            assert first.result()

    asyncio.run(work())


def test_work_ends_with_the_client_or_the_request_and_tells_its_errors() -> None:
    async def work() -> None:
        ended, left = asyncio.Event(), asyncio.Event()

        async def endless() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def receive() -> Message:
            await left.wait()
            return {"type": "http.disconnect"}

        request = Request({"type": "http"}, receive)
        assert await while_there(request, asyncio.sleep(0, 7)) == 7
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(while_there(request, endless()), 0.01)
        assert ended.is_set()
        ended.clear()
        left.set()
        with pytest.raises(APIError, match="gone") as caught:
            await while_there(request, endless())
        assert caught.value.status == 499

    asyncio.run(work())
