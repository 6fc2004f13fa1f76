"""What a conversation may be, before anything is made of it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prolepsis.errors import InputError

MAX_CONVERSATION = 1 << 23
MAX_DEPTH = 64
VALUE_SIZE = 16
"""Characters that a value within tools and tool calls counts as, beside those of its text."""

_TEXTS = ("role", "content", "name", "tool_call_id")


def check_messages(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None = None) -> int:
    """The characters of a conversation. Raises InputError unless each message has a string `role` and a string
    `content`, beside these nothing but `name`, `tool_call_id` (strings) and `tool_calls`, and unless all that is of a
    bounded size."""
    total = 0
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise InputError(f"message {index} is a {type(message).__name__}, expected role and content")
        for field in _TEXTS:
            if field in ("role", "content") or field in message:
                if not isinstance(message.get(field), str):
                    raise InputError(f"message {index}: {field!r} must be a string, got {message.get(field)!r:.80}")
                total += len(message[field])
        unknown = sorted(str(field) for field in message if field not in (*_TEXTS, "tool_calls"))
        if unknown:
            raise InputError(
                f"message {index} has the unknown field {unknown[0]!r:.80}; known are {', '.join(_TEXTS)}, tool_calls"
            )
        _check_calls(message.get("tool_calls"), f"message {index}")
        total += _size(message.get("tool_calls"), f"message {index}: tool_calls")
    total += _size(tools, "tools")
    if total > MAX_CONVERSATION:
        raise InputError(f"the conversation has {total} characters, at most {MAX_CONVERSATION} are allowed")
    return total


def strings(value: Any) -> Iterator[str]:
    """Every text within a JSON value, the names of fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from strings(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from strings(each)


def _check_calls(calls: Any, where: str) -> None:
    if calls is None:
        return
    if not isinstance(calls, list | tuple):
        raise InputError(f"{where}: 'tool_calls' must be a list, got {calls!r:.80}")
    for call in calls:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(function.get("name"), str) and "arguments" in function):
            raise InputError(f"{where}: each of 'tool_calls' must have a function with name and arguments")


def _size(value: Any, where: str) -> int:
    """Characters of a JSON value. Raises InputError for one that is none, or too deep."""
    size = 0
    pending = [] if value is None else [(value, 1)]
    while pending:
        each, depth = pending.pop()
        size += VALUE_SIZE
        if depth > MAX_DEPTH:
            raise InputError(f"{where} is nested deeper than {MAX_DEPTH} levels")
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            if not all(isinstance(key, str) for key in each):
                raise InputError(f"{where} is no JSON: a field's name is not a string")
            size += sum(map(len, each))
            pending += [(child, depth + 1) for child in each.values()]
        elif isinstance(each, list | tuple):
            pending += [(child, depth + 1) for child in each]
        elif not (each is None or isinstance(each, bool | int | float)):
            raise InputError(f"{where} is no JSON: it holds a {type(each).__name__}")
    return size
