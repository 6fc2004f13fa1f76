"""/v1/chat/completions: the assistant's answer to a conversation."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from prolepsis.engine.completion import Completion
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.serve.answers import Head, details_of, json_response, new_head, usage_of
from prolepsis.serve.generation import Generation, News
from prolepsis.serve.logprobs import ChatLogprobs, Spelling, chat_logprobs
from prolepsis.serve.messages import messages_of
from prolepsis.serve.sampling import sampling_params
from prolepsis.serve.schemas import ChatBody
from prolepsis.serve.state import State
from prolepsis.serve.streaming import EventStream, Held

router = APIRouter()


class Message(msgspec.Struct):
    """What the assistant says."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class Choice(msgspec.Struct):
    """One answer."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: str | None


class Piece(msgspec.Struct, omit_defaults=True):
    """What an answer has got since the chunk before."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class PieceChoice(msgspec.Struct):
    """A piece of one answer."""

    index: int
    delta: Piece
    logprobs: ChatLogprobs | None
    finish_reason: str | None


@router.post("/v1/chat/completions")
async def create(body: ChatBody, request: Request, state: State) -> Response:
    """Answer a conversation."""
    state.require_model(body.model)
    llm = state.llm
    params = _params(body, llm.max_context)
    prompt = await state.encode("messages", llm.encode_chat, messages_of(body.messages))
    generation = Generation.begin(request, state, body, [prompt], params)
    spelling = Spelling(llm.tokenizer, params)
    if body.stream:
        head = new_head("chatcmpl", "chat.completion.chunk", state.model_name)
        return EventStream(generation, head, _Writer(generation, spelling), include_usage=body.includes_usage)
    await generation.finish()
    return json_response(_answer(generation, spelling, new_head("chatcmpl", "chat.completion", state.model_name)))


def _params(body: ChatBody, most_tokens: int) -> SamplingParams:
    """`most_tokens`: where the body gives no limit."""
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(body, max_tokens=most_tokens if given is None else given, logprobs=logprobs)


def _answer(generation: Generation, spelling: Spelling, head: Head) -> dict[str, Any]:
    """All of it at once."""
    done = generation.completions
    choices = [
        Choice(index, Message(each.text), _logprobs(spelling, each), each.finish_reason)
        for index, each in enumerate(done)
    ]
    extra = {"choices": choices, "usage": usage_of(generation), "prolepsis": details_of(done)}
    return msgspec.structs.asdict(head) | extra


def _logprobs(spelling: Spelling, done: Completion) -> ChatLogprobs | None:
    if not done.logprobs:
        return None
    return chat_logprobs(spelling, spelling.listed(done.logprobs, done.finish_reason))


class _Writer:
    """Pieces of answers. See `streaming.Writer`."""

    def __init__(self, generation: Generation, spelling: Spelling) -> None:
        self._choices = len(generation.streams)
        self._held = Held(self._choices)
        self._spelling = spelling
        self._has_logprobs = generation.params.logprobs is not None

    def begin(self) -> Sequence[bytes]:
        return [_encoded(index, Piece("assistant", "")) for index in range(self._choices)]

    def write(self, news: News) -> Sequence[bytes]:
        news = self._held.with_earlier(news)
        if not news.deltas:
            return []
        logprobs = None
        if self._has_logprobs:
            logprobs = chat_logprobs(self._spelling, self._spelling.listed(news.tokens, news.finish_reason))
        return [_encoded(news.choice, Piece(content=news.text or None), logprobs, news.finish_reason)]


def _encoded(index: int, piece: Piece, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None) -> bytes:
    return msgspec.json.encode(PieceChoice(index, piece, logprobs, finish_reason))
