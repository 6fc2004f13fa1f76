"""The thread that owns an engine, and the orders it takes from other threads between two passes."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread, current_thread
from typing import NamedTuple, TypeVar

from prolepsis.engine.completion import Delta
from prolepsis.engine.engine import Engine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.offload import Offload
from prolepsis.engine.request import Request
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.task import Task
from prolepsis.errors import ProlepsisError

Result = TypeVar("Result")


class Reader(NamedTuple):
    """Where the deltas of a request go, and the error that ends it."""

    request: Request
    loop: asyncio.AbstractEventLoop
    items: "asyncio.Queue[Delta | Exception]"


_News = list[tuple[Reader, Delta | Exception]]


class _Order(NamedTuple):
    """Something to do between two passes; `refuse` is called instead if the engine is closed before."""

    do: Callable[[], None]
    refuse: Callable[[Exception], None]


class Worker:
    """The thread that owns the engine, and what other threads may ask of it.

    Orders go through a SimpleQueue, which a `__del__` may put to whatever its thread was interrupted at.
    """

    def __init__(self, engine: Engine, store: KVStore | None) -> None:
        self.stopped: Future[None] = Future()
        self.stopped.set_running_or_notify_cancel()  # nobody who waits for it can cancel it
        self._engine = engine
        self._closed = False
        self._failure: BaseException | None = None
        self._orders: SimpleQueue[_Order | None] = SimpleQueue()
        self._readers: dict[Task, Reader] = {}
        self._held_back: dict[Request, Reader] = {}
        self.offload = None if store is None else Offload(store, engine, self.call)
        """What the store does for it."""
        self._thread = Thread(target=self._run, name="prolepsis-engine", daemon=True)
        self._thread.start()

    def require_open(self) -> None:
        """Raises ProlepsisError once the thread takes no orders any more, because it was told so or has failed."""
        if self._closed:
            raise ProlepsisError(f"the engine {self._end_of_it()}") from self._failure

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the thread."""
        return self._failure is not None

    @property
    def is_open(self) -> bool:
        """Whether `require_open` would let pass."""
        return not self._closed

    def add(self, reader: Reader) -> None:
        """Queue a request. Its reader gets InputError if it cannot be. Raises ProlepsisError as `require_open`."""
        self._orders.put(_Order(partial(self._receive, reader), partial(self._refuse, reader)))
        self.require_open()  # afterwards: what was put before the thread said that it is closed is refused by it

    def cancel(self, reader: Reader) -> None:
        """Stop a request before the next pass, if it has not ended."""
        self._orders.put(_Order(partial(self._cancel, reader), partial(self._refuse, reader)))

    def call(self, function: Callable[[], Result]) -> "Future[Result]":
        """Have a function called between two passes. Raises ProlepsisError as `require_open`."""
        future: Future[Result] = Future()
        self._orders.put(_Order(partial(_call, function, future), partial(_refuse, future)))
        self.require_open()
        return future

    def prefetch(self, tokens: list[int], salt: str) -> "Future[RestorePlan | None]":
        """Restore a prompt that nobody asks for. Raises ProlepsisError as `require_open`."""
        future: Future[RestorePlan | None] = Future()
        self._orders.put(_Order(partial(self._prefetch, tokens, salt, future), partial(_refuse, future)))
        self.require_open()
        return future

    def ask_to_stop(self) -> None:
        """Have everything cancelled and the thread end, some time soon."""
        self._orders.put(None)

    def stop(self) -> None:
        """The same, and wait for it."""
        self.ask_to_stop()
        # The garbage collector may run in the thread itself too, or in one that it waits for.
        ours = self._thread, *(self.offload.threads if self.offload is not None else ())
        if current_thread() not in ours:
            self._thread.join()

    def _run(self) -> None:
        try:
            while self._obey():
                self._step()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._end()

    def _obey(self) -> bool:
        """Do what was ordered, waiting for orders where there is nothing to run. False: stop."""
        while True:
            idle, timeout = not self._engine.has_work, None
            if self.offload is not None:
                self.offload.expire()
                idle, timeout = not self._engine.has_work, self.offload.seconds_left()
                self.offload.idle(idle)
            try:
                order = self._orders.get(idle, timeout)
            except Empty:
                if not idle:
                    return True
                continue
            if order is None:
                return False
            order.do()

    def _receive(self, reader: Reader) -> None:
        request = reader.request
        if self.offload is not None and self.offload.hold_back(request, partial(self._release, request)):
            self._held_back[request] = reader
        else:
            self._add(reader)

    def _prefetch(self, tokens: list[int], salt: str, future: "Future[RestorePlan | None]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        if self.offload is None or not self.offload.restore(tokens, salt, future.set_result):
            future.set_result(None)

    def _release(self, request: Request) -> None:
        reader = self._held_back.pop(request, None)
        if reader is not None:
            self._add(reader)

    def _add(self, reader: Reader) -> None:
        try:
            self._engine.add(reader.request)
        except Exception as error:
            self._refuse(reader, error)
        else:
            self._readers[reader.request] = reader

    def _refuse(self, reader: Reader, error: Exception) -> None:
        self._tell([(reader, error)])

    def _cancel(self, reader: Reader) -> None:
        request = reader.request
        if self._readers.pop(request, None) is not None:
            self._engine.cancel(request)
            self._ended(request)
        elif self._held_back.pop(request, None) is not None and self.offload is not None:
            self.offload.cancel(request)

    def _ended(self, task: Task) -> None:
        if self.offload is not None and isinstance(task, Request):
            self.offload.ended(task)

    def _step(self) -> None:
        start, before = time.perf_counter(), self._engine.computed_tokens
        try:
            outputs = self._engine.step()
        except Exception as error:
            self._fail(list(self._readers.values()), f"the pass that the request was in failed: {error!r}", error)
            return
        if self.offload is not None:
            rows = self._engine.computed_tokens - before
            self.offload.stepped(rows, time.perf_counter() - start, told=bool(outputs))
        news: _News = []
        for task, delta in outputs:
            reader = self._readers.get(task)
            if reader is None:
                continue
            if delta is None or delta.finish_reason is not None:
                del self._readers[task]
                self._ended(task)
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

    def _end_of_it(self) -> str:
        return "was closed" if self._failure is None else f"has failed ({self._failure!r})"

    def _fail(self, readers: list[Reader], why: str, cause: BaseException | None = None) -> None:
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
        why = f"the engine {self._end_of_it()} before the request had ended"
        with ExitStack() as last:  # from the last line up, each whatever becomes of the others
            last.callback(self.stopped.set_result, None)
            if self.offload is not None:
                last.callback(self.offload.join)
            last.callback(self._refuse_orders, why)
            last.callback(self._fail_all, why)
            last.callback(setattr, self, "_closed", True)
            if self.offload is not None:
                last.callback(self.offload.close)

    def _fail_all(self, why: str) -> None:
        self._fail([*self._readers.values(), *self._held_back.values()], why)

    def _refuse_orders(self, why: str) -> None:
        with suppress(Empty):
            while True:
                order = self._orders.get(block=False)
                if order is not None:
                    order.refuse(ProlepsisError(why))


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


def _refuse(future: "Future[Result]", error: Exception) -> None:
    if future.set_running_or_notify_cancel():
        future.set_exception(error)


def _error_of(reader: Reader) -> Exception:
    return reader.request.completion.error or ProlepsisError("the request failed")
