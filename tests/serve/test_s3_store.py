"""A server whose only tier is a bucket: what one process stored, the next one restores."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import httpx
import pytest
from s3_server import S3Server
from server_process import ServerProcess

TALK = [{"role": "user", "content": "Once upon a time there was a bucket that kept what it had been given. " * 80}]
SECRET = "not-to-be-shown"


@pytest.fixture
def bucket() -> Iterator[S3Server]:
    server = S3Server()
    with mock.patch.dict(os.environ, server.environment):
        server.put("bucket")
        yield server
    server.kill()


def _client(server: ServerProcess) -> httpx.Client:
    return httpx.Client(base_url=server.url, timeout=300)


@pytest.mark.nightly
def test_a_conversation_and_a_session_outlive_the_server(default_model: Path, bucket: S3Server) -> None:
    serve = (default_model, "--store", "s3://bucket/prefix")
    body = {"messages": TALK, "max_tokens": 24, "temperature": 0, "seed": 1}
    with ServerProcess(*serve).await_ready() as server, _client(server) as client:
        first = client.post("/v1/chat/completions", json=body).json()
        saved = client.post("/v1/sessions", json={"id": "talk", "messages": TALK}).json()
        assert saved["tokens"] > 1000
    assert bucket.get("bucket?list-type=2").count(b"<Key>prefix/kv/") == 5  # as many as an answer lists
    with ServerProcess(*serve).await_ready() as server, _client(server) as client:
        again = client.post("/v1/chat/completions", json=body).json()
        assert again["choices"] == first["choices"]
        restore = again["prolepsis"]["choices"][0]["restore"]
        assert (restore["reason"], restore["tier"]) == ("restore_is_faster", "remote")
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == restore["restored_tokens"] > 1000
        assert [each["id"] for each in client.get("/v1/sessions").json()["data"]] == ["talk"]
        assert client.post("/v1/sessions/talk/restore").json()["tokens"] == saved["tokens"]
        shown = client.get("/metrics").text + client.get("/v1/engine").text
        assert re.search(r'^prolepsis:store_tier_available\{.*tier="remote".*\} 1.0$', shown, re.MULTILINE)
        assert "s3:" not in shown
        assert client.delete("/v1/sessions/talk").json()["deleted"]
        assert client.get("/v1/sessions").json()["data"] == []
    assert SECRET not in server.said + shown
