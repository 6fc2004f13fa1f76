"""Messages of a chat as clients send them, and as chat templates take them."""

from collections.abc import Sequence
from typing import Any

from prolepsis.errors import InputError
from prolepsis.model.chat_template import Message

ROLES = ("system", "developer", "user", "assistant")
_IGNORED = ("name", "refusal", "annotations", "audio", "reasoning_content")


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
    for field, value in message.items():
        if field not in ("role", "content", *_IGNORED) and value:
            raise InputError(f"{place}.{field:.80} is not supported", field=f"{place}.{field:.80}")
    # Templates know the older name only.
    return {"role": "system" if role == "developer" else role, "content": _content(place, message.get("content"))}


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
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{place}.text must be a text", field=f"{place}.text")
    return text
