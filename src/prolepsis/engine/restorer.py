"""Brings stored K and V of prompts into the pool before their requests are queued."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from threading import Thread, current_thread
from typing import Any

from prolepsis.coding import kv_array
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.threads import limited_to, thread_count
from prolepsis.engine.kv_store import KVStore, StoredPiece
from prolepsis.engine.restore_plan import Reason, RestorePlan
from prolepsis.errors import CapacityError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex

_FEWEST = 32  # tokens that are missing in the pool; fewer are computed sooner than looked up
_SHORTEST_WAIT = 1.0  # seconds that a restore may take in any case
_WORKERS = 4  # prompts that are restored at a time
_FETCHED_AHEAD = 4  # segments of a prompt that are on their way at a time
_PLACED_AHEAD = 2  # segments of a prompt that wait to be written into the pool

Call = Callable[[Callable[[], Any]], "Future[Any]"]
Done = Callable[[RestorePlan], None]


@dataclass(eq=False)
class Restore:
    """A prompt whose K and V are looked for."""

    tokens: list[int]
    """All that may be restored: the last token of a prompt is left out, it has to be run."""
    salt: str
    done: Done
    plan: RestorePlan
    began: float
    deadline: float
    abandoned: bool = False
    """Whether nobody waits for it any more."""


class Restorer:
    """Looks prompts up in `store`, and restores what is worth it, in threads of its own.

    Segments are fetched and decoded there, and written into the pool by the engine's thread, between passes, where the
    prefix index has them from then on and nobody holds them: who is queued finds them, and who needs the room more,
    takes it. All methods are for the engine's thread.
    """

    def __init__(
        self, store: KVStore, cache: PagedKVCache, prefix: PrefixIndex, call: Call, is_busy: Callable[[], bool]
    ) -> None:
        """call: has the engine's thread call something between two passes. is_busy: whether it runs requests."""
        self._store, self._cache, self._prefix, self._call, self._is_busy = store, cache, prefix, call, is_busy
        self._open: dict[Restore, None] = {}
        self._own: list[Thread] = []
        self._workers = ThreadPoolExecutor(_WORKERS, "prolepsis-restore", self._began)
        self._fetchers = ThreadPoolExecutor(_WORKERS * _FETCHED_AHEAD, "prolepsis-fetch", self._began)

    def begin(self, tokens: list[int], salt: str, done: Done) -> Restore | None:
        """Begin to restore, and call `done` with the outcome in the engine's thread; None where too little is missing.

        After a bounded time `done` is called in any case. May raise RuntimeError where no thread can be started.
        """
        held = self._prefix.known([*tokens, 0], salt)
        if len(tokens) - held < _FEWEST:
            return None
        now = time.perf_counter()
        recompute = (len(tokens) - held) * self._store.planner.prefill_s
        deadline = now + max(_SHORTEST_WAIT, 2 * recompute)
        restore = Restore(tokens, salt, done, RestorePlan("nothing_stored", held), now, deadline)
        try:
            self._workers.submit(self._work, restore)
        except BaseException:
            restore.abandoned = True  # the pool queues it before it starts a thread
            raise
        self._open[restore] = None
        return restore

    def cancel(self, restore: Restore) -> None:
        """Nobody waits for it any more; `done` is not called."""
        if restore in self._open:
            restore.done = _ignore
            self._end(restore, "cancelled")

    def seconds_left(self) -> float | None:
        """Until `expire` has something to do; None: it has not."""
        if not self._open:
            return None
        return max(min(restore.deadline for restore in self._open) - time.perf_counter(), 0.0)

    def expire(self) -> None:
        """Give up what takes too long."""
        now = time.perf_counter()
        for restore in [restore for restore in self._open if restore.deadline <= now]:
            self._end(restore, "timed_out")

    def close(self) -> None:
        """Give up everything."""
        for restore in list(self._open):
            self._end(restore, "cancelled")

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Those that `join` waits for."""
        return tuple(self._own)

    def join(self) -> None:
        """Wait for the threads to end, which takes as long as the tiers take that they ask."""
        self._workers.shutdown(cancel_futures=True)
        self._fetchers.shutdown(cancel_futures=True)

    def _end(self, restore: Restore, broken: Reason | None) -> None:
        if self._open.pop(restore, self) is self:
            return
        restore.abandoned = True
        plan = restore.plan
        plan.reason = broken or plan.reason
        plan.seconds = time.perf_counter() - restore.began
        self._store.count.decided(plan.reason)
        restore.done(plan)

    def _began(self) -> None:
        self._own.append(current_thread())

    def _work(self, restore: Restore) -> None:
        """In a thread of its own."""
        try:
            broken = self._restore(restore)
        except Exception:
            if restore.abandoned:  # the engine may have been closed
                return
            self._store.count.failed("restoring")
            broken = "failed"
        self._call(partial(self._end, restore, broken))

    def _restore(self, restore: Restore) -> Reason | None:
        """Returns why it was broken off, if it was."""
        store, held = self._store, restore.plan.pool_tokens
        if (refusal := store.not_worth_asking(restore.tokens, restore.salt, held)) is not None:
            restore.plan = refusal
            return None
        pieces = store.look_up(restore.tokens, restore.salt, held, lambda: restore.abandoned, self._fetchers.map)
        if restore.abandoned:
            return None
        plan = store.planner.decide(held, [piece.piece for piece in pieces], store.predictor)
        restore.plan = plan
        if plan.reason == "recompute_is_faster":
            store.planner.refused([piece.piece for piece in pieces], store.predictor)
        if plan.reason != "restore_is_faster":
            return None
        placed: deque[Future[Reason | None]] = deque()
        for number, (piece, data) in enumerate(self._fetched(pieces)):
            decoded = None if data is None else self._decode(data, piece)
            if restore.abandoned:
                return None
            if decoded is None:
                store.broke_off(pieces[number:])
                return _first_reason(placed) or "damaged"
            kv, plan.predictor = decoded
            placed.append(self._call(partial(self._place, restore, piece, kv)))
            if len(placed) >= _PLACED_AHEAD and (broken := placed.popleft().result()):
                return broken
        return _first_reason(placed)

    def _fetched(self, pieces: list[StoredPiece]) -> Iterator[tuple[StoredPiece, bytes | None]]:
        """The pieces with their bytes, in order; some are fetched ahead."""
        left = iter(pieces)
        ahead = deque(
            (piece, self._fetchers.submit(self._store.fetch, piece)) for piece in islice(left, _FETCHED_AHEAD)
        )
        while ahead:
            piece, data = ahead.popleft()
            yield piece, data.result()
            ahead.extend((more, self._fetchers.submit(self._store.fetch, more)) for more in islice(left, 1))

    def _decode(self, data: bytes, piece: StoredPiece) -> tuple[KV, str] | None:
        with limited_to(1 if self._is_busy() else thread_count()):
            return self._store.decode(data, piece)

    def _place(self, restore: Restore, piece: StoredPiece, kv: KV) -> Reason | None:
        """Write what is missing of a segment into the pool; in the engine's thread. Returns why not, if so."""
        if restore.abandoned:
            return None
        table = self._cache.new_table()
        tokens, stop = restore.tokens[: piece.stop], piece.stop
        try:
            self._prefix.match(table, [*tokens, 0], restore.salt)
            first = table.length
            if first < piece.name.start:
                return "no_room"  # what comes before was evicted meanwhile
            if first < stop:
                self._cache.copy_blocks(table.prepare_write(stop - first))
                table.append(stop - first)
                start = piece.name.start
                self._cache.write(table, first, kv_array.part(kv, first - start, stop - start))
                self._prefix.register(table, tokens, restore.salt, tail=True)
                restore.plan.restored_tokens += stop - first
                self._store.restored(piece)
        except CapacityError:
            return "no_room"
        finally:
            table.release()
        return None


def _first_reason(placed: "deque[Future[Reason | None]]") -> Reason | None:
    """Wait for all of them."""
    return next((broken for future in list(placed) if (broken := future.result())), None)


def _ignore(_: RestorePlan) -> None:
    pass
