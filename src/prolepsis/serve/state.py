"""What a server has: the engine, and how far it is."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Depends, Request

from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.completion import Completion
from prolepsis.engine.grammar import Grammar
from prolepsis.engine.llm import LLM
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.serve.admission import Admission
from prolepsis.serve.answer_counts import AnswerCounts
from prolepsis.serve.errors import APIError, blame, retry_after
from prolepsis.serve.limits import OpenRequests
from prolepsis.serve.options import ServeOptions

T = TypeVar("T")
Phase = Literal["loading", "ready", "draining"]
_SOON = retry_after(5)
_WAITING_TEXTS = 16


@dataclass(eq=False)
class ServerState:
    """One for each app, at `app.state.server`; endpoints get it by `Depends(server_state)`.

    `phase` is "loading" until `ready` is called; from "draining" on nothing new is begun.
    """

    options: ServeOptions
    phase: Phase = "loading"
    engine: AsyncEngine | None = None
    """Runs the requests; its `llm` is the model."""
    sessions: StoredSessions | None = None
    """Saved conversations, where there is a store."""
    admission: Admission = field(init=False)
    """Who may wait to be answered by the model."""
    texts: Admission = field(init=False)
    """Who may wait for the tokens of a text, or the text of tokens."""
    requests: OpenRequests = field(default_factory=OpenRequests)
    """Those that are being answered."""
    answers: AnswerCounts = field(default_factory=AnswerCounts)
    """Counts what was answered."""
    started: int = field(default_factory=lambda: int(time.time()))
    """Unix time, in seconds."""
    observers: list[Callable[[Completion], None]] = field(default_factory=list)
    """Each is called, in the event loop, with every completion that has ended, for whatever reason."""
    encoder: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prolepsis-encoder"))
    """The one thread for chat templates and tokenizing, which may take seconds and share their state."""

    compiler: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "prolepsis-compiler"))
    """The one thread for grammars, of which the engine compiles one at a time."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    def __post_init__(self) -> None:
        self.admission = Admission(self.options.max_queue, self.options.max_sequences)
        self.texts = Admission(_WAITING_TEXTS, 1, of="texts to tokenize")
        self.texts.running = 1

    async def encode(self, field: str, function: Callable[..., T], *arguments: Any) -> T:
        """`function(*arguments)` in the thread of `encoder`; an InputError that names no field names `field`."""
        with blame(field):
            return await asyncio.get_running_loop().run_in_executor(self.encoder, partial(function, *arguments))

    async def encode_in_turn(self, field: str, function: Callable[..., T], *arguments: Any) -> T:
        """As `encode`, but only one at a time is queued there, so that chats pass what waits here."""
        async with self._turn:
            return await self.encode(field, function, *arguments)

    async def compile(self, grammar: Grammar | None) -> None:
        """Have the engine know a grammar, if there is one: to compile it takes up to seconds, in which others go on.

        Raises InputError, which names the grammar's source, for one that cannot be compiled.
        """
        if grammar is not None and not self.llm.grammars.has(grammar):
            run = asyncio.get_running_loop().run_in_executor
            await run(self.compiler, self.llm.grammars.matcher, grammar)

    @property
    def model_name(self) -> str:
        """What clients call the model: for a file, its name without the ending."""
        if self.options.served_model_name is not None:
            return self.options.served_model_name
        path = Path(self.options.model)
        if path.suffix == ".gguf":
            return path.stem
        return path.name if path.is_dir() else self.options.model

    def ready(self, engine: AsyncEngine, sessions: StoredSessions | None = None) -> None:
        """The model is loaded."""
        self.engine, self.sessions = engine, sessions
        self.admission.running = engine.llm.engine.max_running
        self.phase = "ready"

    def require_ready(self) -> AsyncEngine:
        """The engine. Raises APIError 503 while there is none, nothing new may begin, or its thread has ended."""
        if self.phase != "ready" or self.engine is None:
            doing = "is shutting down" if self.phase == "draining" else "is still loading the model"
            raise APIError(503, f"the server {doing}; try again later", code=self.phase, headers=_SOON)
        if not self.engine.is_open:
            raise APIError(503, "the engine has failed; the log says why", code="engine_failed", headers=_SOON)
        return self.engine

    def close(self) -> None:
        """End the threads, without waiting for them."""
        for executor in (self.encoder, self.compiler):
            executor.shutdown(wait=False, cancel_futures=True)

    @property
    def llm(self) -> LLM:
        """The model. Raises as `require_ready`."""
        return self.require_ready().llm

    def require_model(self, name: str | None) -> None:
        """Raises APIError 404 unless a request means the model that is served; None does."""
        if name is not None and name != self.model_name:
            raise APIError(
                404,
                f"the model {name!r:.80} does not exist; this server has {self.model_name!r}",
                param="model",
                code="model_not_found",
            )


def server_state(request: Request) -> ServerState:
    """The state of the app that a request came to."""
    state: ServerState = request.app.state.server
    return state


State = Annotated[ServerState, Depends(server_state)]
"""A parameter of an endpoint."""
