"""A tier under watch: its failures are counted and kept from the callers, and it is left alone while it fails."""

import logging
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from prolepsis.errors import TierDamagedError, TierError, TierFullError
from prolepsis.store.breaker import Breaker
from prolepsis.store.tier import PinningTier, Tier

_MOST_STALE = 100_000  # keys; with them some 20 MB of memory
_TOLD_EVERY = 60.0  # seconds
_SECRETS = re.compile(r"(?<=://)\S*@|\?\S*")  # of URLs: who asks, and signatures
_DELETED_AT_ONCE = 8  # stale keys, with each put, so that no single call has to do them all

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TierStatistics:
    """What a tier holds now, and what it did since it was opened. None: see `Usage`.

    failures: by kind, "failed", "full", "damaged" or "timeout". skipped: calls that were not made, because the tier had
    failed shortly before. dropped: entries found in a slower tier that were not put here, as too many waited. get_bytes
    and get_seconds: of hits alone.
    """

    name: str
    kind: str
    entries: int | None
    bytes: int | None
    budget: int | None
    evictions: int
    gets: int
    hits: int
    puts: int
    failures: Mapping[str, int]
    skipped: int
    dropped: int
    get_bytes: int
    get_seconds: float
    put_bytes: int
    put_seconds: float
    available: bool


