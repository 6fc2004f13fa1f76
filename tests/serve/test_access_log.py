"""What the log says of a request, and what it keeps to itself."""

import asyncio
import io
import json
from contextlib import suppress

import pytest
from asgi_client import Echo, ask
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from prolepsis.serve.access_log import AccessLog, note_tokens
from prolepsis.serve.limits import BodyLimit

SECRET = "what the doctor said"


async def _endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    note_tokens(Request(scope), 7, 3, 5)
    await Echo()(scope, receive, send)


def _logged(path: str = "/v1/completions", *, as_json: bool, prompts: bool, app=_endpoint) -> str:
    stream = io.StringIO()
    log = AccessLog(BodyLimit(app, 1000, 5, logged=prompts), as_json=as_json, prompts=prompts, stream=stream)
    ask(log, "POST", path, params={"q": SECRET}, content=SECRET, headers={"authorization": f"Bearer {SECRET}"})
    return stream.getvalue()


def test_a_line_has_method_path_status_tokens_and_seconds_and_no_secret() -> None:
    line = _logged(as_json=False, prompts=False)
    assert " POST /v1/completions 200 7 tokens (3 cached) + 5 " in line
    assert line.endswith(" s\n")
    assert SECRET not in line
    assert "doctor" not in line


def test_the_same_as_json() -> None:
    fields = json.loads(_logged(as_json=True, prompts=False))
    assert {name: fields[name] for name in ("method", "path", "status", "complete")} == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "complete": True,
    }
    assert [fields[name] for name in ("prompt_tokens", "cached_tokens", "output_tokens")] == [7, 3, 5]
    assert "doctor" not in json.dumps(fields)


def test_prompts_are_logged_only_where_asked_for_and_keys_never() -> None:
    assert SECRET in json.loads(_logged(as_json=True, prompts=True))["body"]
    assert _logged(as_json=False, prompts=True).count(SECRET) == 1


@pytest.mark.parametrize("as_json", [False, True])
def test_a_path_cannot_forge_lines(as_json: bool) -> None:
    assert _logged("/v1/x%0d%0a2026 POST /fake 200 %1b[2J" + "y" * 1000, as_json=as_json, prompts=True).count("\n") == 1
    line = _logged("/v1/%1b[2J%e2%80%a8x", as_json=as_json, prompts=True)
    assert line.rstrip("\n").isprintable()
    assert line.isascii()


def test_an_answer_that_was_cut_off_and_one_that_failed_are_logged_as_that() -> None:
    async def cut(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})

    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        raise KeyError("oh")

    endless = "/v1/engine/events"
    for app, path, logged in [
        (cut, "/v1/x", " POST /v1/x 200 (cut off) "),
        (failing, "/v1/x", " POST /v1/x 0 (cut off) "),
        (cut, endless, f" POST {endless} 200 0."),
    ]:
        stream = io.StringIO()
        scope: Scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        with suppress(KeyError):
            asyncio.run(AccessLog(app, as_json=False, prompts=False, stream=stream)(scope, _nothing, _nowhere))
        assert logged in stream.getvalue()


def test_what_machines_ask_every_second_is_logged_only_where_it_fails() -> None:
    async def failing(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    assert _logged("/health", as_json=False, prompts=False) == ""
    assert " 503 " in _logged("/health", as_json=False, prompts=False, app=failing)


async def _nothing() -> Message:
    return {"type": "http.disconnect"}


async def _nowhere(message: Message) -> None:
    pass
