"""Tool calls out of a model's text, while it comes.

Every format is read by a routine that takes one character at a time, so what comes out does not depend on how the text
was cut. Text that may turn out to be the beginning of a call is held back until that is decided; what turns out to be
no call is text. A call is told as soon as its name is known, its arguments as they come, just as the model writes them.
"""

import re
from collections.abc import Collection
from typing import Literal

from prolepsis.model.tool_prompt import CALL, CALL_END
from prolepsis.serve.tool_reader import NoCall, Routine, ToolReader

FormatName = Literal["hermes", "llama3", "mistral"]
TOOL_CALLS, ARGS, PYTHON_TAG = "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"
NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")

_MOST_HEAD = 512


class ToolParser(ToolReader):
    """Finds the calls of one output, in the format `form`."""

    def __init__(self, form: FormatName, names: Collection[str], most_calls: int | None = None) -> None:
        """See `ToolReader`."""
        self._form = form
        super().__init__(names, most_calls)

    def _read(self) -> Routine:
        return {"hermes": self._hermes, "llama3": self._llama3, "mistral": self._mistral}[self._form]()

    def _hermes(self) -> Routine:
        """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, each call in its own."""
        while (yield from self._text(CALL)):
            yield from self._attempt(self._hermes_call(), CALL_END)

    def _hermes_call(self) -> Routine:
        if (yield from self._visible()) != "{":
            raise NoCall
        yield from self._object(known=False)

    def _llama3(self) -> Routine:
        """{"name": ..., "parameters": {...}} and nothing before it, or after <|python_tag|>; more of them after a ;."""
        first = yield from self._visible()
        self._unread("".join(self._raw))
        if first == "{":
            yield from self._llama3_calls(known=True)
        while (yield from self._text(PYTHON_TAG)):
            yield from self._llama3_calls(known=False)

    def _llama3_calls(self, *, known: bool) -> Routine:
        more = True
        while more:
            yield from self._attempt(self._llama3_call(known), "")
            more = False
            if self._opened:
                self._raw = []
                more = (yield from self._visible()) == ";"
                if not more:
                    self._unread("".join(self._raw))

    def _llama3_call(self, known: bool) -> Routine:
        if (yield from self._visible()) != "{":
            raise NoCall
        yield from self._object(known=known)

    def _mistral(self) -> Routine:
        """[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...], or [TOOL_CALLS]name[ARGS]{...} for each call."""
        while (yield from self._text(TOOL_CALLS)):
            yield from self._attempt(self._mistral_calls(), "")

    def _mistral_calls(self) -> Routine:
        first = yield from self._visible()
        if first == "{":
            yield from self._object(known=False)
        elif first == "[":
            while (character := (yield from self._visible())) != "]":
                if character == "{":
                    yield from self._object(known=False)
                    self._raw = []
                elif character != ",":
                    raise NoCall
        else:
            head = ""
            while first and first != "{" and len(head) < _MOST_HEAD:
                head += first
                first = yield from self._next()
            name = head.partition("[")[0].strip()  # an id of the call may come before [ARGS]
            if first != "{" or not NAME.fullmatch(name):
                raise NoCall
            self._open(name)
            yield from self._container(first, self._tell_arguments)
