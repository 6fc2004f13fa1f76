"""Bodies and headers that are too large or too slow, and requests that take too long."""

import asyncio
import io
import json
from collections.abc import Iterator

import pytest
from asgi_client import Echo, ask, chunks, error_of
from starlette.types import Message, Receive, Scope, Send

from prolepsis.serve.access_log import AccessLog
from prolepsis.serve.limits import BodyLimit, HeaderLimit, OpenRequests, TimeLimit

SCOPE: Scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": []}


def test_a_body_within_the_limit_comes_through_whole_and_is_known_to_a_log_that_wants_it() -> None:
    inner = Echo()
    answer = ask(BodyLimit(inner, 10, 5), "POST", "/", content=b"0123456789")
    assert answer.content == b"0123456789"
    assert "body" not in inner.scope.get("state", {})
    ask(BodyLimit(inner, 10, 5, logged=True), "POST", "/", content=b"0123456789")
    assert inner.scope["state"]["body"] == b"0123456789"
    assert ask(BodyLimit(inner, 10, 5), "POST", "/", content=chunks(iter([b"01", b"", b"23"]))).content == b"0123"


def test_a_body_that_says_it_is_too_large_is_not_read() -> None:
    async def receive() -> Message:
        raise AssertionError("read")

    inner = Echo()
    sent = asyncio.run(_sent(BodyLimit(inner, 10, 5), {**SCOPE, "headers": [(b"content-length", b"11")]}, receive))
    assert sent[0]["status"] == 413
    assert inner.calls == 0


def test_a_body_without_a_length_is_read_up_to_the_limit() -> None:
    read = 0

    def endless() -> Iterator[bytes]:
        nonlocal read
        while True:
            read += 4
            yield b"0123"

    inner = Echo()
    answer = ask(BodyLimit(inner, 10, 5), "POST", "/", content=chunks(endless()))
    assert answer.status_code == 413
    assert error_of(answer)["code"] == "body_too_large"
    assert read == 12
    assert inner.calls == 0


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "gzip, identity"])
def test_compressed_bodies_are_refused(encoding: str) -> None:
    answer = ask(BodyLimit(Echo(), 10, 5), "POST", "/", content=b"x", headers={"content-encoding": encoding})
    assert answer.status_code == 415
    assert "Content-Encoding" in error_of(answer)["message"]


def test_a_slow_body_is_given_up_and_not_sent_again() -> None:
    async def never() -> Message:
        return await asyncio.Future()

    sent = asyncio.run(_sent(BodyLimit(Echo(), 10, 0.01), SCOPE, never))
    assert sent[0]["status"] == 408
    headers = {name.lower(): value for name, value in sent[0]["headers"]}
    assert headers[b"x-should-retry"] == b"false"
    assert headers[b"connection"] == b"close"


def test_a_client_that_leaves_within_its_body_reaches_nothing() -> None:
    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def receive() -> Message:
        return messages.pop(0)

    inner = Echo()
    assert asyncio.run(_sent(BodyLimit(inner, 10, 5), SCOPE, receive)) == []
    assert inner.calls == 0


def test_long_headers_are_refused() -> None:
    inner = Echo()
    limit = HeaderLimit(inner, 1000)
    assert ask(limit, "GET", "/", headers={"x": "y" * 500}).status_code == 200
    assert ask(limit, "GET", "/", headers={"x": "y" * 1000}).status_code == 431
    assert ask(limit, "GET", "/", params={"x": "y" * 1000}).status_code == 431
    assert inner.calls == 1


class _Stuck:
    """Begins an answer, or does not, and then does nothing until it is cancelled."""

    def __init__(self, begins: bool, kind: bytes = b"text/event-stream; charset=utf-8") -> None:
        self._begins, self._kind = begins, kind
        self.reached = asyncio.Event()
        self.cancelled = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._begins:
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", self._kind)]})
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        self.reached.set()
        try:
            await asyncio.Future()
        except asyncio.CancelledError:
            self.cancelled = True
            raise


def test_a_request_that_takes_too_long_is_cancelled_and_not_sent_again() -> None:
    inner = _Stuck(begins=False)
    sent = asyncio.run(_sent(TimeLimit(inner, 0.01, OpenRequests()), SCOPE, _silent))
    assert inner.cancelled
    assert sent[0]["status"] == 504
    assert (b"x-should-retry", b"false") in [(name.lower(), value) for name, value in sent[0]["headers"]]
    assert json.loads(sent[1]["body"])["error"]["code"] == "request_timeout"


def test_a_stream_that_takes_too_long_says_so_and_ends() -> None:
    inner = _Stuck(begins=True)
    stream = io.StringIO()
    limit = TimeLimit(inner, 0.01, OpenRequests())
    sent = asyncio.run(_sent(AccessLog(limit, as_json=False, prompts=False, stream=stream), SCOPE, _silent))
    assert " POST /v1/completions 200 (request_timeout) " in stream.getvalue()
    assert inner.cancelled
    error, done, rest = sent[-1]["body"].decode().split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] == "request_timeout"
    assert (done, rest) == ("data: [DONE]", "")
    assert not sent[-1].get("more_body", False)


def test_another_answer_that_has_begun_is_just_cut_off() -> None:
    sent = asyncio.run(_sent(TimeLimit(_Stuck(True, b"application/json"), 0.01, OpenRequests()), SCOPE, _silent))
    assert sent[-1]["body"] == b"data: 1\n\n"


@pytest.mark.parametrize("begins", [False, True])
def test_a_server_that_ends_has_streams_end_with_the_reason(begins: bool) -> None:
    async def run() -> list[Message]:
        inner, requests = _Stuck(begins), OpenRequests()
        asked = asyncio.create_task(_sent(TimeLimit(inner, 60, requests), SCOPE, _silent))
        await inner.reached.wait()
        assert len(requests) == 1
        requests.end("not yours", only=lambda method: method != "POST")
        requests.end("going down")
        requests.end("told before")
        sent = await asked
        assert inner.cancelled
        assert len(requests) == 0
        return sent

    sent = asyncio.run(run())
    assert sent[0]["status"] == (200 if begins else 503)
    assert b"going down" in sent[-1]["body"]


def test_what_only_looks_may_do_so_for_as_long_as_it_likes() -> None:
    async def run() -> None:
        inner, requests = _Stuck(True), OpenRequests()
        asked = asyncio.create_task(_sent(TimeLimit(inner, 0.0, requests), {**SCOPE, "method": "GET"}, _silent))
        await inner.reached.wait()
        requests.end("going down", only=lambda method: method != "POST")
        assert b"going down" in (await asked)[-1]["body"]

    asyncio.run(run())


def test_a_timeout_of_the_endpoint_itself_is_its_own() -> None:
    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        asyncio.run(_sent(TimeLimit(inner, 60, OpenRequests()), SCOPE, _silent))


async def _silent() -> Message:
    return await asyncio.Future()


async def _sent(app: object, scope: Scope, receive: Receive) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(dict(scope), receive, send)
    return sent
