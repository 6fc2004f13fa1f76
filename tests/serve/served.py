"""A server in a thread, seen as a client sees it and from within."""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import openai
import uvicorn

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.completion import Completion
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.serve.app import create_app
from prolepsis.serve.middleware import guarded
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState
from prolepsis.store import open_tiers

PATIENCE_S = 30
T = TypeVar("T")


@dataclass
class Served:
    """A server that runs, as a client sees it, and from within."""

    state: ServerState
    url: str
    ended: list[Completion] = field(default_factory=list)
    """Completions in the order in which they ended."""
    _news: threading.Condition = field(default_factory=threading.Condition)

    def observe(self, completion: Completion) -> None:
        with self._news:
            self.ended.append(completion)
            self._news.notify_all()

    def client(self, **settings: Any) -> openai.OpenAI:
        """It asks once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, **settings)

    def async_client(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    def wait_for(self, completions: int) -> None:
        """Until so many have ended since `ended` was cleared."""
        with self._news:
            assert self._news.wait_for(lambda: len(self.ended) >= completions, PATIENCE_S)

    def wait_until_nothing_is_open(self) -> None:
        """Until every request is off the books, which is after its answer has come."""
        deadline = time.monotonic() + PATIENCE_S
        while self.state.requests or self.state.admission.open or self.state.texts.open:
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def within(self, function: Callable[[], Any]) -> Any:
        """What `function` returns in the engine's thread, between two passes."""
        assert self.state.engine is not None
        return run(self.state.engine.call(function))


def run(work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns. In a thread of its own, because Playwright runs an event loop in the main one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


@contextmanager
def serving(model: Path, **options: Any) -> Iterator[Served]:
    """A model as "tiny", on a free port, with these `ServeOptions`; no block is left in use."""
    state = ServerState(ServeOptions(model="tiny", **options))
    llm = LLM(model, threads=1)
    store = KVStore(llm, open_tiers(state.options.stores)) if state.options.stores else None
    engine = AsyncEngine(llm, store)
    state.ready(engine, None if store is None else StoredSessions(engine))
    config = uvicorn.Config(
        guarded(create_app(state), state), port=0, lifespan="off", log_config=None, access_log=False
    )
    server = _Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    assert server.ready.wait(PATIENCE_S)
    port = server.servers[0].sockets[0].getsockname()[1]
    served = Served(state, f"http://127.0.0.1:{port}")
    state.observers.append(served.observe)
    yield served
    server.should_exit = True
    thread.join()
    run(engine.close())
    if store is not None:
        store.close()
    state.close()
    llm.kv_cache.check([])
    assert llm.kv_cache.pool.num_used == 0


class _Server(uvicorn.Server):
    """Says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.ready.set()
