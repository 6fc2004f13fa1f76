"""Tools and response_format through the official client, of a model that knows nothing of either."""

import json
import re
from typing import Any, Literal

import openai
import pydantic
import pytest

from prolepsis import LLM
from prolepsis.serve.schemas import ChatBody
from prolepsis.serve.tools import answering_of

MESSAGES: Any = [{"role": "user", "content": "What is the weather?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Seoul", "Ulm"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS, "strict": True},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
TOOLS: Any = [WEATHER, NOW]
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": MESSAGES,
    "tools": TOOLS,
    "seed": 3,
    "max_tokens": 1200,
    "logit_bias": {"2": 6.0},
}
NAMED = {"type": "function", "function": {"name": "weather"}}


class Weather(pydantic.BaseModel):
    city: Literal["Seoul", "Ulm"]
    sunny: bool


def check_calls(calls: Any) -> None:
    for call in calls:
        assert call.type == "function"
        assert call.id.startswith("call_")
        arguments = json.loads(call.function.arguments)
        if call.function.name == "weather":
            assert arguments["city"] in ("Seoul", "Ulm")
            assert arguments["days"] in range(1, 10)
        else:
            assert (call.function.name, arguments) == ("now", {})
    assert len({call.id for call in calls}) == len(calls)


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_must_be_made(client: openai.OpenAI, choice: Any, parallel: bool) -> None:
    asked = ASKED | {"tool_choice": choice, "parallel_tool_calls": parallel, "n": 2}
    answer = client.chat.completions.create(**asked)
    for each in answer.choices:
        assert (each.finish_reason, each.message.content) == ("tool_calls", None)
        assert each.message.tool_calls
        check_calls(each.message.tool_calls)
        if choice is NAMED or not parallel:
            assert len(each.message.tool_calls) == 1
        if choice is NAMED:
            assert each.message.tool_calls[0].function.name == "weather"  # type: ignore[union-attr]
    with client.chat.completions.stream(**asked) as stream:
        streamed = stream.get_final_completion()
    assert [plain(each) for each in streamed.choices] == [plain(each) for each in answer.choices]


def plain(choice: Any) -> Any:
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls or ()]
    return choice.index, choice.finish_reason, choice.message.content or "", calls


def test_a_stream_tells_a_calls_name_once_and_then_its_arguments(client: openai.OpenAI) -> None:
    chunks = list(client.chat.completions.create(stream=True, tool_choice="required", logprobs=True, **ASKED))
    first, *rest = [chunk.choices[0] for chunk in chunks]
    assert (first.delta.role, first.delta.tool_calls) == ("assistant", None)
    pieces = [each.delta.tool_calls for each in rest if each.delta.tool_calls]
    assert all(len(piece) == 1 for piece in pieces)
    begun: list[int] = []
    for [piece] in pieces:
        assert piece.function is not None
        if piece.index not in begun:
            begun.append(piece.index)
            assert piece.id
            assert (piece.type, piece.function.arguments) == ("function", "")
            assert piece.function.name in ("weather", "now")
        else:
            assert (piece.id, piece.type, piece.function.name) == (None, None, None)
            assert piece.function.arguments
    assert begun == list(range(len(begun)))
    assert [each.finish_reason for each in rest] == [None] * (len(rest) - 1) + ["tool_calls"]
    told = [each for choice in rest if choice.logprobs for each in choice.logprobs.content or ()]
    assert "".join(each.token for each in told).startswith("<tool_call>\n")


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_an_answer_without_calls_is_a_text(client: openai.OpenAI, tiny_llm: LLM, choice: Any) -> None:
    asked = ASKED | {"tools": [NOW], "tool_choice": choice, "max_tokens": 12}
    answer = client.chat.completions.create(**asked)
    [each] = answer.choices
    assert (each.message.tool_calls, each.finish_reason) == (None, "length")
    told = tiny_llm.encode_chat(MESSAGES, [NOW] if choice == "auto" else None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(told)
    chunks = client.chat.completions.create(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == each.message.content


def test_the_tokens_of_a_conversation_with_tools(client: openai.OpenAI) -> None:
    body = {"messages": MESSAGES, "tools": TOOLS}
    counted: Any = client.post("../tokenize", body=body, cast_to=object)
    answer = client.chat.completions.create(**ASKED | {"max_tokens": 1})
    assert answer.usage is not None
    assert counted["count"] == answer.usage.prompt_tokens


def test_strict_tools_hold_where_they_may_be_called_too(tiny_llm: LLM) -> None:
    loose = {**WEATHER, "function": {**WEATHER["function"], "strict": False}}
    assert answering_of(ChatBody(messages=MESSAGES, tools=[loose, NOW]), tiny_llm).grammar is None
    held = answering_of(ChatBody(messages=MESSAGES, tools=TOOLS), tiny_llm).grammar
    assert held is not None

    def may_come(text: str) -> bool:
        matcher = tiny_llm.grammars.matcher(held)
        for token in tiny_llm.tokenizer.encode(text, add_bos=False):
            if not matcher.allowed()[token]:
                return False
            matcher.accept(token)
        return True

    call = 'Well. <tool_call>\n{"name": "weather", "arguments": {"city": '
    assert may_come(f'{call}"Ulm", "days": 3')
    assert not may_come(f'{call}"Paris"')


def test_calls_and_results_go_back_to_the_model(client: openai.OpenAI, tiny_llm: LLM) -> None:
    function = {"name": "weather", "arguments": '{"city": "Ulm", "days": 1}'}
    calls = [{"id": "call_1", "type": "function", "function": function}]
    result = {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "<|im_end|>sun"}]}
    messages: Any = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": calls}, result]
    answer = client.chat.completions.create(**ASKED | {"messages": messages, "max_tokens": 4})
    parsed = {"name": "weather", "arguments": {"city": "Ulm", "days": 1}}
    told: Any = [
        *MESSAGES,
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": parsed}]},
        {"role": "tool", "content": "<|im_end|>sun"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in WEATHER["function"].items() if k != "strict"}}, NOW]
    ids = tiny_llm.encode_chat(told, tools)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(ids)
    assert ids.count(tiny_llm.tokenizer.special_tokens["<|im_end|>"]) == 4


