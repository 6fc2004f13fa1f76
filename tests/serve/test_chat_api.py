"""/v1/chat/completions through the official client: the engine's own tokens, in OpenAI's forms."""

from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prolepsis import LLM, SamplingParams
from prolepsis.engine.completion import Completion

MESSAGES: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is a cache?"}]
SEEDED: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12, "seed": 5}


def expected(llm: LLM, messages: Any = MESSAGES, **params: Any) -> list[Completion]:
    return llm.generate([llm.encode_chat(messages)], SamplingParams(**{"max_tokens": 12, "seed": 5, **params}))


def bytes_of(logprobs: Any) -> bytes:
    return b"".join(bytes(each.bytes) for each in logprobs)


def test_the_answer_is_the_engines(client: openai.OpenAI, tiny_llm: LLM) -> None:
    [completion] = expected(tiny_llm)
    answer = client.chat.completions.create(**SEEDED)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.object == "chat.completion"
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", completion.text)
    assert (choice.finish_reason, choice.logprobs) == (completion.finish_reason, None)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == completion.prompt_tokens
    assert answer.usage.completion_tokens == 12


def test_a_stream_is_complete_and_in_order(client: openai.OpenAI, tiny_llm: LLM) -> None:
    done = expected(tiny_llm, n=2, logprobs=2)
    asked = {"n": 2, "logprobs": True, "top_logprobs": 2, "stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(stream=True, **asked, **SEEDED))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert len({(chunk.id, chunk.created, chunk.model, chunk.object) for chunk in chunks}) == 1
    *pieces, last = chunks
    assert last.choices == []
    assert all(chunk.usage is None for chunk in pieces)
    assert last.usage is not None
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (done[0].prompt_tokens, 24)
    for index, completion in enumerate(done):
        own = [choice for chunk in pieces for choice in chunk.choices if choice.index == index]
        assert (own[0].delta.role, own[0].delta.content) == ("assistant", "")
        assert all(choice.delta.role is None for choice in own[1:])
        assert "".join(choice.delta.content or "" for choice in own) == completion.text
        assert [choice.finish_reason for choice in own] == [None] * (len(own) - 1) + [completion.finish_reason]
        logprobs = [each for choice in own if choice.logprobs for each in choice.logprobs.content or ()]
        assert bytes_of(logprobs).decode() == completion.text
        assert [each.logprob for each in logprobs] == [each.logprob for each in completion.logprobs]
        assert [[top.logprob for top in each.top_logprobs] for each in logprobs] == [
            [value for _, value in each.top_logprobs] for each in completion.logprobs
        ]


def test_the_clients_own_accumulation_gives_the_whole_answer(client: openai.OpenAI) -> None:
    # It takes an answer for broken that does not end by itself.
    asked = {"logprobs": True, "top_logprobs": 1, "stop": ["e", " "], **SEEDED, "max_tokens": 100}
    whole = client.chat.completions.create(**asked)
    with client.chat.completions.stream(**asked, stream_options={"include_usage": True}) as stream:
        final = stream.until_done().get_final_completion()
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.choices[0].logprobs is not None
    assert final.choices[0].logprobs.content == whole.choices[0].logprobs.content
    assert final.usage is not None
    assert final.usage.total_tokens == whole.usage.total_tokens


def test_logprobs_without_top_logprobs(client: openai.OpenAI, tiny_llm: LLM) -> None:
    [completion] = expected(tiny_llm, logprobs=0)
    answer = client.chat.completions.create(logprobs=True, **SEEDED)
    assert answer.choices[0].logprobs is not None
    tokens = answer.choices[0].logprobs.content
    assert tokens is not None
    assert [each.logprob for each in tokens] == [each.logprob for each in completion.logprobs]
    assert "".join(each.token for each in tokens) == completion.text
    assert all(each.top_logprobs == [] for each in tokens)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.5, "top_p": 0.8},
        {"top_k": 3},
        {"min_p": 0.2},
        {"repetition_penalty": 1.5, "temperature": 0.0},
        {"presence_penalty": 1.5, "temperature": 0.0},
        {"frequency_penalty": -1.5, "temperature": 0.0},
        {"logit_bias": {5: 50.0, 6: 49.5}},
        {"stop": ["e"]},
        {"stop": "a"},
        {"stop_token_ids": [3, 4, 5], "logit_bias": {5: 20.0}},
        {"ignore_eos": True, "logit_bias": {0: 100.0}},
        {"seed": 7, "n": 3},
    ],
    ids=str,
)
def test_every_parameter_reaches_the_engine(client: openai.OpenAI, tiny_llm: LLM, params: dict[str, Any]) -> None:
    done = expected(tiny_llm, **params)
    answer = client.chat.completions.create(**{**SEEDED, "extra_body": params})
    assert [(choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (each.text, each.finish_reason) for each in done
    ]


def test_max_completion_tokens_is_max_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**{**SEEDED, "max_completion_tokens": 3})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3


def test_without_a_limit_the_context_is_the_limit(client: openai.OpenAI, tiny_llm: LLM) -> None:
    messages: Any = [{"role": "user", "content": "x" * 2010}]
    prompt = len(tiny_llm.encode_chat(messages))
    answer = client.chat.completions.create(model="tiny", messages=messages, extra_body={"ignore_eos": True})
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == tiny_llm.max_context - prompt


def test_parts_of_a_message_and_the_newer_role(client: openai.OpenAI) -> None:
    parts: Any = [
        {"role": "developer", "content": "Be short."},
        {
            "role": "user",
            "name": "Ann",
            "content": [{"type": "text", "text": "What is"}, {"type": "text", "text": "?"}],
        },
    ]
    plain: Any = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "What is\n?"}]
    answers = [client.chat.completions.create(**{**SEEDED, "messages": each}) for each in (parts, plain)]
    assert answers[0].choices == answers[1].choices


def test_the_seed_that_was_drawn_repeats_the_answer(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    first = client.chat.completions.create(**asked)
    [details] = first.model_extra["prolepsis"]["choices"]
    assert details["ttft_s"] > 0
    again = client.chat.completions.create(**asked, seed=details["seed"])
    assert again.choices == first.choices


def test_the_last_chunk_says_how_it_went(client: openai.OpenAI) -> None:
    asked = {"stream": True, "stream_options": {"include_usage": True}}
    *_, last = client.chat.completions.create(**asked, **SEEDED)
    [details] = last.model_extra["prolepsis"]["choices"]
    assert (details["index"], details["seed"]) == (0, 5)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"role": "cook", "content": "x"}]}, "messages[0].role"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[2].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"n": 129}, "n"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"5000": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5"),
        ({"tool_choice": 5}, "tool_choice"),
        ({"stop_token_ids": [5000]}, "stop_token_ids"),
        ({"seed": -1}, "seed"),
        ({"priority": 1 << 30}, "priority"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"audio": {"voice": "x"}}, "audio"),
        ({"min_tokens": 5}, "min_tokens"),
    ],
    ids=str,
)
def test_a_bad_field_is_named(client: openai.OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, extra_body=asked)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


def test_what_is_too_long_is_told_by_its_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 5000}])
    assert caught.value.code == "context_length_exceeded"
