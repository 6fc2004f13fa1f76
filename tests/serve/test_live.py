"""/v1/engine and its events: the form that is documented, and one view a second for all."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from prolepsis import LLM, SamplingParams
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.snapshot import NOBODY, PoolSnapshot
from prolepsis.serve import live
from prolepsis.serve.app import create_app
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState
from prolepsis.store import open_tiers

SAMPLE = json.loads((Path(__file__).parents[1] / "data" / "engine_view.json").read_text())
ENDLESS = SamplingParams(max_tokens=1900, ignore_eos=True)

Serving = tuple[ServerState, FastAPI, httpx.AsyncClient]


@asynccontextmanager
async def serving(
    llm: LLM, store: KVStore | None = None
) -> AsyncIterator[tuple[ServerState, FastAPI, httpx.AsyncClient]]:
    state = ServerState(ServeOptions(model="tiny.gguf"))
    app = create_app(state)
    async with AsyncEngine(llm, store) as engine:
        state.ready(engine)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            yield state, app, client


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def form(value: Any) -> Any:
    """Names and types; of lists, those of what the first has by name."""
    if isinstance(value, dict):
        return {name: form(part) for name, part in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [form(value[0])]
    return "number" if isinstance(value, (int, float)) else type(value).__name__


def test_a_view_has_the_form_of_the_sample(tiny: Path) -> None:
    async def ask() -> dict[str, Any]:
        llm = LLM(tiny, kv_memory=128 * 32 * 512, draft="ngram", draft_tokens=2)
        store = KVStore(llm, open_tiers(["memory:1MiB"]))
        async with serving(llm, store) as (state, _, client):
            stream = state.require_ready().generate("a b c a b c a b c", ENDLESS)
            await anext(stream)
            view = (await client.get("/v1/engine")).json()
            stream.close()
        store.close()
        return view

    view = run(ask())
    assert view["store"]["segments"].pop("decisions") == {}  # of so short a prompt, none is made
    sample = deepcopy(SAMPLE)
    del sample["store"]["segments"]["decisions"]
    assert form(view) == form(sample)
    pool = view["engine"]["pool"]
    assert sum(count for count, _, _ in pool["runs"]) == pool["blocks"] == sum(pool["counts"].values()) == 128
    [request] = view["engine"]["running"]
    assert sum(count for count, _, owner in pool["runs"] if owner == request["number"]) == pool["counts"]["used"]


def test_while_the_model_is_loading_there_is_no_engine() -> None:
    async def ask() -> httpx.Response:
        app = create_app(ServerState(ServeOptions(model="tiny.gguf")))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
            return await client.get("/v1/engine")

    answer = run(ask())
    assert answer.headers["cache-control"] == "no-store"
    assert (answer.json()["phase"], answer.json()["engine"], answer.json()["max_context"]) == ("loading", None, None)


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """Grows with every view that is taken; a second lasts 50 ms."""
    taken: list[None] = []
    real: Callable[..., Any] = live.take

    def take(*arguments: Any) -> Any:
        taken.append(None)
        return real(*arguments)

    monkeypatch.setattr(live, "take", take)
    monkeypatch.setattr(live, "INTERVAL", 0.05)
    monkeypatch.setattr(live, "MAX_AGE", 0.0)
    return taken


def test_listeners_share_each_view_and_a_drain_ends_them(tiny_llm: LLM, takes: list[None]) -> None:
    async def listen(events: AsyncIterator[bytes]) -> list[dict[str, Any]]:
        heard = []
        async for event in events:
            assert event.startswith(b"data: {")
            assert event.endswith(b"}\n\n")
            heard.append(json.loads(event[6:]))
            if len(heard) == 4:
                state.phase = "draining"
        return heard

    async def many() -> list[list[dict[str, Any]]]:
        nonlocal state
        async with serving(tiny_llm) as (state, app, _):
            return await asyncio.gather(*(listen(app.state.live.events()) for _ in range(20)))

    state: ServerState
    heard = run(many())
    assert len(takes) <= 1 + max(map(len, heard))
    for one in heard:
        assert [view["phase"] for view in one[-2:]] == ["ready", "draining"]
        assert [view["at"] for view in one] == sorted(view["at"] for view in one)


def test_who_leaves_holds_nothing_up(tiny_llm: LLM, takes: list[None]) -> None:
    async def leave() -> None:
        async with serving(tiny_llm) as (_, app, _):
            events = [app.state.live.events() for _ in range(2)]
            waiting = [asyncio.create_task(anext(each)) for each in events]
            assert all(await asyncio.gather(*waiting))
            gone = asyncio.create_task(anext(events[0]))
            await asyncio.sleep(0)
            gone.cancel()
            assert await anext(events[1])
            await events[1].aclose()
            await app.state.live._ticker  # ends, as nobody listens

    run(leave())


def test_the_end_of_the_engine_ends_the_events(tiny_llm: LLM, takes: list[None]) -> None:
    async def end() -> list[bytes]:
        async with serving(tiny_llm) as (state, app, _):
            events = app.state.live.events()
            await anext(events)
            await state.require_ready().close()
            return [event async for event in events]

    assert run(end()) == []


def test_blocks_that_are_alike_are_told_as_one() -> None:
    states, owners = np.array([0, 0, 2, 2, 2, 3], np.uint8), np.array([NOBODY, NOBODY, 4, 4, 7, NOBODY])
    pool = PoolSnapshot("bf16", 32, 16384, states, owners, 0.0)
    assert live._runs(pool) == [(2, 0, None), (2, 2, 4), (1, 2, 7), (1, 3, None)]
