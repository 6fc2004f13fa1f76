"""The engine for asyncio: requests of any event loop, run together by one thread."""

import asyncio
import weakref
from collections.abc import Callable
from collections.abc import Sequence as Many
from contextlib import aclosing
from typing import Self, TypeVar

from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.llm import LLM, Prompt
from prolepsis.engine.offload import Offload
from prolepsis.engine.request import Request
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.store_writer import CopiedSegment, SavedChain
from prolepsis.engine.worker import Reader, Worker
from prolepsis.errors import InputError

Result = TypeVar("Result")


class AsyncEngine:
    """Runs requests from event loops together, in a thread that owns the engine of `llm` until `close`.

        async with AsyncEngine(llm) as engine:
            async for delta in engine.generate("The KV cache is", SamplingParams(max_tokens=20)):
                print(delta.text, end="")

    Meanwhile `llm` must not be used in other ways. The thread sleeps while there is nothing to run. One that is neither
    closed nor used any more ends its thread when it is collected, or when the interpreter exits.
    """

    def __init__(self, llm: LLM, store: KVStore | None = None) -> None:
        """store: made for `llm`; prompts are restored from it before they are queued, and what has ended is stored in
        it. Who opened it closes it, after this."""
        self.llm = llm
        self.store = store
        self._worker = Worker(llm.engine, store)
        self._stop = weakref.finalize(self, self._worker.stop)

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended its thread."""
        return self._worker.has_failed

    @property
    def is_open(self) -> bool:
        """Whether it takes requests: not after `close`, nor once its thread has failed."""
        return self._worker.is_open

    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, cache_salt: str = ""
    ) -> "Stream":
        """One completion, token by token. The arguments are those of `LLM.generate`.

        Raises InputError for a prompt or parameters that cannot be used, `n` and `best_of` other than 1 among them, and
        ProlepsisError after `close`. Nothing is queued before the first token is waited for.
        """
        params = params or SamplingParams()
        self._require_sampling(params)
        if params.samples != 1:
            raise InputError(f"n and best_of must be 1, not {params.n} and {params.best_of}: use generate_samples")
        return self.generate_samples(prompt, params, priority=priority, cache_salt=cache_salt)[0]

    def generate_samples(
        self, prompt: Prompt, params: SamplingParams, *, priority: int = 0, cache_salt: str = ""
    ) -> list["Stream"]:
        """As `generate`, the completions that `params` asks for, all `best_of` of them, each with its own iterator."""
        self._require_sampling(params)
        self._worker.require_open()
        tokens = self.llm.encode(prompt)
        requests = self.llm.new_requests(tokens, params, priority=priority, cache_salt=cache_salt)
        self.llm.engine.require_fits(requests[0])
        return [Stream(self, request) for request in requests]

    @staticmethod
    def _require_sampling(params: object) -> None:
        if not isinstance(params, SamplingParams):
            raise InputError(f"only SamplingParams can be streamed, not {params!r}; LLM.generate searches")

    async def call(self, function: Callable[[], Result]) -> Result:
        """Have the engine's thread call `function` before the next pass, or now if nothing runs, and return its result.

        Everything stands still meanwhile, so it is to be short. Raises what it raises, and ProlepsisError after
        `close`.
        """
        return await asyncio.wrap_future(self._worker.call(function))

    async def prefetch(self, tokens: Many[int], cache_salt: str = "") -> RestorePlan | None:
        """Bring K and V of `tokens` from the store into the pool, as for a request that continues them.

        Returns what became of it; None where there is no store, or the pool has them. Raises ProlepsisError after
        `close`.
        """
        return await asyncio.wrap_future(self._worker.prefetch(list(tokens), cache_salt))

    async def store_now(self, tokens: Many[int], cache_salt: str = "") -> SavedChain:
        """Store K and V of `tokens`, to the last one, before all else that waits to be stored. See `SavedChain`.

        What neither store nor pool has is left out: that has to be computed first. Raises InputError where there is no
        store, and ProlepsisError after `close`.
        """
        return await asyncio.wrap_future(self._offload().writer.save(list(tokens), cache_salt))

    async def compute_and_store(self, tokens: Many[int], cache_salt: str = "", stored: int = 0) -> SavedChain:
        """As `store_now`, once the model has run `tokens`. However crowded the pool is, the segment that follows the
        first `stored` ones is stored: it is copied before anything else runs."""
        offload, tokens = self._offload(), list(tokens)
        names = offload.store.names(tokens, cache_salt)
        copied = CopiedSegment(names[stored]) if stored < len(names) else None
        stream = self.generate(tokens, SamplingParams(max_tokens=1), cache_salt=cache_salt)
        if copied is not None:
            offload.copy_at_end(stream._request, copied)
        async with aclosing(stream):
            async for _ in stream:
                pass
        return await asyncio.wrap_future(offload.writer.save(tokens, cache_salt, copied))

    def _offload(self) -> Offload:
        if self._worker.offload is None:
            raise InputError("the engine has no store")
        return self._worker.offload

    async def flush(self, timeout: float | None = None) -> bool:
        """Store all that has ended, at full speed, which `close` does not. Returns whether it is done, after `timeout`
        seconds at the latest; where there is no store, at once."""
        offload = self._worker.offload
        return offload is None or await asyncio.to_thread(offload.writer.flush, timeout)

    def when_ended(self, call: Callable[[], None]) -> None:
        """Have `call` called once the thread has ended, for whatever reason; in some thread, or at once."""
        self._worker.stopped.add_done_callback(lambda _: call())

    async def close(self) -> None:
        """Cancel what runs, whose readers get a ProlepsisError, and end the thread. May be called more than once."""
        self._worker.ask_to_stop()
        await asyncio.wrap_future(self._worker.stopped)
        self._stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class Stream:
    """The deltas of one request, which is queued when the first is waited for. For one event loop.

    The request is cancelled, and its blocks are free before the next pass, once the iterator is closed or dropped (as
    leaving the loop does where nothing else refers to it), or waiting for it is cancelled or timed out. A slow reader
    holds nobody up: what it has not read waits, and that is never more than `max_tokens` deltas.
    """

    def __init__(self, engine: AsyncEngine, request: Request) -> None:
        self._engine, self._request = engine, request  # the engine's thread runs as long as anything refers to it
        self._reader: Reader | None = None
        self._ended = False

    @property
    def completion(self) -> Completion:
        """All there is so far, with statistics. It may be ahead of what was read."""
        return self._request.completion

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        """Raises InputError where the cache could never hold the request, and whatever else made it fail."""
        if self._ended:
            raise StopAsyncIteration
        try:
            item = await self._next()
        except BaseException:
            self.close()
            raise
        self._ended = isinstance(item, Exception) or item.finish_reason is not None
        if isinstance(item, Exception):
            raise item
        return item

    async def _next(self) -> "Delta | Exception":
        if self._reader is None:
            self._reader = Reader(self._request, asyncio.get_running_loop(), asyncio.Queue())
            self._engine._worker.add(self._reader)
        return await self._reader.items.get()

    async def read(self) -> list[Delta]:
        """All deltas that are there by now, waiting for the first; none once the request has ended.

        Raises as `__anext__` does, after what came before the failure was read.
        """
        try:
            deltas = [await anext(self)]
        except StopAsyncIteration:
            return []
        while self._reader is not None and not self._ended and not self._reader.items.empty():
            item = self._reader.items.get_nowait()
            if isinstance(item, Exception):
                self._reader.items.put_nowait(item)
                break
            deltas.append(item)
            self._ended = item.finish_reason is not None
        return deltas

    def close(self) -> None:
        """Cancel the request, if it runs; the iterator has ended then."""
        if self._reader is not None and not self._ended:
            self._engine._worker.cancel(self._reader)
        self._ended = True

    async def aclose(self) -> None:
        """As `close`, for `contextlib.aclosing`."""
        self.close()

    def __del__(self) -> None:
        self.close()
