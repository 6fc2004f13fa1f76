"""How models of the known families write tool calls, and grammars that make them write these."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prolepsis.engine.grammar import Grammar, embedded
from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.model.tool_prompt import CALL, CALL_END
from prolepsis.serve.tool_parser import ARGS, PYTHON_TAG, TOOL_CALLS, FormatName

MAX_CALLS = 16
"""Most calls that a grammar allows in one answer."""

_MARKERS: dict[FormatName, str] = {"hermes": CALL, "llama3": PYTHON_TAG, "mistral": TOOL_CALLS}
_BETWEEN: dict[FormatName, str] = {"hermes": '"\\n"', "llama3": '"; "', "mistral": ""}
# What may be said instead of a call, or before one.
_TEXTS: dict[FormatName, str] = {
    "hermes": f"/(?s:.*)/ & ~/(?s:.*){CALL}(?s:.*)/",
    "llama3": "/([^{ \\n](?s:.*))?/",
    "mistral": "/(?s:.*)/ & ~/(?s:.*)\\[TOOL_CALLS\\](?s:.*)/",
}


@dataclass(frozen=True)
class Tool:
    """A function that a model may call. strict: its arguments have to follow `parameters`, a JSON Schema."""

    name: str
    parameters: dict[str, Any]
    strict: bool


@dataclass(frozen=True)
class ToolFormat:
    """How one model writes calls. has_args: of Mistral's, the newer form."""

    name: FormatName
    tokenizer: Tokenizer
    has_args: bool = False

    @property
    def spells_control_tokens(self) -> bool:
        """Whether calls can be told only by a control token's name in the text."""
        return any(marker in self.tokenizer.special_tokens for marker in (_MARKERS[self.name], CALL_END, ARGS))

    def new_id(self) -> str:
        """An id for a call. Templates of Mistral refuse any but nine letters or digits."""
        return uuid4().hex[:9] if self.name == "mistral" else f"call_{uuid4().hex[:24]}"

    def grammar(self, tools: Sequence[Tool], *, most_calls: int, otherwise: str | None = None) -> Grammar:
        """Calls of `tools`. otherwise: what may come instead, in Lark's syntax; "" is text, which may come before the
        calls too.

        Raises InputError, which names `tools`, where it would be too large.
        """
        array = self.name == "mistral" and not self.has_args
        between = '", "' if array else _BETWEEN[self.name]
        calls = f"call ({between} call){{0,{most_calls - 1}}}" if most_calls > 1 else "call"
        if array:
            calls = f'{self._literal(TOOL_CALLS)} " [" {calls} "]"'
        before = "text " if otherwise == "" and self.name != "llama3" else ""
        start = f"start: {before}calls"
        if otherwise is not None:
            start += f" | {otherwise or 'text'}"
        rules = [start, f"calls: {calls}", "call: " + " | ".join(f"call_{index}" for index in range(len(tools)))]
        rules += [f"call_{index}: {self._call(tool)}" for index, tool in enumerate(tools)]
        rules += ["text: TEXT", f"TEXT: {_TEXTS[self.name]}"] if otherwise == "" else []
        return Grammar("lark", "\n".join(rules), source="tools")

    def _call(self, tool: Tool) -> str:
        arguments = f"%json {embedded(tool.parameters, strict=tool.strict, lines=False)}"
        name = json.dumps(tool.name)
        if self.name == "mistral" and self.has_args:
            return f"{self._literal(TOOL_CALLS)} {name} {self._literal(ARGS)} {arguments}"
        key = "parameters" if self.name == "llama3" else "arguments"
        opening = json.dumps(f'{{"name": {name}, "{key}": ')
        if self.name == "hermes":
            opening = f'{self._literal(CALL)} "\\n" {opening}'
            return f'{opening} {arguments} "}}\\n" {self._literal(CALL_END)}'
        return f'{opening} {arguments} "}}"'

    def _literal(self, text: str) -> str:
        token = self.tokenizer.special_tokens.get(text)
        return json.dumps(text) if token is None else f"<[{token}]>"


def tool_format(template: ChatTemplate, tokenizer: Tokenizer) -> ToolFormat:
    """How a model with that chat template writes calls; as Hermes does where it knows nothing of tools."""
    source = template.source if template.uses_tools else ""
    if TOOL_CALLS in source:
        return ToolFormat("mistral", tokenizer, ARGS in source)
    if CALL not in source and (PYTHON_TAG in source or '"parameters"' in source):
        return ToolFormat("llama3", tokenizer)
    return ToolFormat("hermes", tokenizer)
