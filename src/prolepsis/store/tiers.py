"""The store: tiers from fast to slow, as one."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prolepsis.store.promotions import Promotions
from prolepsis.store.tier import Tier, check_key
from prolepsis.store.watched_tier import TierStatistics, WatchedTier

_LOCKS = 1024


@dataclass(frozen=True, slots=True)
class Stored:
    """Names of the tiers that took an entry, fastest first, and whether one of them promised to keep it."""

    tiers: tuple[str, ...]
    pinned: bool


@dataclass(frozen=True, slots=True)
class Found:
    """An entry, the tier it came from, and in how many seconds."""

    data: bytes
    tier: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Located:
    """The fastest tier that holds an entry, and the entry's size in bytes."""

    tier: str
    size: int


class Tiers:
    """Entries in several tiers, fastest first.

    No method raises TierError: what a tier fails at is counted in its statistics, and the others serve. A tier that
    failed is left alone for a second, then for twice as long with each failure, up to a minute. Every method may be
    called from several threads; calls about one key wait for each other. All raise InputError for a bad key.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._tiers = [WatchedTier(tier) for tier in tiers]
        self._locks = [threading.Lock() for _ in range(_LOCKS)]
        self._promotions = Promotions(self._lock)

    @property
    def shared(self) -> bool:
        """Whether other processes may have the slowest tier, too."""
        return any(tier.kind in ("redis", "remote") for tier in self._tiers[-1:])

    def put(self, key: str, data: bytes, pinned: bool = False, final: bool = False, by_others: bool = False) -> Stored:
        """Write to every tier that has room. A tier that did not take it does not keep an older value either.

        pinned: as by `pin` afterwards. final: the key stands for the value, so an older one is as good, and stays.
        by_others: they put other values under the key, or delete it, in a tier that is shared. Where the slowest is a
        remote one, and takes the entry, no other keeps it: a copy would be seen here after what they do.
        """
        with self._lock(key):
            self._promotions.forget(key)
            names = self._put_alone(key, data) if by_others else ()
            names = names or tuple(tier.name for tier in self._tiers if tier.put(key, data, final))
            stored = Stored(names, pinned and self._pin(key))
        self._delete_stale()
        return stored

    def get(self, key: str, by_others: bool = False) -> Found | None:
        """The entry, from the fastest tier that has it. Faster ones get it soon, unless too much waits for them.

        by_others: it was put so. A remote tier, where it is the slowest, is asked first, and nothing copied from it.
        """
        with self._lock(key):
            for tier, faster in self._to_read(by_others):
                found = tier.get(key)
                if found is not None:
                    data, seconds = found
                    self._promotions.add(key, data, faster)
                    return Found(data, tier.name, seconds)
        return None

    def locate(self, key: str, slowest: bool = True) -> Located | None:
        """Where `get` would find the entry: no byte of it is read. slowest: whether the last tier is asked, too."""
        check_key(key)
        for tier in self._tiers if slowest else self._tiers[:-1]:
            size = tier.size(key)
            if size is not None:
                return Located(tier.name, size)
        return None

    def answer(self, key: str) -> bool:
        """Whether every tier can say just now what it has under `key`."""
        check_key(key)
        return all(tier.answers(key) for tier in self._tiers)

    def lacks(self, key: str) -> bool:
        """Whether every tier answers, and none has the entry."""
        check_key(key)
        return all(tier.lacks(key) for tier in self._tiers)

    def touch(self, key: str) -> None:
        """Count as a use of the entry, in every tier that evicts."""
        check_key(key)
        for tier in self._tiers:
            tier.touch(key)

    def delete(self, key: str) -> bool:
        """Forget the entry and its pin in every tier. A tier that fails forgets it when it works again.

        Returns whether it is done everywhere. If not, it is back where the process ends before.
        """
        with self._lock(key):
            self._promotions.forget(key)
            done = [tier.delete(key) for tier in self._tiers]  # all of them, whatever becomes of one
        return all(done)

    def keys(self, kind: str = "") -> Iterator[str]:
        """Keys of that kind (what stands before the hyphen), or all, each once, in no order; of tiers that answer."""
        seen: set[str] = set()
        for tier in self._tiers:
            for key in tier.keys(kind):
                if key not in seen:
                    seen.add(key)
                    yield key

    def pin(self, key: str) -> bool:
        """Never evict the entry. False where no tier holds it that can promise so.

        The slowest tier that can does it: faster ones stay free for what is in use. A pin is a mark, not a count.
        """
        with self._lock(key):
            return self._pin(key)

    def unpin(self, key: str) -> None:
        """Let the entry be evicted again."""
        with self._lock(key):
            for tier in self._tiers:
                tier.unpin(key)

    def pinned(self) -> set[str]:
        """Keys of pinned entries, in tiers that answer."""
        return {key for tier in self._tiers for key in tier.pinned()}

    def statistics(self) -> list[TierStatistics]:
        """Of each tier, fastest first."""
        return [tier.statistics() for tier in self._tiers]

    def close(self) -> None:
        """Close every tier."""
        self._promotions.close()
        for tier in self._tiers:
            tier.close()

    def _remote(self) -> Sequence[WatchedTier]:
        """The slowest tier, where it is a remote one."""
        return [tier for tier in self._tiers[-1:] if tier.kind == "remote"]

    def _to_read(self, by_others: bool) -> Iterator[tuple[WatchedTier, Sequence[WatchedTier]]]:
        """Tiers in the order in which they are asked, each with those that get what it has."""
        first = self._remote() if by_others else ()
        yield from ((tier, ()) for tier in first)
        rest = self._tiers[: len(self._tiers) - len(first)]
        yield from ((tier, rest[:place]) for place, tier in enumerate(rest))

    def _put_alone(self, key: str, data: bytes) -> tuple[str, ...]:
        names = tuple(tier.name for tier in self._remote() if tier.put(key, data))
        if names:
            for tier in self._tiers[:-1]:
                tier.delete(key)
        return names

    def _pin(self, key: str) -> bool:
        return any(tier.pin(key) for tier in reversed(self._tiers))

    def _delete_stale(self) -> None:
        for tier in self._tiers:
            for key in tier.stale():
                with self._lock(key):
                    tier.delete_stale(key)

    def _lock(self, key: str) -> threading.Lock:
        check_key(key)
        return self._locks[hash(key) % _LOCKS]
