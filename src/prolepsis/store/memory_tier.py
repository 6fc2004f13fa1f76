"""A tier in this process's memory."""

import threading
from collections import OrderedDict
from collections.abc import Iterator

from prolepsis.errors import TierFullError
from prolepsis.store.tier import Usage

_OVERHEAD = 256  # bytes an entry takes beside its data: key, objects, tables. It bounds how many empty ones there are


class MemoryTier:
    """Entries in memory, up to `budget` bytes; those longest unused are evicted. Implements PinningTier."""

    kind = "memory"

    def __init__(self, budget: int, name: str = "memory") -> None:
        self.name = name
        self._budget = budget
        self._loose: OrderedDict[str, bytes] = OrderedDict()  # longest unused first
        self._pinned: dict[str, bytes] = {}
        self._bytes = self._pinned_bytes = self._evictions = 0
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        """As `Tier.put`."""
        cost = _cost(data)
        with self._lock:
            pinned = self._pinned.get(key)
            others = self._pinned_bytes - (0 if pinned is None else _cost(pinned))
            if cost > self._budget - others:
                raise TierFullError(
                    f"{self.name}: {cost} bytes do not fit beside {others} pinned ones into {self._budget}"
                )
            self._take(key)
            self._evict(cost)
            self._add(key, data, pinned is not None)

    def get(self, key: str) -> bytes | None:
        """As `Tier.get`."""
        with self._lock:
            data = self._loose.get(key)
            if data is None:
                return self._pinned.get(key)
            self._loose.move_to_end(key)
            return data

    def size(self, key: str) -> int | None:
        """As `Tier.size`."""
        with self._lock:
            data = self._loose.get(key, self._pinned.get(key))
            return None if data is None else len(data)

    def touch(self, key: str) -> None:
        """As `PinningTier.touch`."""
        with self._lock:
            if key in self._loose:
                self._loose.move_to_end(key)

    def delete(self, key: str) -> None:
        """As `Tier.delete`."""
        with self._lock:
            self._take(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        """As `Tier.keys`."""
        with self._lock:
            keys = [*self._loose, *self._pinned]
        return (key for key in keys if not kind or key.startswith(f"{kind}-"))

    def pin(self, key: str) -> bool:
        """As `PinningTier.pin`."""
        with self._lock:
            data = self._take(key)
            if data is not None:
                self._add(key, data, pinned=True)
            return data is not None

    def unpin(self, key: str) -> None:
        """As `PinningTier.unpin`."""
        with self._lock:
            data = self._take(key)
            if data is not None:
                self._add(key, data, pinned=False)

    def pinned(self) -> list[str]:
        """As `PinningTier.pinned`."""
        with self._lock:
            return list(self._pinned)

    def usage(self) -> Usage:
        """As `Tier.usage`."""
        with self._lock:
            entries = len(self._loose) + len(self._pinned)
            return Usage(entries, self._bytes, self._budget, self._evictions)

    def close(self) -> None:
        """Forget everything."""
        with self._lock:
            self._loose.clear()
            self._pinned.clear()
            self._bytes = self._pinned_bytes = 0

    def _take(self, key: str) -> bytes | None:
        """Remove an entry, and return what it held."""
        data = self._loose.pop(key, None)
        if data is None:
            data = self._pinned.pop(key, None)
            self._pinned_bytes -= 0 if data is None else _cost(data)
        self._bytes -= 0 if data is None else _cost(data)
        return data

    def _add(self, key: str, data: bytes, pinned: bool) -> None:
        (self._pinned if pinned else self._loose)[key] = data
        self._bytes += _cost(data)
        self._pinned_bytes += _cost(data) if pinned else 0

    def _evict(self, needed: int) -> None:
        while self._bytes + needed > self._budget:
            _, data = self._loose.popitem(last=False)
            self._bytes -= _cost(data)
            self._evictions += 1


def _cost(data: bytes) -> int:
    return len(data) + _OVERHEAD
