"""Segments side by side: as many as there are threads, and as few as memory asks for."""

from collections.abc import Callable, Iterator
from typing import TypeVar

from prolepsis.coding.header import Header
from prolepsis.coding.profile import GRID
from prolepsis.coding.threads import for_each, thread_count

_BYTES = 1 << 28  # of raw KV in the segments at work; predictions take about twice as much beside it

T = TypeVar("T")


def segments_at_once(header: Header, sequential: bool = False) -> int:
    """How many segments of such a file may be at work at a time; `sequential`: where each builds upon those before."""
    return 1 if sequential else max(1, min(thread_count(), _BYTES // (header.raw_bits // 8 * GRID)))


def in_order(count: int, at_once: int, work: Callable[[int], T]) -> Iterator[T]:
    """work(0), ... work(count - 1), in this order; up to `at_once` are worked on at a time and wait to be taken.

    Each shares the work on its own streams among threads too; so few that threads would stand idle are not done side
    by side. What `work` raises is raised when its turn comes.
    """
    for first in range(0, count, at_once):
        batch = range(first, min(first + at_once, count))
        if 2 * len(batch) > thread_count() and len(batch) > 1:
            yield from _batch(batch, work)
        else:
            yield from map(work, batch)


def _batch(batch: range, work: Callable[[int], T]) -> Iterator[T]:
    done: list[tuple[T | None, Exception | None]] = [(None, None)] * len(batch)

    def one(i: int) -> None:
        try:
            done[i] = work(batch[i]), None
        except Exception as error:
            done[i] = None, error

    for_each(len(batch), one)
    while done:
        result, error = done.pop(0)
        if error is not None:
            raise error
        yield result  # type: ignore[misc]
