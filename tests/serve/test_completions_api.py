"""/v1/completions through the official client: the engine's own tokens, in OpenAI's forms."""

import threading
from collections import defaultdict
from typing import Any

import openai
import pytest
from openai.types import Completion, CompletionChoice

from prolepsis import LLM, SamplingParams
from prolepsis.model.tokenizer import Tokenizer

SEEDED: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "seed": 5}
PROMPT = "def main"


def expected(llm: LLM, prompt: Any = PROMPT, **params: Any) -> Any:
    return llm.generate(prompt, SamplingParams(max_tokens=12, seed=5, **params))


def whole(chunks: Any) -> dict[int, tuple[str, str | None]]:
    """Text and end of every choice of a stream."""
    texts: defaultdict[int, str] = defaultdict(str)
    ends: dict[int, str | None] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            # What the client's type does not allow, and OpenAI sends all the same, is null before the end.
            CompletionChoice.model_validate(choice.model_dump() | {"finish_reason": choice.finish_reason or "stop"})
            assert choice.index not in ends
            texts[choice.index] += choice.text
            if choice.finish_reason is not None:
                ends[choice.index] = choice.finish_reason
    return {index: (texts[index], ends[index]) for index in sorted(ends)}


def test_the_tokens_are_those_of_the_engine(client: openai.OpenAI, tiny_llm: LLM) -> None:
    [completion] = expected(tiny_llm)
    answer = client.completions.create(prompt=PROMPT, **SEEDED)
    Completion.model_validate(answer.model_dump(), strict=True)
    assert answer.object == "text_completion"
    assert answer.model == "tiny"
    assert answer.choices == [
        CompletionChoice(index=0, text=completion.text, finish_reason=completion.finish_reason, logprobs=None)
    ]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == completion.prompt_tokens
    assert answer.usage.completion_tokens == len(completion.token_ids)
    assert answer.usage.total_tokens == completion.prompt_tokens + len(completion.token_ids)


def test_a_stream_says_the_same(client: openai.OpenAI, tiny_llm: LLM) -> None:
    [completion] = expected(tiny_llm)
    assert whole(client.completions.create(prompt=PROMPT, stream=True, **SEEDED)) == {
        0: (completion.text, completion.finish_reason)
    }


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_and_samples_are_numbered_prompt_by_prompt(
    client: openai.OpenAI, tiny_llm: LLM, stream: bool
) -> None:
    prompts = [[5, 6, 7], [8], [5, 6, 7, 9]]
    done = [each for prompt in prompts for each in expected(tiny_llm, prompt, n=2)]
    answer = client.completions.create(prompt=prompts, n=2, stream=stream, **SEEDED)
    texts = whole(answer) if stream else whole([answer])
    assert texts == {index: (each.text, each.finish_reason) for index, each in enumerate(done)}


def test_a_prompt_is_the_same_in_every_form(client: openai.OpenAI, tiny_llm: LLM) -> None:
    ids = tiny_llm.encode(PROMPT)
    texts = {
        client.completions.create(prompt=prompt, **SEEDED).choices[0].text for prompt in (PROMPT, [PROMPT], ids, [ids])
    }
    assert len(texts) == 1


def test_the_best_of_several_come_first(client: openai.OpenAI, tiny_llm: LLM) -> None:
    done = expected(tiny_llm, n=2, best_of=5)
    answer = client.completions.create(prompt=PROMPT, n=2, best_of=5, **SEEDED)
    assert [choice.text for choice in answer.choices] == [each.text for each in done]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5 * 12


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_the_prompt_before_the_text(client: openai.OpenAI, tiny_llm: LLM, stream: bool) -> None:
    [completion] = expected(tiny_llm)
    answer = client.completions.create(prompt=PROMPT, echo=True, stream=stream, **SEEDED)
    [(text, _)] = whole(answer if stream else [answer]).values()
    assert text == PROMPT + completion.text


def test_many_echoes_leave_the_event_loop_alone(
    client: openai.OpenAI, tiny_llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = set()
    real = Tokenizer.decode

    def decode(*arguments: Any, **named: Any) -> str:
        threads.add(threading.current_thread().name)
        return real(*arguments, **named)

    monkeypatch.setattr(Tokenizer, "decode", decode)
    answer = client.completions.create(prompt=[[7], [8], [9]], echo=True, **SEEDED)
    starts = [tiny_llm.tokenizer.decode([token]) for token in (7, 8, 9)]
    assert [choice.text.startswith(start) for choice, start in zip(answer.choices, starts, strict=True)] == [True] * 3
    assert {name.rstrip("0123456789_") for name in threads - {threading.current_thread().name}} == {"prolepsis-encoder"}


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_spell_the_text(client: openai.OpenAI, tiny_llm: LLM, stream: bool) -> None:
    [completion] = expected(tiny_llm, logprobs=3)
    answer = client.completions.create(prompt=PROMPT, logprobs=3, stream=stream, **SEEDED)
    parts = [chunk.choices[0].logprobs for chunk in (answer if stream else [answer])]
    tokens = [token for part in parts for token in part.tokens]
    offsets = [offset for part in parts for offset in part.text_offset]
    assert "".join(tokens) == completion.text
    assert offsets == [len("".join(tokens[:i])) for i in range(len(tokens))]
    assert [value for part in parts for value in part.token_logprobs] == [each.logprob for each in completion.logprobs]
    top = [each for part in parts for each in part.top_logprobs]
    spell = tiny_llm.tokenizer.decode
    for token, given, own in zip(tokens, top, completion.logprobs, strict=True):
        assert given == {spell([t]): value for t, value in own.top_logprobs} | {token: own.logprob}


def test_what_is_no_character_stands_as_its_bytes(client: openai.OpenAI, tiny_llm: LLM) -> None:
    lone = next(t for t in range(1024) if tiny_llm.tokenizer.token_bytes(t) == b"\xc3")
    asked = {"prompt": [1], "logit_bias": {lone: 100}, "temperature": 0, "logprobs": 0, "max_tokens": 2}
    answer = client.completions.create(model="tiny", **asked)
    [choice] = answer.choices
    assert choice.text == "\ufffd\ufffd"
    assert choice.logprobs is not None
    assert choice.logprobs.tokens == ["bytes:\\xc3"] * 2
    assert choice.logprobs.text_offset == [0, 0]


def test_the_token_that_ends_the_text_is_counted_and_has_no_logprob(client: openai.OpenAI) -> None:
    asked = {"prompt": [1], "logit_bias": {7: 100}, "extra_body": {"stop_token_ids": [7]}, "logprobs": 0}
    answer = client.completions.create(model="tiny", **asked)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("", "stop")
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == []
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1


def test_what_the_prefix_cache_held_is_reported(client: openai.OpenAI) -> None:
    prompt = [3] * 100
    first, second = (client.completions.create(model="tiny", prompt=prompt, max_tokens=1) for _ in range(2))
    other = client.completions.create(model="tiny", prompt=prompt, max_tokens=1, extra_body={"cache_salt": "mine"})
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in (first, second, other)]
    assert cached == [0, 99, 0]


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": [1, "x"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [5000]}, "prompt"),
        ({"prompt": [1] * 5000}, "prompt"),
        ({"logprobs": True}, "logprobs"),
        ({"logprobs": 21}, "logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"prompt": [[1]] * 100, "n": 100}, "n"),
    ],
)
def test_a_bad_field_is_named(client: openai.OpenAI, asked: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**{"model": "tiny", "prompt": "x", **asked})
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
