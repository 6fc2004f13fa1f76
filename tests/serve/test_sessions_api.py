"""/v1/sessions: kept, found again, each key's own; and a store that outlives its server."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from served import serving
from server_process import ServerProcess

from prolepsis.errors import TierError

JSON = {"content-type": "application/json"}
KEYS = ("first-key-0123456789", "second-key-0123456789", "third-key-0123456789")
TALK = [
    {"role": "user", "content": "Once upon a time there was a cache. " * 12},
    {"role": "assistant", "content": "It kept what it had seen. " * 12},
]
GOES_ON = [*TALK, {"role": "user", "content": "And then?"}]


class Client:
    """One key's requests."""

    def __init__(self, url: str, key: str) -> None:
        self._client = httpx.Client(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=60)

    def ask(self, method: str, path: str, status: int = 200, **request: Any) -> Any:
        answer = self._client.request(method, path, **request)
        assert answer.status_code == status, answer.text
        return answer.json()

    def chat(self, messages: list[dict[str, str]], **body: object) -> dict[str, Any]:
        body = {"messages": messages, "max_tokens": 3, "temperature": 0, **body}
        return self.ask("POST", "/v1/chat/completions", json=body)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the store."""
    return tmp_path_factory.mktemp("store")


def _serve(tiny: Path, directory: Path) -> ServerProcess:
    keys = [flag for key in KEYS for flag in ("--api-key", key)]
    return ServerProcess(tiny, "--store", f"disk:{directory}:64MiB", "--drain-timeout", "0", *keys).await_ready()


@pytest.fixture(scope="module")
def server(tiny: Path, directory: Path) -> Iterator[ServerProcess]:
    with _serve(tiny, directory) as server:
        yield server


@pytest.fixture
def first(server: ServerProcess) -> Client:
    return Client(server.url, KEYS[0])


@pytest.fixture
def second(server: ServerProcess) -> Client:
    return Client(server.url, KEYS[1])


def test_a_session_is_kept_listed_inspected_restored_and_deleted(first: Client) -> None:
    saved = first.ask("POST", "/v1/sessions", json={"id": "a talk", "messages": TALK})
    assert saved["tokens"] > 256
    assert 0 < saved["coded_bytes"] < saved["raw_bytes"]
    assert [each["id"] for each in first.ask("GET", "/v1/sessions")["data"]] == ["a talk"]
    whole = first.ask("GET", "/v1/sessions/a%20talk")
    assert whole["messages"] == TALK
    assert sum(segment["tokens"] for segment in whole["segments"]) == saved["tokens"]
    assert first.ask("POST", "/v1/sessions/a%20talk/restore")["tokens"] == saved["tokens"]
    assert first.ask("DELETE", "/v1/sessions/a%20talk")["deleted"]
    assert first.ask("GET", "/v1/sessions")["data"] == []
    for method, path in [("GET", ""), ("DELETE", ""), ("POST", "/restore")]:
        error = first.ask(method, f"/v1/sessions/a%20talk{path}", status=404)["error"]
        assert error["code"] == "session_not_found"


def test_a_prompt_can_be_kept_as_text_and_as_token_ids(first: Client) -> None:
    first.ask("POST", "/v1/sessions", json={"id": "text", "prompt": "Once upon a time"})
    first.ask("POST", "/v1/sessions", json={"id": "ids", "prompt": [5, 6, 7]})
    assert first.ask("GET", "/v1/sessions/text")["prompt"] == "Once upon a time"
    assert first.ask("GET", "/v1/sessions/ids")["tokens"] == 3
    for id_ in ("text", "ids"):
        first.ask("DELETE", f"/v1/sessions/{id_}")


def test_a_prompt_of_another_model_has_no_text_here(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tiny, stores=(f"disk:{tmp_path}:16MiB",)) as served, httpx.Client(base_url=served.url) as client:
        client.post("/v1/sessions", json={"id": "s", "prompt": "Once upon"}).raise_for_status()
        assert client.get("/v1/sessions/s").json()["prompt"] == "Once upon"
        monkeypatch.setattr("prolepsis.serve.sessions.identity", lambda _: {"file": "another"})
        assert client.get("/v1/sessions/s").json()["prompt"] is None


def test_nobody_finds_what_another_key_has_kept_or_computed(first: Client, second: Client) -> None:
    first.ask("POST", "/v1/sessions", json={"id": "mine", "messages": TALK})
    assert second.ask("GET", "/v1/sessions")["data"] == []
    second.ask("GET", "/v1/sessions/mine", status=404)
    second.ask("DELETE", "/v1/sessions/mine", status=404)
    ours = first.chat(GOES_ON)
    theirs = second.chat(GOES_ON)
    assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] > 256
    assert theirs["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert ours["choices"] == theirs["choices"]
    salted = first.chat(GOES_ON, cache_salt="apart")
    assert salted["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.chat(GOES_ON)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    first.ask("DELETE", "/v1/sessions/mine")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "id"),
        ({"id": 1, "prompt": "a"}, "id"),
        ({"id": "", "prompt": "a"}, "id"),
        ({"id": "x" * 65, "prompt": "a"}, "id"),
        ({"id": "../../etc/passwd", "prompt": "a"}, "id"),
        ({"id": "..", "prompt": "a"}, "id"),
        ({"id": "a\x00b", "prompt": "a"}, "id"),
        ({"id": "a\nb", "prompt": "a"}, "id"),
        ({"id": "\ud800", "prompt": "a"}, "id"),
        ({"id": "a"}, "prompt"),
        ({"id": "a", "prompt": "a", "messages": []}, "prompt"),
        ({"id": "a", "prompt": ""}, "prompt"),
        ({"id": "a", "prompt": {}}, "prompt"),
        ({"id": "a", "prompt": [1, True]}, "prompt"),
        ({"id": "a", "prompt": [-1]}, "prompt"),
        ({"id": "a", "prompt": [10**400]}, "prompt"),
        ({"id": "a", "prompt": "word " * 20_000}, "prompt"),
        ({"id": "a", "messages": []}, "messages"),
        ({"id": "a", "messages": "hello"}, "messages"),
        ({"id": "a", "messages": [{"role": "pirate", "content": "a"}]}, "messages[0].role"),
        ({"id": "a", "prompt": "a", "cache_salt": 3}, "cache_salt"),
    ],
)
def test_what_cannot_be_kept_is_refused_by_its_field(first: Client, body: dict[str, object], field: str) -> None:
    error = first.ask("POST", "/v1/sessions", status=400, content=json.dumps(body), headers=JSON)["error"]
    assert error["param"] == field, error
    assert first.ask("GET", "/v1/sessions")["data"] == []


@pytest.mark.parametrize("id_", ["%2e%2e", "..%2f..%2fx", "%00", "a%0ab", "x" * 65, "%ff", "%20"])
def test_ids_in_a_path_are_checked_too(first: Client, id_: str) -> None:
    assert first._client.get(f"/v1/sessions/{id_}").status_code in (400, 404)
    assert first._client.delete(f"/v1/sessions/{id_}").status_code in (400, 404, 405)


def test_what_is_stored_outlives_its_server_however_that_ends(
    tiny: Path, directory: Path, server: ServerProcess, first: Client
) -> None:
    saved = first.ask("POST", "/v1/sessions", json={"id": "kept", "messages": TALK})
    before = first.chat(GOES_ON)
    server.signal(signal.SIGKILL)
    assert server.wait() == -signal.SIGKILL
    with _serve(tiny, directory) as again:
        mine, other = (Client(again.url, key) for key in (KEYS[0], KEYS[2]))  # the second has asked this itself
        assert mine.ask("GET", "/v1/sessions")["data"] == [saved]
        assert mine.ask("GET", "/v1/sessions/kept")["messages"] == TALK
        assert other.ask("GET", "/v1/sessions")["data"] == []
        restored = mine.ask("POST", "/v1/sessions/kept/restore")["restored_tokens"]
        after = mine.chat(GOES_ON)
        assert after["choices"] == before["choices"]
        assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= restored
        assert other.chat(GOES_ON)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_what_a_tier_away_may_have_is_to_be_tried_again(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(*_: object, **__: object) -> None:
        raise TierError("a tier does not answer: try again")

    with serving(tiny, stores=("memory:64MiB",)) as server:
        for verb in ("inspect", "restore", "delete"):
            monkeypatch.setattr(server.state.sessions, verb, fail)
        url = server.url + "/v1/sessions/x"
        answers = [httpx.get(url), httpx.post(url + "/restore"), httpx.delete(url)]
    for answer in answers:
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "store_unavailable"
        assert int(answer.headers["retry-after"]) > 0
