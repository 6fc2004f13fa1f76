"""/v1/chat/completions: the assistant's answer to a conversation."""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from prolepsis.engine.completion import Completion
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.stopping import FinishReason
from prolepsis.serve.answers import Head, details_of, json_response, new_head, usage_of
from prolepsis.serve.generation import Generation, News
from prolepsis.serve.logprobs import ChatLogprobs, Spelling, chat_logprobs
from prolepsis.serve.messages import messages_of
from prolepsis.serve.presence import while_there
from prolepsis.serve.sampling import sampling_params
from prolepsis.serve.schemas import ChatBody
from prolepsis.serve.state import State
from prolepsis.serve.streaming import EventStream, Held
from prolepsis.serve.tools import Answering, CallPiece, MessageOutput, answering_of, whole_message

router = APIRouter()


class Message(msgspec.Struct):
    """What the assistant says, and the functions it calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[CallPiece] | msgspec.UnsetType = msgspec.UNSET


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
    tool_calls: list[CallPiece] | None = None


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
    answering = answering_of(body, llm)
    params = _params(body, llm.max_context, answering)
    encoding = state.encode("messages", llm.encode_chat, messages_of(body.messages), answering.tools)
    prompt = await while_there(request, encoding)
    await while_there(request, state.compile(params.grammar))
    generation = await Generation.begin(request, state, body, [prompt], params)
    spelling = Spelling(llm.tokenizer, params)
    if body.stream:
        head = new_head("chatcmpl", "chat.completion.chunk", state.model_name)
        return EventStream(
            generation, head, _Writer(generation, spelling, answering), include_usage=body.includes_usage
        )
    await generation.finish()
    head = new_head("chatcmpl", "chat.completion", state.model_name)
    return json_response(_answer(generation, spelling, answering, head))


def _params(body: ChatBody, most_tokens: int, answering: Answering) -> SamplingParams:
    """`most_tokens`: where the body gives no limit."""
    given = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return sampling_params(
        body,
        max_tokens=most_tokens if given is None else given,
        logprobs=logprobs,
        grammar=answering.grammar,
        skip_special_tokens=answering.skip_special_tokens,
    )


def _answer(generation: Generation, spelling: Spelling, answering: Answering, head: Head) -> dict[str, Any]:
    """All of it at once."""
    done = generation.completions
    choices = [_choice(index, each, spelling, answering) for index, each in enumerate(done)]
    extra = {"choices": choices, "usage": usage_of(generation), "prolepsis": details_of(done)}
    return msgspec.structs.asdict(head) | extra


def _choice(index: int, done: Completion, spelling: Spelling, answering: Answering) -> Choice:
    content, calls = whole_message(answering, done.text)
    message = Message(content, tool_calls=calls or msgspec.UNSET)
    return Choice(index, message, _logprobs(spelling, done), _reason(done.finish_reason, bool(calls)))


def _reason(reason: FinishReason | None, has_calls: bool) -> str | None:
    return "tool_calls" if has_calls and reason == "stop" else reason


def _logprobs(spelling: Spelling, done: Completion) -> ChatLogprobs | None:
    if not done.logprobs:
        return None
    return chat_logprobs(spelling, spelling.listed(done.logprobs, done.finish_reason))


class _Writer:
    """Pieces of answers. See `streaming.Writer`."""

    def __init__(self, generation: Generation, spelling: Spelling, answering: Answering) -> None:
        self._outputs = [MessageOutput(answering) for _ in generation.streams]
        self._held = Held(len(self._outputs))
        self._spelling = spelling
        self._has_logprobs = generation.params.logprobs is not None

    def begin(self) -> Sequence[bytes]:
        return [_encoded(index, Piece("assistant", "")) for index in range(len(self._outputs))]

    def write(self, news: News) -> Sequence[bytes]:
        news = self._held.with_earlier(news)
        if not news.deltas:
            return []
        logprobs = None
        if self._has_logprobs:
            logprobs = chat_logprobs(self._spelling, self._spelling.listed(news.tokens, news.finish_reason))
        output = self._outputs[news.choice]
        # One call at most in a chunk, as many clients look at the first one only.
        pieces = [_piece(each) for each in output.push(news.text, ended=news.finish_reason is not None)]
        if not pieces and (logprobs is not None or news.finish_reason is not None):
            pieces = [Piece()]
        reason = _reason(news.finish_reason, output.has_calls)
        return [
            *(_encoded(news.choice, piece) for piece in pieces[:-1]),
            *(_encoded(news.choice, piece, logprobs, reason) for piece in pieces[-1:]),
        ]


def _piece(new: str | CallPiece) -> Piece:
    return Piece(content=new) if isinstance(new, str) else Piece(tool_calls=[new])


def _encoded(index: int, piece: Piece, logprobs: ChatLogprobs | None = None, finish_reason: str | None = None) -> bytes:
    return msgspec.json.encode(PieceChoice(index, piece, logprobs, finish_reason))
