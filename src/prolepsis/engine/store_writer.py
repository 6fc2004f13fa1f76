"""The thread that codes what requests have left in the pool, and puts it into the store, out of the engine's way."""

import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from threading import Condition, Thread
from typing import Any, NamedTuple

from prolepsis.coding import kv_array
from prolepsis.coding.cache_dtypes import KV
from prolepsis.coding.profile import GRID
from prolepsis.coding.threads import pause, pausing
from prolepsis.engine.kv_names import SegmentName
from prolepsis.engine.kv_store import KVStore, StoredSegment
from prolepsis.errors import ProlepsisError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex

DUTY = 0.04
"""Share of a core's time that is spent on coding while the engine runs requests."""

_SLICE_S = 0.2e-3  # of coding at a time
_PIECE = 64  # tokens copied at a time, where blocks are no larger
_MOST_WAITING = 256  # sequences; what comes beyond is missed
_FEWEST = 16  # tokens of a last segment that are worth a place; computing fewer takes no time

Call = Callable[[Callable[[], Any]], "Future[Any]"]


class SavedChain(NamedTuple):
    """The segments of a sequence that are stored, in order; `whole`: that is all of them."""

    segments: list[StoredSegment]
    whole: bool


@dataclass(eq=False)
class CopiedSegment:
    """A segment that is copied out of the pool by the engine's thread as soon as it is computed. None: not yet."""

    name: SegmentName
    kv: KV | None = None


@dataclass
class _Chain:
    """A sequence to store. fewest: tokens of a last segment that is stored. urgent: somebody waits for `done`.
    copied: a segment of it that is not asked of the pool any more.
    """

    tokens: list[int]
    salt: str
    fewest: int = _FEWEST
    urgent: bool = False
    copied: CopiedSegment | None = None
    done: "Future[SavedChain]" = field(default_factory=lambda: _running())


