"""Streams on the wire, many at once, broken off, and failing."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from prolepsis import LLM, SamplingParams
from prolepsis.serve import streaming

ENDLESS: dict[str, Any] = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 1900, "ignore_eos": True}


@contextmanager
def standstill(served: Any) -> Iterator[None]:
    """The engine runs no pass meanwhile."""
    stands, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        stands.set()
        assert go_on.wait(30)

    thread = threading.Thread(target=served.within, args=(wait,))
    thread.start()
    try:
        assert stands.wait(30)
        yield
    finally:
        go_on.set()
        thread.join()


def events(served: Any, path: str, body: dict[str, Any]) -> list[str]:
    """Of a stream, whole."""
    with httpx.stream("POST", f"{served.url}{path}", json={**body, "stream": True}) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert answer.headers["cache-control"] == "no-cache"
        text = "".join(answer.iter_text())
    assert text.endswith("\n\n")
    return text[:-2].split("\n\n")


def test_a_stream_does_not_keep_its_body(served: Any) -> None:
    sent = json.dumps({**ENDLESS, "stream": True})[:-1] + ', "metadata": [' + "{}, " * 200_000 + "{}]}"
    headers = {"content-type": "application/json"}
    tracemalloc.start()
    try:
        with httpx.stream("POST", f"{served.url}/v1/completions", content=sent, headers=headers) as answer:
            assert next(answer.iter_lines()).startswith("data: {")
            held, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert most > 10 * len(sent)  # parsed
    assert held < 3 * len(sent)  # of which the client has one


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_event_is_one_line_of_json_and_the_last_says_so(served: Any, path: str) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "max_tokens": 30, "n": 2}
    *chunks, done = events(served, path, body)
    assert done == "data: [DONE]"
    for chunk in chunks:
        prefix, line = chunk[:6], chunk[6:]
        assert prefix == "data: "
        assert "usage" not in json.loads(line)


def test_many_clients_at_once_get_what_each_would_alone(served: Any, tiny_llm: LLM) -> None:
    prompts = [[7 * i + j + 1 for j in range(3 * i + 1)] for i in range(16)]
    alone = [tiny_llm.generate(p, SamplingParams(max_tokens=20, seed=i))[0].text for i, p in enumerate(prompts)]

    async def ask(client: openai.AsyncOpenAI, i: int) -> str:
        asked: dict[str, Any] = {"model": "tiny", "prompt": prompts[i], "max_tokens": 20, "seed": i}
        if i % 2:
            return (await client.completions.create(**asked)).choices[0].text
        return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**asked, stream=True)])

    async def ask_all() -> list[str]:
        async with served.async_client() as client:
            return await asyncio.gather(*(ask(client, i) for i in range(len(prompts))))

    assert asyncio.run(ask_all()) == alone


def test_no_piece_ends_within_a_character(client: openai.OpenAI, tiny_llm: LLM) -> None:
    token = {tiny_llm.tokenizer.token_bytes(t): t for t in range(1024)}
    bias = {token[b"\xc3"]: 100, token[b"\xa9"]: 100, token[b"\xf0"]: 90}
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 200, "seed": 1, "logit_bias": bias}
    whole = client.completions.create(**asked, temperature=2).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**asked, temperature=2, stream=True)]
    assert "é" in whole
    assert "".join(pieces) == whole


@pytest.mark.parametrize("stop", [["e"], ["th", "e a"], ["\n\n", " "]])
def test_a_stream_stops_where_the_whole_answer_does(client: openai.OpenAI, stop: list[str]) -> None:
    for seed in range(5):
        asked: dict[str, Any] = {"model": "tiny", "prompt": "the", "max_tokens": 40, "seed": seed, "stop": stop}
        [choice] = client.completions.create(**asked).choices
        chunks = [chunk.choices[0] for chunk in client.completions.create(**asked, stream=True)]
        assert "".join(chunk.text for chunk in chunks) == choice.text
        assert chunks[-1].finish_reason == choice.finish_reason


def counts(served: Any) -> Any:
    return served.within(served.state.llm.engine.statistics)


def require_idle(served: Any) -> None:
    llm = served.state.llm
    assert served.within(lambda: (llm.engine.has_work, llm.kv_cache.pool.num_used)) == (False, 0)


def test_a_stream_that_is_broken_off_is_free_before_the_next_pass(served: Any, client: openai.OpenAI) -> None:
    served.ended.clear()
    stream = client.completions.create(
        **{key: ENDLESS[key] for key in ("model", "prompt", "max_tokens")}, stream=True, n=3
    )
    for _ in range(5):
        next(stream)
    with standstill(served):
        before = served.state.llm.engine.statistics()
        stream.close()
        served.wait_for(3)
    after = counts(served)
    assert (after.passes, after.cancelled + after.finished) == (before.passes, before.cancelled + before.finished + 3)
    require_idle(served)


def test_an_answer_nobody_waits_for_is_never_begun(served: Any) -> None:
    served.ended.clear()
    before = counts(served)
    with standstill(served):
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{served.url}/v1/completions", json=ENDLESS, timeout=0.2)
        served.wait_for(1)
    assert served.ended[0].token_ids == []
    assert counts(served).passes == before.passes
    require_idle(served)


def test_clients_that_leave_in_the_midst_do_not_disturb_others(served: Any, tiny_llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=3, ignore_eos=True)
    alone = tiny_llm.generate([[9, 9, 9]], params)[0].text

    async def stay(client: openai.AsyncOpenAI) -> str:
        asked: dict[str, Any] = {**ENDLESS, "prompt": [9, 9, 9], "max_tokens": 60, "seed": 3}
        del asked["ignore_eos"]
        chunks = await client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        return "".join([chunk.choices[0].text async for chunk in chunks])

    async def leave(client: openai.AsyncOpenAI, after: int) -> None:
        asked = {key: ENDLESS[key] for key in ("model", "prompt", "max_tokens")}
        stream = await client.completions.create(**asked, stream=True, extra_body={"ignore_eos": True})
        for _ in range(after):
            await anext(stream)
        await stream.close()

    async def ask_all() -> list[Any]:
        async with served.async_client() as client:
            return await asyncio.gather(*(leave(client, i) if i % 2 else stay(client) for i in range(8)))

    served.ended.clear()
    assert [text for text in asyncio.run(ask_all()) if text is not None] == [alone] * 4
    served.wait_for(8)
    require_idle(served)


def test_a_failure_in_a_stream_is_its_last_event_but_one(
    served: Any, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("of a secret")

    asked: dict[str, Any] = {key: ENDLESS[key] for key in ("prompt", "max_tokens")}
    with monkeypatch.context() as patch:
        patch.setattr(served.state.llm.engine, "step", fail)
        *_, error, done = events(served, "/v1/completions", asked)
        with pytest.raises(openai.APIError, match="pass that the request was in failed"):
            list(client.completions.create(model="tiny", **asked, stream=True))
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="tiny", **asked)
    assert json.loads(error.removeprefix("data: "))["error"]["type"] == "server_error"
    assert done == "data: [DONE]"
    assert [record.message for record in caplog.records] == ["a request failed"] * 3
    require_idle(served)


def test_a_stream_without_news_shows_that_it_lives(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "SILENCE_S", 0.01)
    body = {"prompt": "x", "max_tokens": 1, "stream": True}
    with (
        standstill(served),
        httpx.stream("POST", f"{served.url}/v1/completions", json=body) as answer,
    ):
        assert next(answer.iter_lines()) == ": alive"
