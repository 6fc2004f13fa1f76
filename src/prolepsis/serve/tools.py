"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat: what the model is told, and must write; what it calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from prolepsis.engine.grammar import Grammar, embedded
from prolepsis.engine.llm import LLM
from prolepsis.errors import InputError
from prolepsis.serve.response_format import grammar_of
from prolepsis.serve.schemas import ChatBody
from prolepsis.serve.tool_formats import MAX_CALLS, Tool, ToolFormat, tool_format
from prolepsis.serve.tool_parser import NAME, ToolParser
from prolepsis.serve.tool_reader import Arguments, Call, Event, Text

MAX_TOOLS = 128


class FunctionPiece(msgspec.Struct, omit_defaults=True):
    """What is new of a called function."""

    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class CallPiece(msgspec.Struct, omit_defaults=True):
    """What is new of a call: at first its id, type and name with empty arguments, then more of these."""

    index: int | msgspec.UnsetType = msgspec.UNSET
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: Literal["function"] | msgspec.UnsetType = msgspec.UNSET
    function: FunctionPiece | msgspec.UnsetType = msgspec.UNSET


@dataclass(frozen=True)
class Answering:
    """How the answers of one request come about.

    tools: what the chat template gets. grammar: what the answers have to be. form: how calls are written; None where
    none may be made.
    """

    tools: list[dict[str, Any]] | None
    grammar: Grammar | None
    form: ToolFormat | None
    names: frozenset[str] = frozenset()
    most_calls: int | None = None

    @property
    def skip_special_tokens(self) -> bool:
        """What `SamplingParams` are to have."""
        return self.form is None or not self.form.spells_control_tokens

    def new_parser(self) -> ToolParser:
        """Finds the calls of one answer, where there may be any."""
        assert self.form is not None
        return ToolParser(self.form.name, self.names, self.most_calls)


class MessageOutput:
    """Turns the text of one answer into pieces of its message."""

    def __init__(self, answering: Answering) -> None:
        self._form = answering.form
        self._parser = None if answering.form is None else answering.new_parser()

    def push(self, text: str, *, ended: bool) -> list[str | CallPiece]:
        """What is new with more text: content, and pieces of calls. ended: no more comes."""
        if self._parser is None:
            return [text] if text else []
        events = self._parser.push(text)
        if ended:
            events += self._parser.finish()
        return [self._piece(event) for event in events]

    @property
    def has_calls(self) -> bool:
        """Whether the model has called a function: the answer ends with "tool_calls" then, unless it was cut off."""
        return self._parser is not None and self._parser.num_calls > 0

    def _piece(self, event: Event) -> str | CallPiece:
        if isinstance(event, Text):
            return event.text
        if isinstance(event, Arguments):
            return CallPiece(event.number, function=FunctionPiece(arguments=event.text))
        assert self._form is not None
        return CallPiece(event.number, self._form.new_id(), "function", FunctionPiece(event.name, ""))


def whole_message(answering: Answering, text: str) -> tuple[str | None, list[CallPiece]]:
    """The content of an answer, None where it is all calls, and the calls, each whole."""
    if answering.form is None:
        return text, []
    content, names, arguments = "", list[str](), list[str]()
    parser = answering.new_parser()
    for event in (*parser.push(text), *parser.finish()):
        if isinstance(event, Text):
            content += event.text
        elif isinstance(event, Call):
            names.append(event.name)
            arguments.append("")
        else:
            arguments[event.number] += event.text
    calls = [
        CallPiece(id=answering.form.new_id(), type="function", function=FunctionPiece(name, text))
        for name, text in zip(names, arguments, strict=True)
    ]
    return content if content or not calls else None, calls


def answering_of(body: ChatBody, llm: LLM) -> Answering:
    """What a body asks for. Raises InputError that names the field."""
    content, tools = grammar_of(body), _tools(body.tools)
    chosen = _chosen(body.tool_choice, tools)
    if not tools or chosen is None:
        return Answering(None, content, None)
    form = tool_format(llm.chat_template, llm.tokenizer)
    most_calls = MAX_CALLS if body.parallel_tool_calls and not isinstance(body.tool_choice, dict) else 1
    grammar = None
    if body.tool_choice == "required" or isinstance(body.tool_choice, dict):
        grammar = form.grammar(chosen, most_calls=most_calls)
    elif content is not None:
        grammar = form.grammar(chosen, most_calls=most_calls, otherwise=_in_lark(content))
    elif any(tool.strict for tool in chosen):
        grammar = form.grammar(chosen, most_calls=most_calls, otherwise="")
    return Answering(
        told_tools(body.tools), grammar, form, frozenset(tool.name for tool in tools), None if most_calls > 1 else 1
    )


def told_tools(tools: Sequence[Any]) -> list[dict[str, Any]] | None:
    """Tools as chat templates know them, None for none. Raises InputError that names the field."""
    return [_told(tool) for tool in tools] if _tools(tools) else None


def _tools(tools: Sequence[Any]) -> list[Tool]:
    if len(tools) > MAX_TOOLS:
        raise InputError(f"tools: there are {len(tools)}, at most {MAX_TOOLS} are allowed", field="tools")
    return [_tool(f"tools[{index}]", tool) for index, tool in enumerate(tools)]


def _tool(place: str, tool: Any) -> Tool:
    if not isinstance(tool, dict) or tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
        raise InputError(f'{place} must be {{"type": "function", "function": {{"name": ...}}}}', field=place)
    function = tool["function"]
    name, parameters, strict = function.get("name"), function.get("parameters"), function.get("strict")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InputError(
            f"{place}.function.name must be of 1 to 128 letters, digits or _ . : / -, not {name!r:.80}",
            field=f"{place}.function.name",
        )
    if not isinstance(parameters, dict | None):
        raise InputError(f"{place}.function.parameters must be a JSON Schema", field=f"{place}.function.parameters")
    if not isinstance(strict, bool | None):
        raise InputError(f"{place}.function.strict must be true or false", field=f"{place}.function.strict")
    if not isinstance(function.get("description"), str | None):
        raise InputError(f"{place}.function.description must be a text", field=f"{place}.function.description")
    return Tool(name, parameters or {"type": "object", "properties": {}, "additionalProperties": False}, bool(strict))


def _told(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    kept = {name: function[name] for name in ("name", "description", "parameters") if function.get(name) is not None}
    return {"type": "function", "function": kept}


def _chosen(choice: str | dict[str, Any], tools: Sequence[Tool]) -> list[Tool] | None:
    """The tools that may be called; None where none may."""
    if choice in ("none", "auto"):
        return None if choice == "none" else list(tools)
    if not tools:
        raise InputError("tool_choice needs tools: give some, or leave it out", field="tool_choice")
    if choice == "required":
        return list(tools)
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        raise InputError(
            'tool_choice must be none, auto, required or {"type": "function", "function": {"name": ...}}',
            field="tool_choice",
        )
    found = [tool for tool in tools if tool.name == name]
    if not found:
        raise InputError(f"tool_choice names {name!r:.80}, which is not among tools", field="tool_choice")
    return found[:1]


def _in_lark(content: Grammar) -> str:
    """A grammar for content, as part of another."""
    if content.kind == "json_object":
        return f"%json {embedded({'type': 'object'}, strict=True)}"
    if content.kind == "json_schema":
        return f"%json {embedded(msgspec.json.decode(content.text), strict=content.strict)}"
    raise InputError(f"{content.source} and tools exclude each other", field=content.source)
