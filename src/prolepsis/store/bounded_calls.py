"""Calls that may hang, with an end."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from prolepsis.errors import TierError, TierTimeoutError


class BoundedCalls:
    """Calls functions and waits `seconds` for each at most; at most `most` run at once.

    A call that is not done by then goes on in the background, and does not keep the process from ending.
    """

    def __init__(self, name: str, seconds: float, most: int = 16) -> None:
        self._name = name
        self._seconds = seconds
        self._free = threading.Semaphore(most)

    def __call__(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """What `function` returns or raises. Raises TierTimeoutError, and TierError where no thread can be started."""
        if not self._free.acquire(timeout=self._seconds):
            raise TierTimeoutError(f"{self._name}: earlier calls have not come back for {self._seconds} s")
        future: Future[Any] = Future()
        try:
            threading.Thread(target=self._run, args=(future, function, arguments, options), daemon=True).start()
        except RuntimeError as error:
            self._free.release()
            raise TierError(f"{self._name}: {error}") from error
        try:
            return future.result(self._seconds)
        except TimeoutError as error:
            if future.done():
                raise  # of the function's own
            raise TierTimeoutError(f"{self._name}: no answer in {self._seconds} s") from error

    def _run(self, future: Future, function: Callable[..., Any], arguments: tuple, options: dict[str, Any]) -> None:
        try:
            future.set_result(function(*arguments, **options))
        except BaseException as error:
            future.set_exception(error)
        finally:
            self._free.release()
