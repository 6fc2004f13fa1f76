"""How models of the known families write tool calls, and grammars that make them write these."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from prolepsis.engine.grammar import Grammar, check_schema, embedded
from prolepsis.model.chat_template import ChatTemplate
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.model.tool_prompt import CALL, CALL_END
from prolepsis.serve.tool_parser import ARGS, PYTHON_TAG, TOOL_CALLS, FormatName

MAX_CALLS = 16
"""Most calls that a grammar allows in one answer."""

_MARKERS: dict[FormatName, str] = {"hermes": CALL, "llama3": PYTHON_TAG, "mistral": TOOL_CALLS}
# Text that is no call: of Llama 3, whose calls have no mark, it does not begin like one.
_TEXT, _TEXT_OF_LLAMA3 = "/(?s:.*)/", "/([^{ \\n](?s:.*))?/"


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
        check_schema({"tools": [tool.parameters for tool in tools]}, "tools")
        marked = self.name != "llama3"
        mark = self._literal(_MARKERS[self.name]) if marked else ""
        before, between, after = self._around(mark)
        more = f" ({between} call){{0,{most_calls - 1}}}" if most_calls > 1 else ""
        lead, rules = self._lead(mark) if otherwise == "" else (mark, [])
        start = f"start: {lead} {before} call{more} {after}"
        rules.append(start if otherwise is None else f"{start} | {otherwise or 'TEXT'}")
        rules.append("call: " + " | ".join(f"call_{index}" for index in range(len(tools))))
        rules += [f"call_{index}: {self._call(tool)}" for index, tool in enumerate(tools)]
        return Grammar("lark", "\n".join(rules), source="tools")

    def _lead(self, mark: str) -> tuple[str, list[str]]:
        """Text up to the first mark, that included, and the rules that this takes."""
        if not mark:
            return "", [f"TEXT: {_TEXT_OF_LLAMA3}"]
        if mark.startswith("<["):
            return f"TEXT {mark}", [f"TEXT: {_TEXT}"]
        # Lazy: the first mark ends the text, which might go on beyond it otherwise.
        return "lead", [f"lead[lazy]: TEXT {mark}", f"TEXT: {_TEXT}"]

    def _around(self, mark: str) -> tuple[str, str, str]:
        """What stands between the first mark and the first call, between calls, and after the last."""
        if self.name == "hermes":
            return "", f'"\\n" {mark}', ""
        if self.name == "llama3":
            return "", '"; "', ""
        return ("", mark, "") if self.has_args else ('" ["', '", "', '"]"')

    def _call(self, tool: Tool) -> str:
        """A call without the mark before it."""
        arguments = f"%json {embedded(tool.parameters, strict=tool.strict, lines=False)}"
        name = json.dumps(tool.name)
        if self.name == "mistral" and self.has_args:
            return f"{name} {self._literal(ARGS)} {arguments}"
        key = "parameters" if self.name == "llama3" else "arguments"
        opening = f'{{"name": {name}, "{key}": '
        if self.name == "hermes":
            opening = "\n" + opening
            return f'{json.dumps(opening)} {arguments} "}}\\n" {self._literal(CALL_END)}'
        return f'{json.dumps(opening)} {arguments} "}}"'

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
