"""What the server is and has: models, version, health, and its tokenizer."""

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fastapi import APIRouter, Request, Response

from prolepsis.engine.llm import LLM
from prolepsis.errors import InputError
from prolepsis.model.chat_template import encode_chat
from prolepsis.serve.admission import note_encoded
from prolepsis.serve.answers import json_response
from prolepsis.serve.messages import messages_of
from prolepsis.serve.presence import while_there
from prolepsis.serve.schemas import DetokenizeBody, TokenizeBody
from prolepsis.serve.state import ServerState, State
from prolepsis.serve.tools import told_tools

router = APIRouter()


@router.get("/health")
async def health(state: State) -> dict[str, str]:
    """200 once requests can be answered, 503 before, and once the engine has failed."""
    state.require_ready()
    return {"status": state.phase}


@router.get("/version")
async def version_() -> dict[str, str]:
    """The version of Prolepsis."""
    try:
        return {"version": version("prolepsis")}
    except PackageNotFoundError:
        return {"version": "unknown"}


@router.get("/v1/models")
async def models(state: State) -> dict[str, Any]:
    """The one model that there is."""
    return {"object": "list", "data": [_model(state)]}


@router.get("/v1/models/{name:path}")
async def model(name: str, state: State) -> dict[str, Any]:
    """That model, or 404."""
    state.require_model(name)
    return _model(state)


def _model(state: ServerState) -> dict[str, Any]:
    engine = state.engine
    return {
        "id": state.model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "prolepsis",
        "max_model_len": None if engine is None else engine.llm.max_context,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeBody, request: Request, state: State) -> Response:
    """Token ids of a text, or of a conversation as the model would read it."""
    state.require_model(body.model)
    tokens = await while_there(request, state.encode_in_turn(body.given, _tokens, state.llm, body))
    note_encoded(request)
    return json_response({"count": len(tokens), "max_model_len": state.llm.max_context, "tokens": tokens})


def _tokens(llm: LLM, body: TokenizeBody) -> list[int]:
    if body.messages is not None:
        messages, tools = messages_of(body.messages), told_tools(body.tools)
        return encode_chat(llm.tokenizer, llm.chat_template, messages, tools=tools, max_tokens=llm.max_context)
    text = body.prompt or ""
    llm.tokenizer.require_at_most(llm.max_context, text)
    return llm.tokenizer.encode(text, add_bos=body.add_special_tokens and llm.tokenizer.add_bos)


@router.post("/detokenize")
async def detokenize(body: DetokenizeBody, request: Request, state: State) -> Response:
    """The text of token ids, control tokens by name."""
    state.require_model(body.model)
    text = await while_there(request, state.encode_in_turn("tokens", _text, state.llm, body.tokens))
    note_encoded(request)
    return json_response({"prompt": text})


def _text(llm: LLM, tokens: list[int]) -> str:
    if not all(0 <= token < llm.tokenizer.vocab_size for token in tokens):
        raise InputError(f"tokens must be ids below {llm.tokenizer.vocab_size}")
    return llm.tokenizer.decode(tokens, skip_special=False)
