"""What the server says of itself, and its tokenizer."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from asgi_client import error_of

from prolepsis import LLM
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState

CHAT: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
def post(served: Any) -> Any:
    return lambda path, body: httpx.post(f"{served.url}{path}", json=body)


def test_the_model_is_listed_under_its_name(client: openai.OpenAI, tiny_llm: LLM) -> None:
    [model] = client.models.list()
    assert (model.id, model.object, model.owned_by) == ("tiny", "model", "prolepsis")
    assert model.model_extra == {"max_model_len": tiny_llm.max_context}
    assert client.models.retrieve("tiny") == model


ASKED: list[Callable[[openai.OpenAI], Any]] = [
    lambda client: client.models.retrieve("org/other"),
    lambda client: client.completions.create(model="org/other", prompt="x"),
    lambda client: client.chat.completions.create(model="org/other", messages=CHAT),
]


@pytest.mark.parametrize("ask", ASKED)
def test_another_model_is_not_there(client: openai.OpenAI, ask: Callable[[openai.OpenAI], Any]) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client)
    assert (caught.value.param, caught.value.code) == ("model", "model_not_found")


def test_the_name_is_the_files_unless_another_is_given(tmp_path: Path) -> None:
    names = ("smollm2:135m", "org/model", f"{tmp_path}/some.model-Q4.gguf", str(tmp_path))
    served = [ServerState(ServeOptions(model=name)).model_name for name in names]
    assert served == ["smollm2:135m", "org/model", "some.model-Q4", tmp_path.name]
    assert ServerState(ServeOptions(model="x.gguf", served_model_name="y")).model_name == "y"


def test_health_and_version(served: Any) -> None:
    assert httpx.get(f"{served.url}/health").json() == {"status": "ready"}
    assert set(httpx.get(f"{served.url}/version").json()) == {"version"}


def test_text_to_tokens_and_back(post: Any, tiny_llm: LLM) -> None:
    told = post("/tokenize", {"prompt": "def main"}).json()
    assert told["tokens"] == tiny_llm.encode("def main")
    assert (told["count"], told["max_model_len"]) == (len(told["tokens"]), tiny_llm.max_context)
    assert post("/detokenize", {"tokens": told["tokens"]}).json() == {"prompt": "def main"}
    assert post("/tokenize", {"prompt": "x" * 5000, "model": "tiny"}).json()["count"] > tiny_llm.max_context


def test_messages_to_tokens(post: Any, tiny_llm: LLM) -> None:
    told = post("/tokenize", {"messages": CHAT}).json()
    assert told["tokens"] == tiny_llm.encode_chat(CHAT)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": CHAT}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x " * 1_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x " * 1_000_000}]}, "messages"),
        ("/detokenize", {"tokens": [5000]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [1.5]}, "tokens[0]"),
    ],
)
def test_a_bad_field_is_named(post: Any, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(path, body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_what_is_not_there_is_named(served: Any, post: Any) -> None:
    long = "/v1/" + "x" * 5000
    get = httpx.get(f"{served.url}/v1/completions")
    for answer, status, part in (
        (post("/v1/embeddings", {}), 404, "'/v1/embeddings' here (POST)"),
        (get, 405, "'/v1/completions' does not take GET: use POST"),
        (post(long, {}), 404, long[:80]),
    ):
        assert answer.status_code == status
        error = error_of(answer)
        assert part in error["message"]
        assert len(error["message"]) < 200


def test_a_body_that_is_not_sent_as_json_is_told_how(served: Any) -> None:
    for sent in ({"content": b'{"prompt": "x"}'}, {"json": [1]}, {}):
        answer = httpx.post(f"{served.url}/tokenize", **sent)
        assert answer.status_code == 400
        assert "Content-Type: application/json" in answer.json()["error"]["message"]
