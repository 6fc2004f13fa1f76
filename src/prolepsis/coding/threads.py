"""Work on independent items, spread over threads."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache

from prolepsis.kernels.team import default_threads


class _Thread(threading.local):
    sharing = False
    limit: int | None = None
    rest: Callable[[], None] | None = None


_thread = _Thread()


def thread_count() -> int:
    """Threads that work is spread over: `kernels.team.default_threads`, or what `limited_to` says."""
    return _thread.limit or default_threads()


@contextmanager
def limited_to(threads: int) -> Iterator[None]:
    """Within the block, what the calling thread asks for is spread over `threads` threads, which must be at least 1."""
    before, _thread.limit = _thread.limit, threads
    try:
        yield
    finally:
        _thread.limit = before


@contextmanager
def pausing(rest: Callable[[], None]) -> Iterator[None]:
    """Within the block, the calling thread works alone, and calls `rest` wherever its work says `pause`.

    Coding does so every 1 or 2 ms, but in an int8 or int4 cache: for work that others on the same cores hardly notice.
    """
    before, _thread.rest = _thread.rest, rest
    try:
        with limited_to(1):
            yield
    finally:
        _thread.rest = before


def pause() -> None:
    """Rest, if the calling thread is within `pausing`."""
    if _thread.rest is not None:
        _thread.rest()


def for_each(count: int, work: Callable[[int], None]) -> None:
    """Call work(0) ... work(count - 1), as many at a time as `thread_count` says.

    `work` spends its time in compiled code that holds no lock. Where it calls `for_each` itself, that runs in its own
    thread. The first exception raised is raised here.
    """
    threads = min(thread_count(), count)
    if threads <= 1 or _thread.sharing:
        for i in range(count):
            work(i)
            pause()
        return
    items = iter(range(count))
    failures: list[BaseException] = []

    def share() -> None:
        _thread.sharing = True
        try:
            for i in items:
                if failures:
                    return
                work(i)
        except BaseException as error:
            failures.append(error)
        finally:
            _thread.sharing = False

    helpers = [_pool(os.getpid(), threads - 1).submit(share) for _ in range(threads - 1)]
    share()
    for helper in helpers:
        if not helper.cancel():  # one that has not begun will find nothing to do
            helper.result()
    # The pool may hold `share` for a while yet, and with it whatever the work held: buffers that others want to close.
    work = _nothing
    if failures:
        raise failures[0]


def _nothing(_: int) -> None:
    pass


@cache
def _pool(process: int, helpers: int) -> ThreadPoolExecutor:
    """Threads that stay; a forked child has none of its parent's, and gets its own."""
    return ThreadPoolExecutor(helpers, f"prolepsis-coding-{process}")
