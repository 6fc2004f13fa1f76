"""/v1/sessions: conversations kept in the store with their K and V, each of the key it was saved with.

POST   /v1/sessions               save {"id", "messages" or "prompt"}, in place of what has that id
GET    /v1/sessions               those there are, the latest first, without their messages
GET    /v1/sessions/{id}          all of one but its K and V
POST   /v1/sessions/{id}/restore  bring its K and V into the pool, for a request that goes on with it
DELETE /v1/sessions/{id}
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response

from prolepsis.engine.identity import identity
from prolepsis.engine.llm import LLM
from prolepsis.engine.session_manifest import SessionSummary, StoredSession
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.errors import CapacityError, InputError, TierError
from prolepsis.model.chat_template import encode_chat
from prolepsis.serve.answers import json_response
from prolepsis.serve.auth import tenant_of
from prolepsis.serve.errors import APIError, retry_after
from prolepsis.serve.messages import messages_of
from prolepsis.serve.presence import while_there
from prolepsis.serve.schemas import RestoreBody, SessionBody
from prolepsis.serve.state import ServerState, State
from prolepsis.serve.tools import told_tools

router = APIRouter()
_LONGEST_ID = 64


@router.post("/v1/sessions")
async def save(body: SessionBody, request: Request, state: State) -> Response:
    """Keep a conversation, or a prompt; its K and V are computed if need be."""
    sessions, tenant = _sessions(state), tenant_of(request)
    _check_id(body.id)
    tokens = await while_there(request, state.encode(body.given, _tokens, state.llm, body))
    salt = tenant.cache_salt(body.cache_salt)
    try:
        saving = sessions.save(tenant.owner, body.id, body.messages or [], tokens, cache_salt=salt)
        saved = await while_there(request, saving)
    except CapacityError as error:
        raise APIError(503, str(error), code="no_room", headers=retry_after(10)) from error
    return json_response(_summary(saved.summary))


@router.get("/v1/sessions")
async def list_(request: Request, state: State) -> Response:
    """Those of the key."""
    found = await _sessions(state).list(tenant_of(request).owner)
    return json_response({"object": "list", "data": [_summary(each) for each in found]})


@router.get("/v1/sessions/{id_}")
async def inspect(id_: str, request: Request, state: State) -> Response:
    """One of them, or 404."""
    with _tiers_answer():
        session = await _sessions(state).inspect(tenant_of(request).owner, _check_id(id_))
    if session is None:
        raise _unknown(id_)
    return json_response(_whole(session, state.llm))


@router.post("/v1/sessions/{id_}/restore")
async def restore(id_: str, request: Request, state: State, body: RestoreBody | None = None) -> Response:
    """Bring it back, as far as that is faster than computing it."""
    tenant = tenant_of(request)
    salt = tenant.cache_salt(body.cache_salt if body is not None else "")
    with _tiers_answer():
        found = await _sessions(state).restore(tenant.owner, _check_id(id_), cache_salt=salt)
    if found is None:
        raise _unknown(id_)
    session, plan = found
    restored = 0 if plan is None else plan.restored_tokens
    told = {"restored_tokens": restored, "plan": None if plan is None else plan.summary()}
    return json_response(_summary(session.summary) | told)


@router.delete("/v1/sessions/{id_}")
async def delete(id_: str, request: Request, state: State) -> Response:
    """Forget one, and what of its K and V no other session has."""
    with _tiers_answer():
        deleted = await _sessions(state).delete(tenant_of(request).owner, _check_id(id_))
    if not deleted:
        raise _unknown(id_)
    return json_response({"id": id_, "object": "session", "deleted": True})


@contextmanager
def _tiers_answer() -> Iterator[None]:
    """503 where a tier that may have the session does not."""
    try:
        yield
    except TierError as error:
        raise APIError(503, str(error), code="store_unavailable", headers=retry_after(10)) from error


def _sessions(state: ServerState) -> StoredSessions:
    state.require_ready()
    if state.sessions is None:
        raise APIError(404, "sessions are kept in a store: start the server with --store", code="no_store")
    return state.sessions


def _check_id(id_: str) -> str:
    """An id is a name for people. It is hashed before it names anything, and has to survive in a URL."""
    if not (1 <= len(id_) <= _LONGEST_ID and id_.isprintable() and "/" not in id_ and id_.strip(". ") == id_):
        raise InputError(
            f"id must have 1 to {_LONGEST_ID} printable characters without /, and no space or dot at either end, "
            f"not {id_!r:.80}",
            field="id",
        )
    return id_


def _tokens(llm: LLM, body: SessionBody) -> list[int]:
    """Ids of all of it: of a conversation up to where the user, or the assistant, goes on."""
    if body.messages is None:
        prompt = body.prompt
        if not isinstance(prompt, str) and not (isinstance(prompt, list) and all(type(each) is int for each in prompt)):
            raise InputError("prompt must be a text or a list of token ids", field="prompt")
        return llm.encode(prompt)
    messages = messages_of(body.messages)
    answered = messages[-1]["role"] == "assistant"
    tokens = encode_chat(
        llm.tokenizer,
        llm.chat_template,
        messages,
        add_generation_prompt=not answered,
        tools=told_tools(body.tools),
        max_tokens=llm.max_context,
    )
    llm.check_prompt(tokens)
    return tokens


def _summary(session: SessionSummary) -> dict[str, Any]:
    return {
        "id": session.id,
        "object": "session",
        "created": int(session.created),
        "tokens": session.tokens,
        "message_count": session.messages,
        "raw_bytes": session.raw_bytes,
        "coded_bytes": session.coded_bytes,
        "pinned": session.pinned,
        "model": session.model,
    }


def _whole(session: StoredSession, llm: LLM) -> Mapping[str, Any]:
    segments = [{"tokens": part.tokens, "coded_bytes": part.coded_bytes} for part in session.parts]
    readable = not session.messages and session.model == identity(llm)  # another model has other tokens
    prompt = llm.tokenizer.decode(session.tokens, skip_special=False) if readable else None
    return _summary(session.summary) | {"messages": session.messages, "prompt": prompt, "segments": segments}


def _unknown(id_: str) -> APIError:
    return APIError(404, f"there is no session {id_!r:.80}", param="id", code="session_not_found")
