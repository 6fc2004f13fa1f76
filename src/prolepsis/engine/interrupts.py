"""Ctrl-C where it does no harm."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import current_thread, main_thread


@contextmanager
def deferred() -> Iterator[Callable[[], None]]:
    """Within the block Ctrl-C only raises KeyboardInterrupt where the yielded function is called, and at the end.

    Where somebody else handles it, or in another thread, which it never strikes, nothing changes.
    """
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    struck = False

    def strike(*_: object) -> None:
        nonlocal struck
        struck = True

    def check() -> None:
        nonlocal struck
        if struck:
            struck = False
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, strike)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()
