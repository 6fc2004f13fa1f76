"""Tools for models whose chat template knows none: a system prompt, and messages in words, in the form of Hermes 2 Pro
that Qwen uses too."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

CALL, CALL_END = "<tool_call>", "</tool_call>"
_RESPONSE, _RESPONSE_END = "<tool_response>", "</tool_response>"
_PROMPT = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""


def spoken(messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> list[dict[str, Any]]:
    """The conversation with role and content alone: `tools` in the system prompt, calls in the assistant's text, what
    tools gave in the user's."""
    told: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "tool":
            told.append({"role": message["role"], "content": _with_calls(message)})
            continue
        text = f"{_RESPONSE}\n{message['content']}\n{_RESPONSE_END}"
        if told and told[-1].get("answers"):
            told[-1]["content"] += "\n" + text
        else:
            told.append({"role": "user", "content": text, "answers": True})
    for message in told:
        message.pop("answers", None)
    return _with_tools(told, tools) if tools else told


def call_text(name: str, arguments: str) -> str:
    """A call as the model writes it; `arguments` are JSON."""
    return f'{CALL}\n{{"name": {_json(name)}, "arguments": {arguments}}}\n{CALL_END}'


def _with_calls(message: Mapping[str, Any]) -> str:
    parts = [message["content"]] if message["content"] else []
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        parts.append(call_text(call["function"]["name"], arguments if isinstance(arguments, str) else _json(arguments)))
    return "\n".join(parts)


def _with_tools(messages: list[dict[str, Any]], tools: Sequence[Any]) -> list[dict[str, Any]]:
    prompt = _PROMPT.format(tools="\n".join(map(_json, tools)))
    if messages and messages[0]["role"] == "system":
        first = messages[0]["content"]
        return [{"role": "system", "content": f"{first}\n\n{prompt}" if first else prompt}, *messages[1:]]
    return [{"role": "system", "content": prompt}, *messages]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
