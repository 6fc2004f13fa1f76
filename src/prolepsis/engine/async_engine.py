"""The engine for asyncio: requests of any event loop, run together by one thread."""

import asyncio
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import NamedTuple, Self, TypeVar

from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.engine import Engine
from prolepsis.engine.llm import LLM, Prompt
from prolepsis.engine.request import Request
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.task import Task
from prolepsis.errors import InputError, ProlepsisError

Result = TypeVar("Result")


class AsyncEngine:
    """Runs requests from event loops together, in a thread that owns the engine of `llm` until `close`.

        async with AsyncEngine(llm) as engine:
            async for delta in engine.generate("The KV cache is", SamplingParams(max_tokens=20)):
                print(delta.text, end="")

    Meanwhile `llm` must not be used in other ways. The thread sleeps while there is nothing to run. One that is neither
    closed nor used any more ends its thread when it is collected, or when the interpreter exits.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self._worker = _Worker(llm.engine)
        self._stop = weakref.finalize(self, self._worker.stop)

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
        self._reader: _Reader | None = None
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
            self._reader = _Reader(self._request, asyncio.get_running_loop(), asyncio.Queue())
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


class _Reader(NamedTuple):
    """Where the deltas of a request go, and the error that ends it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: "asyncio.Queue[Delta | Exception]"


_News = list[tuple[_Reader, Delta | Exception]]


class _Order(NamedTuple):
    """Something to do between two passes; `refuse` is called instead if the engine is closed before."""

    do: Callable[[], None]
    refuse: Callable[[Exception], None]


class _Worker:
    """The thread that owns the engine, and what other threads may ask of it.

    Orders go through a SimpleQueue, which a `__del__` may put to whatever its thread was interrupted at.
    """

    def __init__(self, engine: Engine) -> None:
        self.stopped: Future[None] = Future()
        self.stopped.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._engine = engine
        self._closed = False
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._readers: dict[Task, _Reader] = {}
        self._thread = Thread(target=self._run, name="prolepsis-engine", daemon=True)
        self._thread.start()

    def require_open(self) -> None:
        """Raises ProlepsisError once the thread takes no orders any more."""
        if self._closed:
            raise ProlepsisError("the engine is closed")

    def add(self, reader: _Reader) -> None:
        """Queue a request. Its reader gets InputError if it cannot be. Raises ProlepsisError as `require_open`."""
        self._orders.put(_Order(partial(self._add, reader), partial(self._refuse, reader)))
        self.require_open()

    def cancel(self, reader: _Reader) -> None:
        """Stop a request before the next pass, if it has not ended."""
        self._orders.put(_Order(partial(self._cancel, reader), partial(self._refuse, reader)))

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Have a function called between two passes. Raises ProlepsisError as `require_open`."""
        future: Future[Result] = Future()
        self._orders.put(_Order(partial(_call, function, future), partial(_fail, future)))
        self.require_open()
        return future

    def ask_to_stop(self) -> None:
        """Have everything cancelled and the thread end, some time soon."""
        self._orders.put(None)

    def stop(self) -> None:
        """The same, and wait for it."""
        self.ask_to_stop()
        if current_thread() is not self._thread:  # where the garbage collector may run too
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        finally:
            self._end()

    def _obey(self) -> bool:
        """Do what was ordered, waiting for orders where there is nothing to run. False: stop."""
        while True:
            try:
                order = self._orders.get(block=not self._engine.has_work)
            except Empty:
                return True
            if order is None:
                return False
            order.do()

    def _add(self, reader: _Reader) -> None:
        try:
            self._engine.add(reader.request)
        except Exception as error:
            self._refuse(reader, error)
        else:
            self._readers[reader.request] = reader

    def _refuse(self, reader: _Reader, error: Exception) -> None:
        self._tell([(reader, error)])

    def _cancel(self, reader: _Reader) -> None:
        if self._readers.pop(reader.request, None) is not None:
            self._engine.cancel(reader.request)

    def _step(self) -> None:
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._fail_all(f"the pass that the request was in failed: {error!r}", error)
            return
        news: _News = []
        for task, delta in outputs:
            reader = self._readers.get(task)
            if reader is None:
                continue
            if delta is None or delta.finish_reason is not None:
                del self._readers[task]
            news.append((reader, delta if delta is not None else _error_of(reader)))
        self._tell(news)

    def _tell(self, news: _News) -> None:
        """Hand over to each event loop what is new, all at once; whose loop is closed is cancelled."""
        by_loop: defaultdict[asyncio.AbstractEventLoop, _News] = defaultdict(list)
        for reader, item in news:
            by_loop[reader.loop].append((reader, item))
        for loop, part in by_loop.items():
            try:
                loop.call_soon_threadsafe(_hand_over, part)
            except RuntimeError:
                for reader, _ in part:
                    self._cancel(reader)

    def _fail_all(self, why: str, cause: BaseException | None = None) -> None:
        readers = list(self._readers.values())
        news: _News = []
        for reader in readers:
            error = ProlepsisError(why)
            error.__cause__ = cause
            news.append((reader, error))
        try:
            for reader in readers:
                self._cancel(reader)
        finally:
            self._tell(news)

    def _end(self) -> None:
        why = "the engine was closed before the request had ended"
        self._closed = True
        try:
            self._fail_all(why)
            while True:
                order = self._orders.get(block=False)
                if order is not None:
                    order.refuse(ProlepsisError(why))
        except Empty:
            pass
        finally:
            self.stopped.set_result(None)


def _hand_over(news: _News) -> None:
    for reader, item in news:
        reader.items.put_nowait(item)


def _call(function: Callable[[], Result], future: "Future[Result]") -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:
        future.set_exception(error)


def _fail(future: "Future[Result]", error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _error_of(reader: _Reader) -> Exception:
    return reader.request.completion.error or ProlepsisError("the request failed")
