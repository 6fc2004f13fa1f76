"""What endpoints get of the server: an engine that runs, and threads in which nothing holds others up."""

import asyncio
import threading
from typing import Any

import httpx
import pytest

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.grammar import Grammar
from prolepsis.serve.app import create_app
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState


def test_without_its_engine_a_server_is_not_healthy(tiny_llm: LLM) -> None:
    async def ask() -> list[httpx.Response]:
        state = ServerState(ServeOptions(model="tiny"))
        client = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://x")
        async with AsyncEngine(tiny_llm) as engine, client:
            state.ready(engine)
            healthy = await client.get("/health")
            await engine.close()
            body = {"prompt": "Once"}
            return [healthy, await client.get("/health"), await client.post("/v1/completions", json=body)]

    healthy, *others = asyncio.run(ask())
    assert healthy.status_code == 200
    for answer in others:
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_failed")
        assert "retry-after" in answer.headers


def test_grammars_hold_nobody_else_up(tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(type(tiny_llm.grammars), "matcher", lambda self, grammar: go_on.wait(60))

    async def work() -> Any:
        state = ServerState(ServeOptions(model="tiny"))
        async with AsyncEngine(tiny_llm) as engine:
            state.ready(engine)
            compiling = [asyncio.create_task(state.compile(Grammar("json_object"))) for _ in range(100)]
            try:
                async with asyncio.timeout(30):
                    return await asyncio.gather(asyncio.to_thread(int, 3), state.encode("prompt", int, 4))
            finally:
                go_on.set()
                await asyncio.gather(*compiling)
                state.close()

    assert asyncio.run(work()) == [3, 4]


def test_texts_wait_outside_so_that_others_pass_them() -> None:
    async def work() -> list[str]:
        state, go_on, done = ServerState(ServeOptions(model="tiny")), threading.Event(), list[str]()
        state.encoder.submit(go_on.wait, 60)
        texts = [asyncio.create_task(state.encode_in_turn("prompt", done.append, "text")) for _ in range(3)]
        await asyncio.sleep(0)
        chat = asyncio.create_task(state.encode("prompt", done.append, "chat"))
        await asyncio.sleep(0)
        go_on.set()
        await asyncio.gather(chat, *texts)
        state.close()
        return done

    assert asyncio.run(work()) == ["text", "chat", "text", "text"]
