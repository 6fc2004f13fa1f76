"""A circuit breaker: who fails is left alone for a while."""

import threading
import time
from collections.abc import Callable

FIRST_PAUSE = 1.0  # seconds
LONGEST_PAUSE = 60.0


class Breaker:
    """Says whether something that may fail is worth a try.

    After a failure it is left alone for a second, and after each further one for twice as long, up to a minute. When
    the pause is over one caller at a time may try. `clock`: seconds that only grow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._pause = 0.0  # of the failures since the last success; 0: none
        self._until = 0.0
        self._trying = False
        self._lock = threading.Lock()

    @property
    def closed(self) -> bool:
        """True while everything goes well."""
        return not self._pause

    def allows(self) -> bool:
        """Whether the caller may try now. It must then say how it went, by `succeeded` or `failed`."""
        with self._lock:
            if not self._pause:
                return True
            if self._clock() < self._until:
                return False
            self._until = self._clock() + self._pause
            self._trying = True
            return True

    def succeeded(self) -> None:
        """All is well again."""
        with self._lock:
            self._pause, self._trying = 0.0, False

    def failed(self) -> None:
        """Leave it alone. Of calls that fail together only the first counts."""
        with self._lock:
            if self._pause and not self._trying:
                return
            self._trying = False
            self._pause = min(2 * self._pause, LONGEST_PAUSE) if self._pause else FIRST_PAUSE
            self._until = self._clock() + self._pause
