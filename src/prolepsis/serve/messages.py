"""Messages of a chat as clients send them, and as chat templates take them."""

import json
from collections.abc import Sequence
from typing import Any

from prolepsis.errors import InputError
from prolepsis.model.chat_template import Message

ROLES = ("system", "developer", "user", "assistant", "tool")
_IGNORED = ("name", "refusal", "annotations", "audio", "reasoning_content")
_OF_ROLE = {"assistant": ("tool_calls",), "tool": ("tool_call_id",)}


def messages_of(messages: Sequence[Any]) -> list[Message]:
    """What a chat template takes of them. Raises InputError that names the place in `messages`."""
    if not messages:
        raise InputError("messages: there must be at least one", field="messages")
    return [_message(f"messages[{index}]", message) for index, message in enumerate(messages)]


def _message(place: str, message: Any) -> Message:
    if not isinstance(message, dict):
        raise InputError(f"{place} must be an object with role and content", field=place)
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{place}.role must be one of {', '.join(ROLES)}, not {role!r:.80}", field=f"{place}.role")
    known = ("role", "content", *_IGNORED, *_OF_ROLE.get(role, ()))
    for field, value in message.items():
        if field not in known and value:
            raise InputError(f"{place}.{field:.80} is not supported", field=f"{place}.{field:.80}")
    calls = message.get("tool_calls") or []
    content = message.get("content")
    # Templates know the older name only.
    made: dict[str, Any] = {"role": "system" if role == "developer" else role}
    made["content"] = "" if content is None and calls else _content(place, content)
    if calls:
        made["tool_calls"] = _calls(f"{place}.tool_calls", calls)
    for field in ("tool_call_id", "name") if role == "tool" else ():
        if message.get(field) is not None:
            made[field] = _text(f"{place}.{field}", message[field])
    return made


def _calls(place: str, calls: Any) -> list[dict[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{place} must be a list", field=place)
    return [_call(f"{place}[{index}]", call) for index, call in enumerate(calls)]


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise InputError(f'{place} must be {{"id": ..., "type": "function", "function": ...}}', field=place)
    name = _text(f"{place}.function.name", function.get("name"))
    arguments = _text(f"{place}.function.arguments", function.get("arguments"))
    made = {"type": "function", "function": {"name": name, "arguments": _parsed(arguments)}}
    return made if call.get("id") is None else {"id": _text(f"{place}.id", call["id"])} | made


def _parsed(arguments: str) -> Any:
    """Templates take an object. What a model did not write to its end stays a text."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _text(place: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(f"{place} must be a text", field=place)
    return value


def _content(place: str, content: Any) -> str:
    """A text, or the texts of a list of parts, a line each."""
    where = f"{place}.content"
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise InputError(f"{where} must be a text or a list of parts", field=where)
    return "\n".join(_part(f"{where}[{index}]", part) for index, part in enumerate(content))


def _part(place: str, part: Any) -> str:
    if not isinstance(part, dict) or part.get("type") != "text":
        raise InputError(f'{place} must be {{"type": "text", "text": ...}}: this server reads text only', field=place)
    return _text(f"{place}.text", part.get("text"))
