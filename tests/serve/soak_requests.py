"""Requests for the soak, each with one answer only: greedy, or with a seed."""

import json
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any, NamedTuple

import httpx

_TEXT = "one two three four five six seven once upon a time there was the cache of all that you know"
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["a", "b"]}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": _SCHEMA}}


class Asked(NamedTuple):
    """A request: where it goes, and its body."""

    path: str
    body: dict[str, Any]

    @property
    def can_stream(self) -> bool:
        """Whether the answer can come piece by piece."""
        return "best_of" not in self.body


Answer = list[dict[str, Any]]
"""What was said in each choice, without what differs from one time to the next: ids, and how the text was cut."""


def completions(count: int, seed: int) -> Iterator[Asked]:
    """Text completions of all kinds; many begin alike."""
    source = random.Random(seed)
    beginnings = [_text(source, 300) for _ in range(4)]
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"seed": 7, "temperature": 1.1},
        {"seed": 8, "n": 3},
        {"seed": 9, "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"seed": 10, "presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1},
        {"temperature": 0, "logprobs": 3},
        {"seed": 11, "n": 2, "best_of": 4},
        {"seed": 12, "stop": ["e", "zz"]},
        {"temperature": 0, "logit_bias": {"40": 5, "41": -100}},
    )
    for number in range(count):
        prompt = _text(source, source.choice((3, 20, 120, 300)))
        if source.random() < 0.5:
            prompt = f"{source.choice(beginnings)} {prompt}"
        fields = kinds[number % len(kinds)]
        yield Asked(
            "/v1/completions", {"prompt": prompt, "max_tokens": source.randint(1, 80), "ignore_eos": True, **fields}
        )


def chats(count: int, seed: int) -> Iterator[list[dict[str, Any]]]:
    """Beginnings of conversations: messages, of which the last is the user's."""
    source = random.Random(seed)
    systems = [_text(source, 200) for _ in range(3)]
    for _ in range(count):
        yield [
            {"role": "system", "content": source.choice(systems)},
            {"role": "user", "content": _text(source, source.randint(2, 60))},
        ]


def turn(messages: list[dict[str, Any]], number: int) -> Asked:
    """The request for the answer to a conversation."""
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"seed": 1, "logprobs": True, "top_logprobs": 2},
        {"seed": 2, "n": 2},
        {"seed": 3, "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA}}},
        {"seed": 4, "tools": [_TOOL], "tool_choice": "required"},
        {"seed": 5, "tools": [_TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}},
    )
    fields = kinds[number % len(kinds)]
    return Asked("/v1/chat/completions", {"messages": messages, "max_tokens": 60, **fields})


def next_message(number: int) -> dict[str, Any]:
    """What the user says next."""
    return {"role": "user", "content": _text(random.Random(number), 30)}


BAD: tuple[tuple[str, Any], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b"\xff\xfe"),
    ("/v1/completions", []),
    ("/v1/completions", {}),
    ("/v1/completions", {"prompt": "x", "temperature": -1}),
    ("/v1/completions", {"prompt": "x", "n": 0}),
    ("/v1/completions", {"prompt": [10**9]}),
    ("/v1/completions", {"prompt": "x", "max_tokens": "many"}),
    ("/v1/completions", {"prompt": "word " * 5000}),
    ("/v1/completions", {"prompt": "x", "stop": [""]}),
    ("/v1/completions", {"prompt": "x", "model": "another"}),
    ("/v1/chat/completions", {"messages": []}),
    ("/v1/chat/completions", {"messages": [{"role": "nobody", "content": "x"}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": 7}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "functions": [{}]}),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": {"type": "no"}}},
        },
    ),
    ("/v1/nothing", {}),
    ("/v1/sessions", {"id": "../x", "prompt": "x"}),
    ("/v1/sessions", {"id": "x"}),
)
"""Requests that are refused, all with a status that no client tries again."""


def whole(body: dict[str, Any]) -> Answer:
    """What an answer in one piece says."""
    return [_told(choice, choice.get("message") or {"text": choice["text"]}) for choice in body["choices"]]


async def streamed(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The chunks of a stream. Raises AssertionError where one is an error, or it does not end as it should."""
    last = ""
    async for line in answer.aiter_lines():
        if line and not line.startswith(":"):  # a comment keeps the connection open
            assert line.startswith("data: "), line
            last = line[6:]
            if last != "[DONE]":
                chunk = json.loads(last)
                assert "error" not in chunk, chunk
                yield chunk
    assert last == "[DONE]", last


class Assembled:
    """What the chunks of a stream say together."""

    def __init__(self) -> None:
        self._choices: dict[int, dict[str, Any]] = {}
        self._messages: dict[int, dict[str, Any]] = {}

    def add(self, chunk: dict[str, Any]) -> None:
        """One more."""
        for choice in chunk["choices"]:
            index = choice["index"]
            message = self._messages.setdefault(index, {"text": "", "calls": {}})
            delta = choice.get("delta") or {"content": choice.get("text")}
            message["text"] += delta.get("content") or ""
            for call in delta.get("tool_calls") or ():
                known = message["calls"].setdefault(call["index"], ["", ""])
                known[0] += call["function"].get("name") or ""
                known[1] += call["function"].get("arguments") or ""
            self._choices[index] = choice

    @property
    def answer(self) -> Answer:
        """As `whole` tells it."""
        return [
            {
                "text": self._messages[index]["text"],
                "calls": list(self._messages[index]["calls"].values()),
                "finish_reason": self._choices[index]["finish_reason"],
            }
            for index in sorted(self._choices)
        ]


def _told(choice: dict[str, Any], message: dict[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls") or ()
    return {
        "text": message.get("content") or message.get("text") or "",
        "calls": [[call["function"]["name"], call["function"]["arguments"]] for call in calls],
        "finish_reason": choice["finish_reason"],
    }


def _text(source: random.Random, words: int) -> str:
    return " ".join(source.choices(_TEXT.split(), k=words))