class StoreWriter:
    """Stores sequences whose K and V are in the pool, one segment at a time.

    A segment is copied out of the pool by the engine's thread, some tokens between two passes, when this thread asks
    for them, and coded and put here. While the engine runs requests, this thread works for a fraction of a millisecond
    at a time, and sleeps so long after each that it takes `DUTY` of a core. When the engine has nothing to do, however
    short, it wakes and ends the segment at full speed: few others are stored where one request follows another. What
    was evicted before its turn is counted as missed.
    """

    def __init__(self, store: KVStore, cache: PagedKVCache, prefix: PrefixIndex, call: Call) -> None:
        """call: has the engine's thread call something between two passes."""
        self._store, self._cache, self._prefix, self._call = store, cache, prefix, call
        self._waiting: deque[_Chain] = deque()
        self._changed = Condition()
        self._at_work: _Chain | None = None
        self._left = 0  # segments of that one
        self._idle = self._closed = False
        self._flushing = 0
        self._rested = 0.0  # when it has last rested, in the time of its thread
        self._hurries = False  # for the rest of a segment
        store.queued = self._queued
        self.thread = Thread(target=self._run, name="prolepsis-store", daemon=True)
        self.thread.start()

    def add(self, tokens: list[int], salt: str) -> None:
        """Store a sequence some time soon; the engine's thread calls this when a request has ended."""
        with self._changed:
            if self._closed:
                return
            if len(self._waiting) >= _MOST_WAITING:
                self._store.count.add(missed_segments=-(-len(tokens) // GRID))
                return
            self._waiting.append(_Chain(tokens, salt))
            self._changed.notify_all()

    def save(self, tokens: list[int], salt: str, copied: CopiedSegment | None = None) -> "Future[SavedChain]":
        """Store a sequence before all others, to its last token. copied: a segment of it."""
        chain = _Chain(tokens, salt, fewest=1, urgent=True, copied=copied)
        with self._changed:
            if self._closed:
                raise ProlepsisError("the engine is closed")
            self._waiting.appendleft(chain)
            self._changed.notify_all()
        return chain.done

    def flush(self, timeout: float | None = None) -> bool:
        """Store all that waits, at full speed. Returns whether it is done, after `timeout` seconds at the latest."""
        with self._changed:
            self._flushing += 1
            self._changed.notify_all()
            try:
                self._changed.wait_for(lambda: self._closed or self._is_done(), timeout)
                return self._is_done()
            finally:
                self._flushing -= 1

    def set_idle(self, idle: bool) -> None:
        """Whether the engine has nothing to do; its thread says so."""
        if idle != self._idle:
            with self._changed:
                self._idle = idle
                self._hurries |= idle
                self._changed.notify_all()

    def close(self) -> None:
        """Leave what waits, and end the thread some time soon."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def join(self) -> None:
        """Wait until the thread has ended, which takes a segment at most."""
        self.thread.join()

    def _queued(self) -> int:
        with self._changed:
            return self._left + sum(-(-len(chain.tokens) // GRID) for chain in self._waiting)

    def _run(self) -> None:
        while (chain := self._next()) is not None:
            try:
                saved = self._store_chain(chain)
            except Exception as error:
                if not self._closed:
                    self._store.count.failed("storing")
                chain.done.set_exception(error)
            else:
                if saved is not None:
                    chain.done.set_result(saved)
        for left in self._waiting:
            left.done.set_exception(ProlepsisError("the engine was closed before the sequence was stored"))

    def _next(self) -> _Chain | None:
        with self._changed:
            self._at_work, self._left = None, 0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._closed or self._waiting)
            if self._closed:
                return None
            self._at_work = self._waiting.popleft()
            return self._at_work

    def _store_chain(self, chain: _Chain) -> SavedChain | None:
        """None where it gave way."""
        stored: list[StoredSegment] = []
        try:
            return self._store_segments(chain, stored)
        finally:
            self._store.used(stored)

    def _store_segments(self, chain: _Chain, stored: list[StoredSegment]) -> SavedChain | None:
        """Adds what is stored to `stored`. None where it gave way."""
        names = self._store.names(chain.tokens, chain.salt)
        for number, name in enumerate(names):
            self._left = len(names) - number
            if self._gives_way(chain):
                return None
            if name.stop - name.start < min(chain.fewest, GRID):
                return SavedChain(stored, False)
            found = self._store.located(name) or self._store_segment(chain, name)
            if found is None:
                return SavedChain(stored, False)
            if found is _MISSED:
                self._store.count.add(missed_segments=0 if chain.urgent else len(names) - number)
                return SavedChain(stored, False)
            stored.append(found)
        return SavedChain(stored, True)

    def _store_segment(self, chain: _Chain, name: SegmentName) -> StoredSegment | None:
        kv = self._kv_of(chain, name)
        if kv is None:
            return _MISSED
        with self._changed:
            self._hurries = chain.urgent or self._may_hurry()
        self._rested = time.thread_time()
        with pausing(self._rest):
            stored = self._store.put(name, chain.tokens[name.start : name.stop], kv)
            pause()
        return stored

    def _kv_of(self, chain: _Chain, name: SegmentName) -> KV | None:
        """K and V of a segment, or None where the pool has lost some; a piece between two passes, which it delays."""
        copied = chain.copied
        if copied is not None and copied.kv is not None and copied.name.key == name.key:
            return copied.kv
        step, parts = max(_PIECE, self._cache.block_size), list[KV]()
        for start in range(name.start, name.stop, step):
            stop = min(start + step, name.stop)
            part = self._call(partial(self.copy, chain.tokens, chain.salt, start, stop)).result()
            if part is None:
                return None
            parts.append(part)
        return kv_array.joined(parts)

    def copy(self, tokens: list[int], salt: str, start: int, stop: int) -> KV | None:
        """K and V of some tokens, or None where the pool has lost some; in the engine's thread."""
        table = self._cache.new_table()
        try:
            self._prefix.match(table, [*tokens[:stop], 0], salt)
            return self._cache.read(table, start, stop) if table.length >= stop else None
        finally:
            table.release()

    def _rest(self) -> None:
        """Leave the cores to the engine, while it needs them and nobody waits."""
        worked = time.thread_time() - self._rested
        if self._hurries or worked < _SLICE_S:
            return
        with self._changed:
            self._changed.wait_for(lambda: self._hurries or self._may_hurry(), worked * (1 / DUTY - 1))
        self._rested = time.thread_time()

    def _gives_way(self, chain: _Chain) -> bool:
        """Put the chain behind those that somebody waits for, if there are any: the pool may lose theirs soon."""
        with self._changed:
            urgent = sum(other.urgent for other in self._waiting)
            if chain.urgent or not urgent:
                return False
            self._waiting.insert(urgent, chain)
            return True

    def _may_hurry(self) -> bool:
        asked = bool(self._waiting) and self._waiting[0].urgent
        return self._closed or self._idle or self._flushing > 0 or asked

    def _is_done(self) -> bool:
        return not self._waiting and self._at_work is None


def _running() -> "Future[SavedChain]":
    """One that those who wait for it cannot cancel."""
    future: Future[SavedChain] = Future()
    future.set_running_or_notify_cancel()
    return future


_MISSED = StoredSegment("", 0, 0)
"""Stands for a segment that the pool does not hold any more."""