class WatchedTier:
    """A tier that never raises TierError. Why it fails is logged, once a minute at most.

    A delete that failed leaves the old value behind, perhaps, and so does a put that is not `final`. The key is kept as
    stale: it is not seen here any more, and deleted when the tier works again.
    """

    def __init__(self, tier: Tier, breaker: Breaker | None = None) -> None:
        self._tier = tier
        self._breaker = breaker or Breaker()
        self._stale: dict[str, None] = {}  # oldest first
        self._counts: Counter[str] = Counter()
        self._seconds = {"get": 0.0, "put": 0.0}
        self._failures: Counter[str] = Counter()
        self._silent_until = 0.0
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        """As the tier's."""
        return self._tier.name

    @property
    def kind(self) -> str:
        """As the tier's."""
        return self._tier.kind

    def put(self, key: str, data: bytes, final: bool = False) -> bool:
        """Whether the tier holds `data` now. If not, it holds nothing under `key`, as far as is seen from here.

        final: any value under `key` is as good, so what the tier may have stays.
        """
        start = time.perf_counter()
        done, _ = self._call(self._tier.put, key, data)
        if not done:
            if not final:
                self.delete(key)
            return False
        self._count("put", len(data), time.perf_counter() - start)
        self._show(key)
        return True

    def get(self, key: str) -> tuple[bytes, float] | None:
        """What is there, and in how many seconds it came."""
        if key in self._stale:
            return None
        start = time.perf_counter()
        done, data = self._call(self._tier.get, key)
        if done:
            with self._lock:
                self._counts["gets"] += 1
        if data is None:
            return None
        seconds = time.perf_counter() - start
        self._count("get", len(data), seconds)
        return data, seconds

    def size(self, key: str) -> int | None:
        """As `Tier.size`; None where the tier fails."""
        return None if key in self._stale else self._call(self._tier.size, key)[1]

    def delete(self, key: str) -> bool:
        """As `Tier.delete`; at the latest when the tier works again. Whether it is done."""
        done, _ = self._call(self._tier.delete, key)
        if done:
            self._show(key)
        else:
            self._hide(key)
        return done

    def answers(self, key: str) -> bool:
        """Whether the tier can say just now what it has under `key`."""
        return self._call(self._tier.size, key)[0]

    def lacks(self, key: str) -> bool:
        """Whether the tier answers, and has nothing under `key` that is to be seen."""
        done, size = self._call(self._tier.size, key)
        return done and (size is None or key in self._stale)

    def touch(self, key: str) -> None:
        """As `PinningTier.touch`."""
        if isinstance(self._tier, PinningTier) and self._breaker.closed:
            self._call(self._tier.touch, key)

    def passed_over(self) -> None:
        """Count an entry that should have been put here and was not."""
        with self._lock:
            self._counts["dropped"] += 1

    def stale(self) -> list[str]:
        """Some keys that are still to be deleted, if the tier works."""
        if not self._stale or not self._breaker.closed:
            return []
        with self._lock:
            return list(islice(self._stale, _DELETED_AT_ONCE))

    def delete_stale(self, key: str) -> None:
        """Delete what is under `key` if it is stale still."""
        if key in self._stale:
            self.delete(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        """As `Tier.keys`; they end where the tier fails."""
        done, keys = self._call(self._tier.keys, kind)
        while done and keys is not None:
            done, key = self._call(next, keys, None)
            if key is None:
                return
            if key not in self._stale:
                yield key

    def pin(self, key: str) -> bool:
        """As `PinningTier.pin`; False where the tier has no pins or fails."""
        if key in self._stale or not isinstance(self._tier, PinningTier):
            return False
        return bool(self._call(self._tier.pin, key)[1])

    def unpin(self, key: str) -> None:
        """As `PinningTier.unpin`."""
        if isinstance(self._tier, PinningTier):
            self._call(self._tier.unpin, key)

    def pinned(self) -> list[str]:
        """As `PinningTier.pinned`; none where the tier has no pins or fails."""
        if isinstance(self._tier, PinningTier) and self._breaker.closed:
            return self._call(self._tier.pinned)[1] or []
        return []

    def statistics(self) -> TierStatistics:
        """What the tier holds and did."""
        usage = self._tier.usage()
        with self._lock:
            counts, seconds, failures = self._counts.copy(), self._seconds.copy(), dict(self._failures)
        return TierStatistics(
            name=self._tier.name,
            kind=self._tier.kind,
            entries=usage.entries,
            bytes=usage.bytes,
            budget=usage.budget,
            evictions=usage.evictions,
            gets=counts["gets"],
            hits=counts["get"],
            puts=counts["put"],
            failures=failures,
            skipped=counts["skipped"],
            dropped=counts["dropped"],
            get_bytes=counts["get bytes"],
            get_seconds=seconds["get"],
            put_bytes=counts["put bytes"],
            put_seconds=seconds["put"],
            available=self._breaker.closed,
        )

    def close(self) -> None:
        """Close the tier, also one that is left alone."""
        try:
            self._tier.close()
        except TierError as error:
            self._failed(error)

    def _call(self, verb: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """Whether the tier did it, and its answer."""
        if not self._breaker.allows():
            with self._lock:
                self._counts["skipped"] += 1
            return False, None
        try:
            answer = verb(*arguments)
        except TierError as error:
            self._failed(error)
            return False, None
        self._breaker.succeeded()
        return True, answer

    def _failed(self, error: TierError) -> None:
        with self._lock:
            self._failures[error.kind] += 1
        if isinstance(error, TierFullError | TierDamagedError):
            self._breaker.succeeded()  # it answered
        else:
            self._breaker.failed()
            self._tell(error)

    def _tell(self, error: TierError) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._silent_until:
                return
            self._silent_until = now + _TOLD_EVERY
        why = " ".join(_SECRETS.sub("", str(error)).split())
        _log.warning("a tier of the store fails, and is left alone for a while: %.500s", why)

    def _count(self, verb: str, size: int, seconds: float) -> None:
        with self._lock:
            self._counts[verb] += 1
            self._counts[f"{verb} bytes"] += size
            self._seconds[verb] += seconds

    def _hide(self, key: str) -> None:
        with self._lock:
            self._stale[key] = None
            if len(self._stale) > _MOST_STALE:
                del self._stale[next(iter(self._stale))]

    def _show(self, key: str) -> None:
        with self._lock:
            self._stale.pop(key, None)
