"""Asks a store for the segments of a prompt: one after the other where it answers at once, else many at a time."""

import time
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from prolepsis.engine.kv_names import SegmentName
from prolepsis.store import Located

_SLOW = 1e-3  # seconds
_MOST_AT_ONCE = 16  # as many as a remote tier answers at a time

Locate = Callable[[SegmentName], Located | None]
Several = Callable[[Locate, list[SegmentName]], Iterable[Located | None]]
"""As `map`: calls a function with each name, and gives the results in order."""


def located(
    names: Iterator[SegmentName], locate: Locate, several: Several, abandoned: Callable[[], bool]
) -> Iterator[tuple[SegmentName, Located | None]]:
    """Where they are, up to the first that is nowhere. While answers take long, more and more are asked at once.

    So no more are asked for in vain than were found. abandoned: whether nobody waits for it any more; it ends then.
    """
    at_once = 1
    while not abandoned() and (asked := list(islice(names, at_once))):
        begin = time.perf_counter()
        places = list((several if at_once > 1 else map)(locate, asked))
        slow = time.perf_counter() - begin > _SLOW
        for name, found in zip(asked, places, strict=True):
            yield name, found
            if found is None:
                return
        at_once = min(2 * at_once, _MOST_AT_ONCE) if slow else 1
