"""What form an answer is asked to have: OpenAI's `response_format`, vLLM's `guided_...` and `structured_outputs`."""

import json
from collections.abc import Iterator
from typing import Any

from prolepsis.engine.grammar import Grammar
from prolepsis.errors import InputError
from prolepsis.serve.schemas import GenerationBody, StructuredOutputs

_SCHEMA = "response_format.json_schema"


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar that a body asks for, if any. Raises InputError that names the field."""
    given = [
        grammar
        for grammar in (
            _of_format(body.response_format),
            _of_schema(body.guided_json, "guided_json"),
            _of_regex(body.guided_regex, "guided_regex"),
            _of_choice(body.guided_choice, "guided_choice"),
            *_of_structured_outputs(body.structured_outputs),
        )
        if grammar is not None
    ]
    if len(given) > 1:
        raise InputError(f"{given[1].source}: {given[0].source} says already what to answer", field=given[1].source)
    return given[0] if given else None


def _of_schema(schema: object, source: str) -> Grammar | None:
    return None if schema is None else Grammar.json_schema(schema, source=source)


def _of_regex(regex: str | None, source: str) -> Grammar | None:
    return None if regex is None else Grammar("regex", regex, source=source)


def _of_choice(texts: list[Any] | None, source: str) -> Grammar | None:
    return None if texts is None else Grammar.choice(texts, source)


def _of_structured_outputs(outputs: StructuredOutputs | None) -> Iterator[Grammar | None]:
    if outputs is not None:
        name = "structured_outputs"
        yield _of_schema(_parsed(outputs.json_), f"{name}.json")
        yield _of_regex(outputs.regex, f"{name}.regex")
        yield _of_choice(outputs.choice, f"{name}.choice")
        yield Grammar("json_object", source=f"{name}.json_object") if outputs.json_object else None


def _parsed(schema: object) -> object:
    """vLLM takes a schema's text, too."""
    if not isinstance(schema, str):
        return schema
    try:
        return json.loads(schema)
    except (ValueError, RecursionError) as error:
        raise InputError(f"structured_outputs.json is no JSON: {error}", field="structured_outputs.json") from None


def _of_format(form: dict[str, Any] | None) -> Grammar | None:
    kind = "text" if form is None else form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar("json_object")
    if kind != "json_schema" or form is None:
        raise InputError(
            f"response_format.type must be text, json_object or json_schema, not {kind!r:.80}",
            field="response_format.type",
        )
    wrapped = form.get("json_schema")
    if not isinstance(wrapped, dict) or wrapped.get("schema") is None:
        raise InputError(f"{_SCHEMA} must be an object with name and schema", field=_SCHEMA)
    strict = wrapped.get("strict")
    if not isinstance(strict, bool | None):
        raise InputError(f"{_SCHEMA}.strict must be true or false, not {strict!r:.80}", field=f"{_SCHEMA}.strict")
    return Grammar.json_schema(wrapped["schema"], strict=bool(strict))
