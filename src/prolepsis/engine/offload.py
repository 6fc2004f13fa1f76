"""What a store does for the engine's thread: it holds requests back until their prompts are restored, and is told of
those that have ended."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Thread
from weakref import WeakKeyDictionary

from prolepsis.engine.engine import Engine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.request import Request
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.restorer import Restore, Restorer
from prolepsis.engine.store_writer import Call, CopiedSegment, StoreWriter
from prolepsis.engine.task import Task
from prolepsis.errors import IntegrityError

_ROWS_TO_LEARN = 128  # of a pass that only reads prompts; fewer say little of how long many take


class Offload:
    """The store of one engine. All methods but those of `writer` are for the engine's thread."""

    def __init__(self, store: KVStore, engine: Engine, call: Call) -> None:
        """call: has the engine's thread call something between two passes."""
        if engine.prefix is None:
            raise IntegrityError("a store without a prefix index")
        cache = engine.runner.cache
        self.store = store
        self.writer = StoreWriter(store, cache, engine.prefix, call)
        self._restorer = Restorer(store, cache, engine.prefix, call, lambda: engine.has_work)
        self._engine, self._prefix = engine, engine.prefix
        self._open: dict[Request, Restore] = {}
        self._followers: dict[Task, list[Callable[[], None]]] = {}
        self._copied: WeakKeyDictionary[Request, CopiedSegment] = WeakKeyDictionary()
        self._warm = self._learned = False

    def hold_back(self, request: Request, queue: Callable[[], None]) -> bool:
        """Whether a request has to wait; `queue` is called when it need not any more. Not once it was cancelled."""
        if request.leader in self._open:
            self._followers.setdefault(request.leader, []).append(queue)
            return True
        tokens = request.sequence.tokens[:-1]
        restore = self._begin(tokens, request.cache_salt, partial(self._restored, request, queue))
        if restore is None:
            return False
        self._open[request] = restore
        return True

    def copy_at_end(self, request: Request, copied: CopiedSegment) -> None:
        """Have a segment of a request that is not yet queued copied when it ends, before the pool may lose it. For any
        thread."""
        self._copied[request] = copied

    def cancel(self, request: Request) -> None:
        """A request that may have been held back is not to be queued."""
        restore = self._open.pop(request, None)
        if restore is not None:
            self._restorer.cancel(restore)
            request.statistics.restore = restore.plan
            self._queue_followers(request)

    def ended(self, request: Request) -> None:
        """A request has ended, or was cancelled: what the pool has of it is to be stored."""
        tokens = request.sequence.tokens
        copied = self._copied.pop(request, None)
        if copied is not None:
            with suppress(Exception):  # too little memory, say: the writer asks for it again, and whoever saves is told
                copied.kv = self.writer.copy(tokens, request.cache_salt, copied.name.start, copied.name.stop)
        known = self._prefix.known([*tokens, 0], request.cache_salt)
        if known > 0:
            self.writer.add(tokens[:known], request.cache_salt)

    def restore(self, tokens: list[int], salt: str, done: Callable[[RestorePlan], None]) -> bool:
        """Bring `tokens` into the pool, for requests to come. False: they are there, or it fails at once, and `done` is
        not called."""
        return self._begin(tokens, salt, done) is not None

    def stepped(self, rows: int, seconds: float, told: bool) -> None:
        """A pass of so many rows has ended. told: whether it brought tokens."""
        if rows >= _ROWS_TO_LEARN and not told:
            if self._warm:  # the first pass of a process touches its memory for the first time
                self.store.planner.prefilled(rows, seconds, not self._learned)
                self._learned = True
            self._warm = True

    def idle(self, idle: bool) -> None:
        """Whether the engine has nothing to run."""
        self.writer.set_idle(idle)

    def seconds_left(self) -> float | None:
        """Until `expire` has something to do; None: it has not."""
        return self._restorer.seconds_left()

    def expire(self) -> None:
        """Queue those that have waited long enough."""
        self._restorer.expire()

    def close(self) -> None:
        """Held back requests are dropped. What waits to be stored is not stored any more (`StoreWriter.flush`)."""
        self._open.clear()
        self._followers.clear()
        self._restorer.close()
        self.writer.close()

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Those that `join` waits for."""
        return self.writer.thread, *self._restorer.threads

    def join(self) -> None:
        """Wait for the threads to end, once no order is taken any more: nothing uses the store afterwards."""
        self._restorer.join()
        self.writer.join()

    def _begin(self, tokens: list[int], salt: str, done: Callable[[RestorePlan], None]) -> Restore | None:
        try:
            return self._restorer.begin(tokens, salt, done)
        except Exception:  # no thread can be started, say: it is not worth the engine's thread, all can be computed
            self.store.count.failed("beginning to restore")
            return None

    def _restored(self, request: Request, queue: Callable[[], None], plan: RestorePlan) -> None:
        if self._open.pop(request, None) is None:
            return
        request.statistics.restore = plan
        queue()
        self._queue_followers(request)

    def _queue_followers(self, request: Request) -> None:
        for queue in self._followers.pop(request, []):
            queue()
