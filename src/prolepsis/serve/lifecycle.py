"""From start to end of a server process."""

import asyncio
import errno
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from math import ceil
from threading import Thread

import uvicorn

from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.llm import LLM
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.serve.app import create_app
from prolepsis.serve.banner import banner
from prolepsis.serve.browsers import is_loopback
from prolepsis.serve.connections import limited_protocol
from prolepsis.serve.logs import Level, json_line, logging_on, write_line
from prolepsis.serve.middleware import guarded
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState
from prolepsis.store import Tiers, open_tiers

_INTERRUPTED = 130
_OF_THE_PORT = (errno.EADDRINUSE, errno.EACCES)  # taken, or below 1024 and not for this user
_LEAST_FLUSH_S = 5.0  # for the store, even where streams are not waited for
_WATCHERS_S = 2  # for streams that show the server to notice that it ends
_ONE_SIGNAL_S = 1.0  # `timeout` and supervisors signal the process and its group, so that it comes twice
_LAST_ANSWERS_S = 5  # for streams that were ended to say so, after the drain timeout


def run(options: ServeOptions, load: Callable[[], LLM]) -> None:
    """Serve until SIGTERM or SIGINT, then let what is open end. `load` makes the model, in a thread of its own.

    The port answers at once, with 503 until the model is there. Raises InputError for an address that cannot be
    listened on, and whatever `load` raises. A second signal, more than a second later, ends the process at once, with
    exit code 130. Raises ProlepsisError if the engine's thread has ended of itself.
    """
    asyncio.run(_Process(options, load).serve())


class _Server(uvicorn.Server):
    """Leaves signals alone."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Process:
    """One run of a server."""

    def __init__(self, options: ServeOptions, load: Callable[[], LLM]) -> None:
        self._options, self._load_model = options, load
        self._state = ServerState(options)
        self._engine: AsyncEngine | None = None
        self._failure: BaseException | None = None
        self._told_at = 0.0
        self._server = _Server(_config(self._state))

    async def serve(self) -> None:
        """See `run`."""
        with logging_on(as_json=self._options.log_json):
            await self._serve(_listen(self._options.host, self._options.port))
        if self._failure is not None:
            raise self._failure

    async def _serve(self, listener: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(signum, self._on_signal)
        self._say(f"listening on {_url(listener)}, loading {self._state.model_name}")
        if not self._options.api_keys and not is_loopback(self._options.host):
            self._say("WARNING: anyone who can reach this address can use the server: it has no --api-key", "warning")
        Thread(target=self._load, name="prolepsis-loader", daemon=True).start()
        try:
            await self._server.serve([listener])
        finally:
            await self._close()

    def _load(self) -> None:
        start = time.monotonic()
        try:
            # The tiers first: what is wrong with them shows at once.
            tiers = open_tiers(self._options.stores) if self._options.stores else None
            self._engine = _new_engine(self._load_model, tiers, self._options.store_predictor)
            sessions = None if self._engine.store is None else StoredSessions(self._engine)
        except BaseException as error:
            self._tell(self._failed, error)
        else:
            self._tell(self._loaded, sessions, time.monotonic() - start)

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the server has ended meanwhile
            self._loop.call_soon_threadsafe(call, *arguments)

    def _loaded(self, sessions: StoredSessions | None, seconds: float) -> None:
        if self._state.phase == "loading" and self._engine is not None:
            self._state.ready(self._engine, sessions)
            self._engine.when_ended(partial(self._tell, self._engine_ended))
            for line in banner(self._engine):
                self._say(line)
            self._say(f"ready after {seconds:.1f} s")

    def _engine_ended(self) -> None:
        if self._engine is not None and self._engine.has_failed:
            self._failed(ProlepsisError("the engine has failed, see above; the server ends with it"))

    def _failed(self, error: BaseException) -> None:
        self._failure = error
        self._server.should_exit = True

    def _on_signal(self) -> None:
        if self._state.phase == "draining":
            if self._loop.time() - self._told_at > _ONE_SIGNAL_S:
                sys.stderr.flush()
                os._exit(_INTERRUPTED)
            return
        self._state.phase, self._told_at = "draining", self._loop.time()
        self._server.should_exit = True
        requests, timeout = self._state.requests, self._options.drain_timeout
        why = "the server is shutting down"
        self._loop.call_later(min(_WATCHERS_S, timeout), requests.end, why, lambda method: method != "POST")
        self._loop.call_later(timeout, requests.end, f"{why}, and has waited {timeout:g} s (--drain-timeout)")
        self._say(f"shutting down; {len(requests)} open requests have {timeout:g} s, a second signal ends them at once")

    async def _close(self) -> None:
        self._state.close()
        engine = self._engine
        if engine is None:
            return
        if not await engine.flush(max(self._options.drain_timeout, _LEAST_FLUSH_S)):
            self._say("not all K and V that could have been stored were: there was no more time", "warning")
        await engine.close()
        if engine.store is not None:
            await asyncio.to_thread(engine.store.close)

    def _say(self, what: str, level: Level = "info") -> None:
        write_line(json_line(level, what) if self._options.log_json else f"prolepsis: {what}")


def _new_engine(load: Callable[[], LLM], tiers: Tiers | None, predictor: str) -> AsyncEngine:
    try:
        llm = load()
        llm.prepare_grammars()  # now, and not while the first request for one waits
        return AsyncEngine(llm, None if tiers is None else KVStore(llm, tiers, predictor=predictor))
    except BaseException:
        if tiers is not None:
            tiers.close()
        raise


def _config(state: ServerState) -> uvicorn.Config:
    options = state.options
    return uvicorn.Config(
        guarded(create_app(state), state),
        http=limited_protocol(options.max_connections, options.header_timeout, options.send_timeout),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=options.keep_alive_timeout,
        timeout_graceful_shutdown=ceil(options.drain_timeout) + _LAST_ANSWERS_S,
        h11_max_incomplete_event_size=options.max_header,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=1024)
    except OSError as error:
        # What the error itself says of an address that is taken names it again, as Python writes a tuple.
        of_name = isinstance(error, socket.gaierror)
        why = error.strerror if of_name or error.errno is None else os.strerror(error.errno)
        advice = "; choose another --port, 0 takes a free one" if error.errno in _OF_THE_PORT else ""
        raise InputError(f"cannot listen on {host}, port {port}: {why}{advice}") from None


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
