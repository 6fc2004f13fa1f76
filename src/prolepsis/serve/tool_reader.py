"""What the formats of tool calls have in common: text, marks, and calls as JSON, read a character at a time."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator
from contextlib import suppress
from typing import NamedTuple

_MOST_SPACE = 256  # before a call it is left out
Routine = Generator[None, str, None]
TextRoutine = Generator[None, str, str]


class Text(NamedTuple):
    """More of what the model says."""

    text: str


class Call(NamedTuple):
    """The model calls a function, its arguments are to come. `number`: of the call, from 0 on."""

    number: int
    name: str


class Arguments(NamedTuple):
    """More of the arguments of a call, in JSON."""

    number: int
    text: str


Event = Text | Call | Arguments


class ToolReader(ABC):
    """Reads one output. Not for use after `finish`. A subclass says how: by a routine, which gets "" at the end."""

    def __init__(self, names: Collection[str], most_calls: int | None) -> None:
        """names: of the tools there are. most_calls: those that come after so many are left out."""
        self._names, self._most_calls = names, most_calls
        self._events: list[Event] = []
        self._calls = 0
        self._muted = self._opened = False
        self._raw: list[str] = []  # of the call that is being read, to be told as text if it is none
        self._back: list[str] = []
        self._ended = False
        self._routine = self._read()
        next(self._routine)

    @abstractmethod
    def _read(self) -> Routine:
        """Tell all that the text holds."""

    def push(self, text: str) -> list[Event]:
        """What is known with more of the text."""
        for character in text:
            self._routine.send(character)
        return self._taken()

    def finish(self) -> list[Event]:
        """What is left when no more text comes."""
        self._ended = True
        with suppress(StopIteration):
            self._routine.send("")
        return self._taken()

    @property
    def num_calls(self) -> int:
        """Calls told so far."""
        return self._calls

    def _next(self) -> TextRoutine:
        if self._back:
            character = self._back.pop()
        elif self._ended:
            return ""
        else:
            character = yield
        self._raw.append(character)
        return character

    def _unread(self, text: str) -> None:
        self._back.extend(reversed(text))
        del self._raw[len(self._raw) - len(text) :]

    def _visible(self) -> TextRoutine:
        """The next character that is not white space."""
        while (character := (yield from self._next())).isspace():
            pass
        return character

    def _text(self, marker: str) -> Generator[None, str, bool]:
        """Tell text up to a marker. False: it has not come."""
        held = ""
        while True:
            character = yield from self._next()
            if not character:
                self._tell(Text(held.rstrip() if self._calls else held))
                return False
            held += character
            if held.endswith(marker):
                self._tell(Text(held[: -len(marker)].rstrip()))
                gap = held[len(held[: -len(marker)].rstrip()) :]
                self._raw = [gap]
                return True
            safe = len(held) - _open_length(held, marker)
            if len(held) < _MOST_SPACE:
                safe = len(held[:safe].rstrip())
            self._tell(Text(held[:safe]))
            held = held[safe:]
            self._raw.clear()

    def _attempt(self, call: Routine, end: str) -> Routine:
        """Read what should be a call, and `end` after it, which may be missing."""
        self._opened = False
        try:
            yield from call
        except NoCall:
            if not self._opened:
                self._tell(Text("".join(self._raw)))
            else:
                yield from self._skip(end)
        else:
            yield from self._past(end)

    def _past(self, end: str) -> Routine:
        read = ""
        while end and read.lstrip() != end:
            character = yield from self._next()
            read += character
            if not character or not end.startswith(read.lstrip()):
                self._unread(read)
                return

    def _skip(self, end: str) -> Routine:
        """Drop the rest of a call that was told already and then went wrong."""
        dropped = ""
        while not end or not dropped.endswith(end):
            character = yield from self._next()
            if not character:
                return
            dropped = (dropped + character)[-len(end) :] if end else ""

    def _object(self, *, known: bool) -> Routine:
        """A call as a JSON object, whose { was read. known: only that of a tool there is."""
        self._opened, opened = False, False
        arguments: list[str] | None = None
        while (character := (yield from self._visible())) != "}":
            if character == ",":
                continue
            key = yield from self._string(character)
            if (yield from self._visible()) != ":":
                raise NoCall
            if key == "name" and not opened:
                name = yield from self._string((yield from self._visible()))
                if not name or (known and name not in self._names):
                    raise NoCall
                self._open(name)
                opened = True
                self._tell_arguments("".join(arguments or ()))
            elif key in ("arguments", "parameters") and arguments is None:
                arguments = []
                yield from self._value(self._tell_arguments if opened else arguments.append)
            else:
                yield from self._value(_ignore)
        if not opened:
            raise NoCall
        if arguments is None:
            self._tell_arguments("{}")

    def _string(self, quote: str) -> TextRoutine:
        """The value of a JSON string, of which the first character was read."""
        if quote != '"':
            raise NoCall
        raw = quote
        while True:
            character = yield from self._next()
            if not character:
                raise NoCall
            raw += character
            if character == "\\":
                raw += yield from self._next()
            elif character == '"':
                return _parsed_string(raw)

    def _value(self, tell: Callable[[str], object]) -> Routine:
        """Tell a JSON value as it comes; one that is a string, what it holds; null, an empty object."""
        first = yield from self._visible()
        if first == '"':
            tell((yield from self._string(first)))
        elif first and first in "{[":
            yield from self._container(first, tell)
        else:
            scalar = ""
            while first and first not in ",}]" and not first.isspace():
                scalar += first
                first = yield from self._next()
            if not first or not scalar:
                raise NoCall
            self._unread(first)
            tell("{}" if scalar == "null" else scalar)

    def _container(self, first: str, tell: Callable[[str], object]) -> Routine:
        tell(first)
        depth, quoted = 1, False
        while depth:
            character = yield from self._next()
            if not character:
                raise NoCall
            tell(character)
            if quoted and character == "\\":
                tell((yield from self._next()))
            elif character == '"':
                quoted = not quoted
            elif not quoted:
                depth += (character in "{[") - (character in "}]")

    def _open(self, name: str) -> None:
        self._opened = True
        self._muted = self._most_calls is not None and self._calls >= self._most_calls
        if not self._muted:
            self._tell(Call(self._calls, name))
            self._calls += 1

    def _tell_arguments(self, text: str) -> None:
        if not self._muted:
            self._tell(Arguments(self._calls - 1, text))

    def _tell(self, event: Event) -> None:
        if isinstance(event, Call) or event.text:
            self._events.append(event)

    def _taken(self) -> list[Event]:
        """The events since the last time, those that go together as one."""
        joined: list[Event] = []
        for event in self._events:
            last = joined[-1] if joined else None
            if isinstance(event, Text) and isinstance(last, Text):
                joined[-1] = Text(last.text + event.text)
            elif isinstance(event, Arguments) and isinstance(last, Arguments) and event.number == last.number:
                joined[-1] = Arguments(event.number, last.text + event.text)
            else:
                joined.append(event)
        self._events = []
        return joined


class NoCall(Exception):
    """What was taken for a call is none, or is cut off."""


def _parsed_string(raw: str) -> str:
    try:
        return str(json.loads(raw, strict=False))
    except ValueError:
        raise NoCall from None


def _open_length(text: str, marker: str) -> int:
    """Length of the longest end of `text` with which `marker` begins."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if marker.startswith(text[-n:])), 0)


def _ignore(_: str) -> None:
    pass
