"""What every answer has: an id, the number of tokens, and how it came about."""

import time
from collections.abc import Sequence
from uuid import uuid4

import msgspec
from fastapi import Response

from prolepsis.engine.completion import Completion
from prolepsis.serve.generation import Generation


class Head(msgspec.Struct):
    """How an answer, or each chunk of one, begins."""

    id: str
    object: str
    created: int
    model: str


class PromptTokensDetails(msgspec.Struct):
    """Tokens of prompts whose K and V were there already."""

    cached_tokens: int


class Usage(msgspec.Struct):
    """Tokens of a request. Prompts count once, however many completions they have."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


def new_head(prefix: str, kind: str, model: str) -> Head:
    """A new answer of that object type."""
    return Head(f"{prefix}-{uuid4().hex}", kind, int(time.time()), model)


def usage_of(generation: Generation) -> Usage:
    """So far."""
    prompt, cached, output = generation.tokens()
    return Usage(prompt, output, prompt + output, PromptTokensDetails(cached))


def details_of(completions: Sequence[Completion]) -> dict[str, object]:
    """The field `prolepsis`, which OpenAI's answers do not have: for each choice its seed and how it fared."""
    return {
        "choices": [
            {
                "index": index,
                "seed": completion.seed,
                "evicted_tokens": completion.evicted_tokens,
                **completion.statistics.summary(),
            }
            for index, completion in enumerate(completions)
        ]
    }


def json_response(answer: object) -> Response:
    """An answer as JSON."""
    return Response(msgspec.json.encode(answer), media_type="application/json")