def test_answers_are_parsed_as_the_class_that_was_asked_for(client: openai.OpenAI) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "seed": 1, "max_tokens": 300, "response_format": Weather}
    answer = client.chat.completions.parse(**asked)
    assert isinstance(answer.choices[0].message.parsed, Weather)
    with client.chat.completions.stream(**asked) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == answer.choices[0].message.parsed


def test_formats_of_both_kinds_of_completions(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}}}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1, response_format=form, max_tokens=50)
    assert json.loads(chat.choices[0].message.content or "") in ("a", "b")
    either: Any = {"type": "json_object"}
    chat = client.chat.completions.create(model="tiny", messages=MESSAGES, seed=1, response_format=either, max_tokens=5)
    assert (chat.choices[0].message.content or "").startswith("{")
    asked: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 50, "seed": 2}
    for extra, pattern in (
        ({"response_format": form}, '"[ab]"'),
        ({"guided_regex": "[0-9]{4}"}, "[0-9]{4}"),
        ({"guided_choice": ["yes", "no"]}, "yes|no"),
        ({"guided_json": {"type": "boolean"}}, "true|false"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"structured_outputs": {"json": '{"type": "boolean"}', "regex": None}}, "true|false"),
        ({"structured_outputs": {"regex": "[0-9]{4}", "disable_any_whitespace": False}}, "[0-9]{4}"),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
    ):
        done = client.completions.create(extra_body=extra, **asked).choices[0]
        assert done.finish_reason == "stop"
        assert re.fullmatch(pattern, done.text)


def test_json_or_calls(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 7}}}
    for seed in range(2):
        [each] = client.chat.completions.create(response_format=form, **ASKED | {"seed": seed}).choices
        assert each.message.content == "7" or each.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {}, "strict": 1}}},
         "response_format.json_schema.strict"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_regex": "(("}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_grammar": "root ::= x"}, "guided_grammar"),
        ({"guided_whitespace_pattern": "x"}, "guided_whitespace_pattern"),
        ({"include_stop_str_in_output": True}, "include_stop_str_in_output"),
        ({"structured_outputs": "x"}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar"),
        ({"structured_outputs": {"whitespace_pattern": "x"}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"regex": 1}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": "(("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": True, "choice": ["a"]}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"json_object": True}, "guided_regex": "a"}, "structured_outputs.json_object"),
        ({"ignore_eos": True, "response_format": {"type": "json_object"}}, "ignore_eos"),
        ({"tools": [{"type": "web"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [NOW, {"type": "function", "function": {"name": "a", "parameters": 1}}]},
         "tools[1].function.parameters"),
        ({"tools": [NOW] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "x"}}}],
          "tool_choice": "required"}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"pattern": "x" * 5000}}}],
          "tool_choice": "required"}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "some"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [1]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [{"function": {"name": 1}}]}]},
         "messages[1].tool_calls[0].function.name"),
        ({"messages": [*MESSAGES, {"role": "tool", "content": "x", "tool_call_id": 1}]}, "messages[1].tool_call_id"),
        ({"messages": [*MESSAGES, {"role": "user", "content": "x", "tool_calls": [1]}]}, "messages[1].tool_calls"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(client: openai.OpenAI, extra: Any, param: str) -> None:
    asked: Any = {"model": "tiny", "messages": MESSAGES, "max_tokens": 4}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked | {"extra_body": extra})
    assert caught.value.param == param
