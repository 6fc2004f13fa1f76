"""What form an answer is asked to have: OpenAI's `response_format`, and vLLM's `guided_...` fields."""

from typing import Any

from prolepsis.engine.grammar import Grammar
from prolepsis.errors import InputError
from prolepsis.serve.schemas import GenerationBody

_SCHEMA = "response_format.json_schema"


def grammar_of(body: GenerationBody) -> Grammar | None:
    """The grammar that a body asks for, if any. Raises InputError that names the field."""
    given = [
        grammar
        for grammar in (
            _of_format(body.response_format),
            None if body.guided_json is None else Grammar.json_schema(body.guided_json, source="guided_json"),
            None if body.guided_regex is None else Grammar("regex", body.guided_regex, source="guided_regex"),
            None if body.guided_choice is None else Grammar.choice(body.guided_choice, "guided_choice"),
        )
        if grammar is not None
    ]
    if len(given) > 1:
        raise InputError(f"{given[1].source}: {given[0].source} says already what to answer", field=given[1].source)
    return given[0] if given else None


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
