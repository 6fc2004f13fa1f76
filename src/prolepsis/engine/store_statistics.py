"""What a `KVStore` has done so far."""

import logging
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any

from prolepsis.store.watched_tier import TierStatistics

_log = logging.getLogger(__name__)


@dataclass
class StoreStatistics:
    """Counts since the store was opened. Bytes raw are those K and V take in the pool."""

    stored_segments: int = 0
    stored_tokens: int = 0
    stored_raw_bytes: int = 0
    stored_coded_bytes: int = 0
    encode_seconds: float = 0.0
    """Of the thread that codes, tiers not included."""
    restored_segments: int = 0
    restored_tokens: int = 0
    restored_raw_bytes: int = 0
    restored_coded_bytes: int = 0
    restore_seconds: float = 0.0
    """Fetching and decoding, of all that was restored."""
    missed_segments: int = 0
    """Segments that were evicted from the pool before they could be stored, or for which the queue had no room."""
    damaged_segments: int = 0
    """Stored bytes that were not those of their name: deleted, and computed again."""
    unreadable_segments: int = 0
    """Segments coded with a profile that is not kept here: left for those who have it, and computed again."""
    refused_segments: int = 0
    """Segments that no tier took."""
    lost_segments: int = 0
    """Segments that a tier knew of and then did not give back."""
    failures: int = 0
    """Unexpected errors while storing or restoring; each cost a recompute."""
    queued_segments: int = 0
    """Segments that wait to be stored now, as far as that is known."""
    decisions: dict[str, int] = field(default_factory=dict)
    """For each reason (`restore_plan.Reason`): how many prompts."""

    @property
    def ratio(self) -> float:
        """Raw bytes per coded byte, of all that was stored; 1 where nothing was."""
        return self.stored_raw_bytes / self.stored_coded_bytes if self.stored_coded_bytes else 1.0


class Counter:
    """Statistics that several threads count up."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._now = StoreStatistics()

    def add(self, **counts: Any) -> None:
        """Add to the fields of these names."""
        with self._lock:
            for name, count in counts.items():
                setattr(self._now, name, getattr(self._now, name) + count)

    def failed(self, what: str) -> None:
        """Count an unexpected error, the one that is being handled, and log it: nobody is told otherwise."""
        self.add(failures=1)
        _log.warning("%s failed; the K and V that are missing for it are computed", what, exc_info=True)

    def decided(self, reason: str) -> None:
        """Count one more prompt with this reason."""
        with self._lock:
            self._now.decisions[reason] = self._now.decisions.get(reason, 0) + 1

    def snapshot(self) -> StoreStatistics:
        """A copy."""
        with self._lock:
            return replace(self._now, decisions=dict(self._now.decisions))


def labelled(tiers: Iterable[TierStatistics]) -> Iterator[TierStatistics]:
    """Tiers by their kinds, "disk" and a second one "disk_2": their names are addresses, which not all may see."""
    seen: Counts[str] = Counts()
    for tier in tiers:
        seen[tier.kind] += 1
        yield replace(tier, name=tier.kind if seen[tier.kind] == 1 else f"{tier.kind}_{seen[tier.kind]}")
