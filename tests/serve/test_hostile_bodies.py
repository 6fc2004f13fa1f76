"""Whatever a client sends, it gets a 4xx that it will not send again, and the server goes on."""

import json
import socket
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from served import Served

from prolepsis.model.chat_template import ChatTemplate

DEEP = 100_000
HUGE_INT = "9" * 5000
JSON = {"content-type": "application/json"}
RETRIED = {408, 409, 429, *range(500, 600)}


def _with(field: str, value: str) -> bytes:
    return f'{{"prompt": "a", "max_tokens": 1, "{field}": {value}}}'.encode()


BODIES = {
    "empty": b"",
    "no JSON": b"prompt=a",
    "no object": b"[]",
    "null": b"null",
    "cut off": b'{"prompt": "a"',
    "trailing": b'{"prompt": "a"} x',
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "deep field": _with("unknown", "[" * DEEP + "]" * DEEP),
    "deep prompt": b'{"prompt": ' + b"[" * 500 + b"]" * 500 + b"}",
    "no UTF-8": b'{"prompt": "\xff\xfe"}',
    "cut UTF-8": b'{"prompt": "\xe2\x82"}',
    "UTF-16": '{"prompt": 1}'.encode("utf-16"),
    "NaN": _with("temperature", "NaN"),
    "infinite": _with("temperature", "Infinity"),
    "overflow": _with("top_p", "1e999"),
    "huge int": _with("max_tokens", HUGE_INT),
    "big int": _with("seed", "9" * 400),
    "negative": _with("max_tokens", "-1"),
    "text for int": _with("max_tokens", '"1"'),
    "bool for int": _with("n", "true"),
    "huge n": _with("n", "1000000000"),
    "many samples": _with("n", "129"),
    "huge best_of": _with("best_of", "1000000000"),
    "huge logprobs": _with("logprobs", "1000000000"),
    "stop": _with("stop", '["a", 1]'),
    "empty stop": _with("stop", '[""]'),
    "logit_bias": _with("logit_bias", '{"-1": 1}'),
    "logit_bias beyond": _with("logit_bias", '{"99999999": 1}'),
    "logit_bias NaN": _with("logit_bias", '{"1": NaN}'),
    "priority": _with("priority", "9" * 30),
    "surrogate": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "surrogate salt": _with("cache_salt", "[]"),
    "token beyond": b'{"prompt": [99999999]}',
    "huge token": b'{"prompt": [' + HUGE_INT.encode()[:400] + b"]}",
    "float token": b'{"prompt": [1.0]}',
    "mixed": b'{"prompt": ["a", 1]}',
    "many prompts": b'{"prompt": [' + b",".join([b'"a"'] * 500_000) + b"]}",
    "long prompt": b'{"prompt": "' + b"a b " * 900_000 + b'"}',
    "too large": b'{"prompt": "' + b"a" * (5 << 20) + b'"}',
}


@pytest.mark.parametrize("name", BODIES)
def test_a_hostile_body_is_refused(served: Served, name: str) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", content=BODIES[name], headers=JSON, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert answer.status_code not in RETRIED
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert len(answer.content) < 2000


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/detokenize", "/v1/sessions"])
@pytest.mark.parametrize("name", ["empty", "deep lists", "no UTF-8", "cut off", "UTF-16", "surrogate", "null"])
def test_so_it_is_everywhere(served: Served, path: str, name: str) -> None:
    answer = httpx.post(f"{served.url}{path}", content=BODIES[name], headers=JSON, timeout=60)
    assert 400 <= answer.status_code < 500, answer.text[:300]
    assert answer.status_code not in RETRIED


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/v1/sessions"])
def test_a_name_that_is_no_unicode_is_refused(path: str, served: Served) -> None:
    body = b'{"id": "a", "messages": [{"role": "user", "content": "x", "\\ud800": 1}]}'
    answer = httpx.post(f"{served.url}{path}", content=body, headers=JSON)
    if path != "/v1/sessions":  # there is no store
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages[0].\\ud800")
    assert 400 <= answer.status_code < 500


@pytest.mark.parametrize("choice", [[1], [{}], 1, {}])
def test_a_tool_choice_of_another_type_is_refused(served: Served, choice: object) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "tool_choice": choice}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 400, answer.text[:300]
    assert answer.json()["error"]["param"].startswith("tool_choice")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
def test_other_kinds_of_bodies_are_refused(served: Served, content_type: str) -> None:
    headers = {"content-type": content_type} if content_type else {}
    answer = httpx.post(f"{served.url}/v1/completions", content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code in (400, 415, 422)


def test_of_a_key_that_is_there_twice_the_last_counts(served: Served) -> None:
    body = b'{"max_tokens": 5, "prompt": "Once", "max_tokens": 1}'
    answer = httpx.post(f"{served.url}/v1/completions", content=body, headers=JSON)
    assert answer.json()["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ 'x' * 10**9 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{% if %}",
    ],
)
def test_a_template_that_loops_explodes_or_breaks_out_is_the_requests_end_and_no_more(
    served: Served, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    assert served.state.engine is not None
    template = ChatTemplate(source)
    monkeypatch.setattr(type(served.state.engine.llm), "chat_template", property(lambda self: template))
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60)
    assert answer.status_code == 400, answer.text[:300]
    assert "chat template" in answer.json()["error"]["message"]


@pytest.mark.parametrize("how", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_a_socket_closed_by_half_or_whole_frees_its_sequence(served: Served, how: int) -> None:
    served.ended.clear()
    url = urlsplit(served.url)
    body = json.dumps({"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.netloc}\r\ncontent-type: application/json\r\n"
    with socket.create_connection((url.hostname, url.port), 30) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.shutdown(how)
        served.wait_for(1)
    assert served.ended[0].finish_reason is None
    assert served.within(lambda: served.state.engine.llm.kv_cache.pool.num_used) == 0


def test_after_all_of_that_it_still_answers(served: Served, tiny: Path) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "Once", "max_tokens": 3}, timeout=60)
    assert answer.status_code == 200
    served.wait_until_nothing_is_open()
