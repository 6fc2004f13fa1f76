"""Whatever a body holds, the answer is 200 or says what is wrong with it: never a failure of the server."""

import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FIELDS = (
    "model", "prompt", "messages", "stream", "stream_options", "temperature", "top_p", "top_k", "min_p", "n", "best_of",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stop", "stop_token_ids", "ignore_eos",
    "seed", "priority", "cache_salt", "logprobs", "top_logprobs", "echo", "suffix", "max_completion_tokens", "tokens",
    "tools", "tool_choice", "response_format", "functions", "user",
)  # fmt: skip
COSTLY = ("max_completion_tokens", "n", "best_of")
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
numbers = st.integers() | st.integers(-3, 130) | st.floats()
texts = st.text(max_size=8) | st.sampled_from(["tiny", "user", "text", "json_object", "\ud800", "<|im_end|>"])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
messages = st.fixed_dictionaries({"role": texts, "content": values}, optional={"name": values, "tool_calls": values})
fields = st.dictionaries(st.sampled_from(FIELDS), values, max_size=3)


@pytest.mark.parametrize("path", PATHS)
def test_any_body_is_answered(served: Any, path: str) -> None:
    with httpx.Client(base_url=served.url) as client:

        @settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
        @given(fields | values, st.lists(messages, max_size=2) | st.none(), st.booleans())
        def check(body: Any, conversation: Any, sound: bool) -> None:
            if isinstance(body, dict):
                base = {"prompt": "x", "messages": conversation or [{"role": "user", "content": "x"}]} if sound else {}
                body = {**base, **body, "max_tokens": 2}
                short = {name: min(body[name], 3) for name in COSTLY if isinstance(body.get(name), int)}
                body.update(short)
            data = json.dumps(body).encode("utf-8", "surrogatepass")
            answer = client.post(path, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in (200, 400, 404), (body, answer.text)
            if answer.status_code != 200:
                assert answer.json()["error"]["message"]

        check()


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"nul", b"[]", b"1", b"\xff\xfe", b'{"prompt": NaN}', b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": ' + b"[" * 100_000, b'{"prompt": ' + b"9" * 5000 + b"}", b'{"prompt": "\xed\xa0\x80"}',
        b'{"prompt": "x", "seed": ' + b"9" * 400 + b"}", b'{"prompt": "x", "top_p": 1e400}',
    ],
    ids=lambda body: repr(body[:30]),
)  # fmt: skip
def test_what_is_no_sound_json_is_refused(served: Any, body: bytes) -> None:
    for content_type in ("application/json", "text/plain"):
        answer = httpx.post(f"{served.url}/v1/completions", content=body, headers={"content-type": content_type})
        assert answer.status_code == 400
        assert answer.json()["error"]["type"] == "invalid_request_error"
