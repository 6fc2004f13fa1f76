"""/v1/completions: text that continues a prompt."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from prolepsis.engine.completion import Completion, best
from prolepsis.engine.llm import LLM
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError
from prolepsis.serve.admission import claim
from prolepsis.serve.answers import Head, details_of, json_response, new_head, usage_of
from prolepsis.serve.generation import Generation, News
from prolepsis.serve.logprobs import Spelling, TextLogprobs, TextLogprobsWriter
from prolepsis.serve.presence import while_there
from prolepsis.serve.response_format import grammar_of
from prolepsis.serve.sampling import sampling_params
from prolepsis.serve.schemas import CompletionBody
from prolepsis.serve.state import State
from prolepsis.serve.streaming import EventStream, Held

router = APIRouter()


class Choice(msgspec.Struct):
    """One completion, or a piece of one."""

    index: int
    text: str
    logprobs: TextLogprobs | None
    finish_reason: str | None


@router.post("/v1/completions")
async def create(body: CompletionBody, request: Request, state: State) -> Response:
    """Continue one prompt or several."""
    state.require_model(body.model)
    params = _params(body)
    llm = state.llm
    claim(request, _number(body.prompt) * params.samples)  # before anything is made of them
    prompts = await while_there(request, state.encode("prompt", _encode, llm, body.prompt))
    echoes = [""] * len(prompts)
    if body.echo:
        echoes = await while_there(request, state.encode("prompt", _decode, llm, prompts))
    await while_there(request, state.compile(params.grammar))
    generation = await Generation.begin(request, state, body, prompts, params)
    spelling = Spelling(llm.tokenizer, params)
    head = new_head("cmpl", "text_completion", state.model_name)
    if body.stream:
        writer = _Writer(generation, spelling, echoes)
        return EventStream(generation, head, writer, include_usage=body.includes_usage)
    await generation.finish()
    return json_response(_answer(generation, spelling, echoes, head))


def _params(body: CompletionBody) -> SamplingParams:
    params = sampling_params(
        body, max_tokens=body.max_tokens, logprobs=body.logprobs, best_of=body.best_of, grammar=grammar_of(body)
    )
    if body.stream and params.samples != params.n:
        raise InputError("best_of is not for streams: the best are known in the end only", field="best_of")
    if body.echo and body.logprobs is not None:
        raise InputError("echo has no log-probabilities: leave out echo, or logprobs", field="echo")
    return params


def _encode(llm: LLM, prompt: Any) -> list[list[int]]:
    """Token ids of every prompt. Raises InputError for what is none."""
    if isinstance(prompt, str):
        return [llm.encode(prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise InputError("prompt must be a text, a list of texts, token ids, or a list of lists of token ids")
    if any(isinstance(each, str | list) for each in prompt):
        return [llm.encode(_one(each)) for each in prompt]
    return [llm.encode(_one(prompt))]


def _decode(llm: LLM, prompts: Sequence[list[int]]) -> list[str]:
    return [llm.tokenizer.decode(prompt) for prompt in prompts]


def _number(prompts: Any) -> int:
    return len(prompts) if isinstance(prompts, list) and prompts and isinstance(prompts[0], str | list) else 1


def _one(prompt: Any) -> str | list[int]:
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
        raise InputError("prompt: every prompt must be a text, or a list of token ids")
    return prompt


def _answer(generation: Generation, spelling: Spelling, echoes: Sequence[str], head: Head) -> dict[str, Any]:
    """All of it at once."""
    samples, n = generation.params.samples, generation.params.n
    choices: list[Choice] = []
    kept: list[Completion] = []
    for number, echo in enumerate(echoes):
        for done in best(generation.completions[number * samples : (number + 1) * samples], n):
            kept.append(done)
            choices.append(Choice(len(choices), echo + done.text, _logprobs(spelling, done), done.finish_reason))
    extra = {"choices": choices, "usage": usage_of(generation), "prolepsis": details_of(kept)}
    return msgspec.structs.asdict(head) | extra


def _logprobs(spelling: Spelling, done: Completion) -> TextLogprobs | None:
    if not done.logprobs:
        return None
    return TextLogprobsWriter(spelling).write(spelling.listed(done.logprobs, done.finish_reason))


class _Writer:
    """Pieces of choices. See `streaming.Writer`."""

    def __init__(self, generation: Generation, spelling: Spelling, echoes: Sequence[str]) -> None:
        self._echoes = [echo for echo in echoes for _ in range(generation.params.samples)]
        self._held = Held(len(self._echoes))
        self._spelling = spelling
        self._logprobs: list[TextLogprobsWriter] = []
        if generation.params.logprobs is not None:
            self._logprobs = [TextLogprobsWriter(spelling) for _ in self._echoes]

    def begin(self) -> Sequence[bytes]:
        return [_encoded(index, echo, None, None) for index, echo in enumerate(self._echoes) if echo]

    def write(self, news: News) -> Sequence[bytes]:
        news = self._held.with_earlier(news)
        if not news.deltas:
            return []
        logprobs = None
        if self._logprobs:
            tokens = self._spelling.listed(news.tokens, news.finish_reason)
            logprobs = self._logprobs[news.choice].write(tokens)
        return [_encoded(news.choice, news.text, logprobs, news.finish_reason)]


def _encoded(index: int, text: str, logprobs: TextLogprobs | None, finish_reason: str | None) -> bytes:
    return msgspec.json.encode(Choice(index, text, logprobs, finish_reason))
