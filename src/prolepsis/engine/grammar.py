"""Output that follows a grammar: a JSON Schema, a regular expression, a choice of texts, or a grammar in Lark's syntax.

Whoever asks is not trusted: what is compiled (`matching`) is bounded here before.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from prolepsis.errors import InputError
from prolepsis.model.tokenizer import require_encodable

Kind = Literal["json_object", "json_schema", "regex", "choice", "lark"]

MAX_TEXT = 1 << 18
MAX_NODES = 1 << 13
"""Most values in a schema, those in lists and objects each counted."""
MAX_PROPERTIES = 400
"""Most entries in one object of a schema: 500 properties are more than llguidance follows at a place."""
MAX_DEPTH = 64
MAX_PATTERNS = 1 << 12
"""Most characters of regular expressions, all together."""

# Between the parts of a JSON text: without a bound, small models write spaces and new lines without end.
_SPACE, _SPACE_OR_LINE = " ?", "( |\\n[ ]{0,40})?"


@dataclass(frozen=True)
class Grammar:
    """What an output has to be. Raises InputError, which names `source`, for a text that is no grammar or too large.

    kind: `json_object` (any), `json_schema`, `regex`, `choice` (a JSON list of texts) or `lark`.
    strict: a schema's keywords that are not supported are an error; else they are left out, and `oneOf` is `anyOf`.
    source: the request's field that the grammar comes from.
    """

    kind: Kind
    text: str = ""
    strict: bool = True
    source: str = field(default="response_format", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise fault(self.source, f"no kind of grammar is called {self.kind!r:.80}; there are {_KINDS}")
        if not isinstance(self.text, str):
            raise fault(self.source, f"a grammar is a text, not a {type(self.text).__name__}")
        try:
            require_encodable(self.text)
        except InputError as error:
            raise fault(self.source, str(error)) from None
        most = MAX_PATTERNS if self.kind == "regex" else MAX_TEXT
        if len(self.text) > most:
            raise fault(self.source, f"the grammar has {len(self.text)} characters, at most {most} are allowed")

    @staticmethod
    def json_schema(schema: object, *, strict: bool = True, source: str = "response_format") -> "Grammar":
        """JSON that a schema, given as a parsed value, describes. Raises InputError for one that is too large."""
        check_schema(schema, source)
        return Grammar("json_schema", json.dumps(schema), strict, source)

    @staticmethod
    def choice(texts: Sequence[str], source: str = "response_format") -> "Grammar":
        """One of several texts. Raises InputError for none at all, or for what is no text."""
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise fault(source, "a choice needs at least one text, and none that is empty")
        return Grammar("choice", json.dumps(list(texts)), True, source)


_KINDS = ", ".join(get_args(Kind))


def check_schema(schema: object, source: str) -> None:
    """Raise InputError, which names `source`, for what is no schema, or too large to be compiled."""
    if not isinstance(schema, dict | bool):
        raise fault(source, f"a JSON Schema is an object, not a {type(schema).__name__}")
    nodes = patterns = 0
    pending: list[tuple[object, int]] = [(schema, 1)]
    while pending:
        value, depth = pending.pop()
        if not isinstance(value, dict | list):
            continue
        nodes += len(value)
        if isinstance(value, dict):
            patterns += _pattern_length(value)
        for limit, size, what in (
            (MAX_DEPTH, depth, "levels"),
            (MAX_PROPERTIES, len(value) if isinstance(value, dict) else 0, "entries in an object"),
            (MAX_NODES, nodes, "values"),
            (MAX_PATTERNS, patterns, "characters of regular expressions"),
        ):
            if size > limit:
                raise fault(source, f"the schema is too large: it has {size} {what}, at most {limit} are allowed")
        pending += [(child, depth + 1) for child in (value.values() if isinstance(value, dict) else value)]


def embedded(schema: object, *, strict: bool, lines: bool = True) -> str:
    """A schema as llguidance takes it, with what it has no say in. strict: as of `Grammar`. lines: whether the JSON may
    have several."""
    options = {
        "whitespace_pattern": _SPACE_OR_LINE if lines else _SPACE,
        "lenient": not strict,
        "coerce_one_of": not strict,
    }
    if schema is True:
        schema = {}
    return json.dumps(schema | {"x-guidance": options} if isinstance(schema, dict) else schema)


def parsed_schema(grammar: Grammar) -> object:
    """The schema of a grammar of that kind. Raises InputError where it is none, or too large."""
    try:
        schema = json.loads(grammar.text)
    except (ValueError, RecursionError) as error:
        raise fault(grammar.source, f"the schema is not JSON: {error}") from None
    check_schema(schema, grammar.source)
    return schema


def _pattern_length(schema: dict[str, Any]) -> int:
    pattern, properties = schema.get("pattern"), schema.get("patternProperties")
    keys = sum(map(len, properties)) if isinstance(properties, dict) else 0
    return keys + (len(pattern) if isinstance(pattern, str) else 0)


def fault(source: str, message: str) -> InputError:
    """The error of a grammar that comes from the field `source` of a request."""
    return InputError(f"{source}: {message}", field=source)
