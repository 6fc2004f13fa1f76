"""Work on independent streams, spread over threads."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from prolepsis.kernels.team import default_threads


def for_each(count: int, work: Callable[[int], None]) -> None:
    """Call work(0) ... work(count - 1), as many at a time as there are threads (`kernels.team`).

    `work` spends its time in compiled code that holds no lock. The first exception raised is raised here.
    """
    threads = min(default_threads(), count)
    if threads <= 1:
        for i in range(count):
            work(i)
        return

    def share(first: int) -> None:
        for i in range(first, count, threads):
            work(i)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(share, range(threads)))
