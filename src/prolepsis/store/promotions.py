"""Entries on their way from a slow tier into faster ones."""

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prolepsis.store.watched_tier import WatchedTier

_MOST_BYTES = 64 << 20


class _Promotion(NamedTuple):
    data: bytes
    tiers: Sequence[WatchedTier]


class Promotions:
    """Puts entries into faster tiers in a thread of its own, which lives while there are any: readers do not wait.

    At most 64 MiB wait, or one entry; what comes beyond is dropped, and the tiers count it. What is put or deleted
    meanwhile wins: whoever does so holds the key's lock and calls `forget`; the thread holds it while it puts.
    """

    def __init__(self, lock: Callable[[str], threading.Lock]) -> None:
        """lock: of a key."""
        self._lock = lock
        self._waiting: dict[str, _Promotion] = {}  # oldest first
        self._bytes = 0
        self._thread: threading.Thread | None = None
        self._closed = False
        self._changing = threading.Lock()

    def add(self, key: str, data: bytes, tiers: Sequence[WatchedTier]) -> None:
        """Put `data` into `tiers` some time soon; the caller holds the key's lock."""
        with self._changing:
            if key in self._waiting or not tiers:
                return
            if self._has_room(data) and self._runs():
                self._waiting[key] = _Promotion(data, tiers)
                self._bytes += len(data)
                return
        for tier in tiers:
            tier.passed_over()

    def forget(self, key: str) -> None:
        """What waits under `key` is not true any more."""
        self._take(key)

    def close(self) -> None:
        """Leave what waits, and wait for the entry that is put just now."""
        with self._changing:
            self._closed = True
            self._waiting.clear()
            thread = self._thread
        if thread is not None:
            thread.join()

    def _has_room(self, data: bytes) -> bool:
        return not self._closed and (not self._waiting or self._bytes + len(data) <= _MOST_BYTES)

    def _runs(self) -> bool:
        """Whether there is a thread, or could be started; it waits until the caller has let go."""
        if self._thread is None or not self._thread.is_alive():
            thread = threading.Thread(target=self._run, name="prolepsis-promote", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False
            self._thread = thread
        return True

    def _run(self) -> None:
        while (key := self._next()) is not None:
            with self._lock(key):
                promotion = self._take(key)
                if promotion is not None:
                    for tier in promotion.tiers:
                        tier.put(key, promotion.data, final=True)  # what it may have is what was read

    def _next(self) -> str | None:
        with self._changing:
            key = next(iter(self._waiting), None)
            if key is None:
                self._thread = None
            return key

    def _take(self, key: str) -> _Promotion | None:
        with self._changing:
            promotion = self._waiting.pop(key, None)
            self._bytes -= len(promotion.data) if promotion else 0
            return promotion
