"""Tool calls out of text: the same ones however the text is cut, and text that is no call stays text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.serve.tool_parser import FormatName, ToolParser
from prolepsis.serve.tool_reader import Arguments, Call, Event, Text

NAMES = ("find", "add.two")
Read = tuple[str, list[tuple[str, str]]]


def read(form: FormatName, *pieces: str, most_calls: int | None = None) -> Read:
    parser = ToolParser(form, NAMES, most_calls)
    events = [event for piece in pieces for event in parser.push(piece)] + parser.finish()
    assert parser.num_calls == sum(isinstance(event, Call) for event in events)
    return put_together(events)


def put_together(events: list[Event]) -> Read:
    """As a client does: the arguments of a call come after it, and are appended."""
    text, names, arguments = "", [], []
    for event in events:
        if isinstance(event, Text):
            text += event.text
        elif isinstance(event, Call):
            assert event.number == len(names)
            names.append(event.name)
            arguments.append("")
        else:
            assert isinstance(event, Arguments)
            arguments[event.number] += event.text
    return text, list(zip(names, arguments, strict=True))


values = st.recursive(
    st.one_of(st.text(max_size=8), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=5,
)
objects = st.dictionaries(st.text(max_size=5), values, max_size=3)
calls = st.lists(st.tuples(st.sampled_from(NAMES), objects), min_size=1, max_size=3)
indents = st.sampled_from([None, 1, 4])
spoken = st.text("ab <[{\n", max_size=12).filter(lambda text: text == text.strip() and not text.startswith("{"))
FORMATS: tuple[FormatName, ...] = ("hermes", "llama3", "mistral")


def written(form: str, made: list[tuple[str, dict[str, Any]]], indent: int | None, newer: bool) -> str:
    key = "parameters" if form == "llama3" else "arguments"
    objects = [json.dumps({"name": name, key: value}, indent=indent, ensure_ascii=newer) for name, value in made]
    if form == "hermes":
        return "\n".join(f"<tool_call>\n{each}\n</tool_call>" for each in objects)
    if form == "llama3":
        return ("<|python_tag|>" if newer else "") + "; ".join(objects)
    if newer:
        return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(value, indent=indent)}" for name, value in made)
    return f"[TOOL_CALLS] [{', '.join(objects)}]"


def cut(text: str, places: list[int]) -> list[str]:
    at = sorted({place % (len(text) + 1) for place in places})
    return [text[first:last] for first, last in zip([0, *at], [*at, len(text)], strict=True)]


@settings(max_examples=80, deadline=None)
@given(st.sampled_from(FORMATS), spoken, calls, indents, st.booleans(), st.lists(st.integers(0, 9_999), max_size=12))
def test_calls_are_found_however_the_text_is_cut(form, said, made, indent, newer, places):
    before = said if form != "llama3" or newer else ""
    text = before + written(form, made, indent, newer)
    found = read(form, text)
    assert found[0] == before
    assert [(name, json.loads(arguments)) for name, arguments in found[1]] == made
    assert read(form, *cut(text, places)) == found
    assert read(form, *text) == found


pieces_of_calls = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", '{"name": "find"',
         ', "arguments": {', '"x": "}"', "}", "]", "[", ";", ",", " ", "\n", "<", "a",
         '"', "\\", "find", '"name"', ":", "null", "{", "1"]
    ),
    max_size=14,
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FORMATS), pieces_of_calls)
def test_nothing_that_is_cut_otherwise_is_read_otherwise(form, pieces):
    text = "".join(pieces)
    whole = read(form, text)
    assert read(form, *pieces) == whole
    assert read(form, *text) == whole


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(FORMATS), st.text('ab<>[]tol_ {}\n:"', max_size=40))
def test_text_without_calls_is_left_alone(form, text):
    assert read(form, *text) == (text, [])


@pytest.mark.parametrize(
    ("form", "text", "expected"),
    [
        ("hermes", 'So:\n\n<tool_call>{"arguments": {"a": 1}, "name": "x"}</tool_call> ', ("So:", [("x", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "x"}</tool_call>', ("", [("x", "{}")])),
        ("hermes", '<tool_call>{"name": "x", "arguments": null}', ("", [("x", "{}")])),
        ("hermes", '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}', ("", [("x", '{"a": 1}')])),
        ("hermes", '<tool_call>{"name": "x", "arguments": {"a": "</tool', ("", [("x", '{"a": "</tool')])),
        ("hermes", "a <tool_call> b", ("a <tool_call> b", [])),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', ('<tool_call>{"name": 3}</tool_call>', [])),
        ("hermes", "a <tool", ("a <tool", [])),
        ("hermes", '<tool_call>{"name": "x"}</tool_call> and', (" and", [("x", "{}")])),
        ("hermes", '<tool_call>{"name": "x" oh}</tool_call>and', ("and", [("x", "")])),
        ("llama3", '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
        ("llama3", '<|python_tag|>{"name": "Bob", "parameters": {}}', ("", [("Bob", "{}")])),
        ("llama3", "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
        ("llama3", 'It is {"name": "find"}', ('It is {"name": "find"}', [])),
        ("mistral", '[TOOL_CALLS]find[CALL_ID]abc[ARGS]{"a": 1}', ("", [("find", '{"a": 1}')])),
        ("mistral", '[TOOL_CALLS]{"name": "find", "arguments": {}}', ("", [("find", "{}")])),
        ("mistral", "[TOOL_CALLS] none", ("[TOOL_CALLS] none", [])),
    ],
)  # fmt: skip
def test_forms_that_models_write(form, text, expected):
    assert read(form, text) == expected


@pytest.mark.parametrize("form", FORMATS)
def test_calls_beyond_the_most_are_left_out(form):
    text = written(form, [("find", {"a": 1}), ("find", {"b": 2}), ("find", {})], None, False)
    assert read(form, text, most_calls=1) == ("", [("find", '{"a": 1}')])


def test_a_call_is_told_before_it_is_whole():
    parser = ToolParser("hermes", NAMES)
    assert parser.push('Hm. <tool_call>\n{"name": "fi') == [Text("Hm.")]
    assert parser.push('nd", "arg') == [Call(0, "find")]
    assert parser.push('uments": {"a"') == [Arguments(0, '{"a"')]
    assert parser.push(": 1}}\n") == [Arguments(0, ": 1}")]
    assert parser.finish() == []


def test_white_space_without_end_is_told_in_time():
    parser = ToolParser("hermes", NAMES)
    told = parser.push(" " * 100_000)
    assert sum(len(event.text) for event in told if isinstance(event, Text)) > 99_000
