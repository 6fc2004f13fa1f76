"""What tests of tiers share: keys, directories on a fast disk, processes that die."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")


def key(number: int, kind: str = "segment") -> str:
    """A key; those of numbers that differ by 1 lie in different shards."""
    return f"{kind}-{number % 256:02x}{number:062x}"


@contextmanager
def fast_directory() -> Iterator[Path]:
    """An empty directory, in memory where there is such a place: syncing files takes most of a tier's time."""
    place = _SHARED_MEMORY if os.access(_SHARED_MEMORY, os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=place) as directory:
        yield Path(directory) / "store"


@contextmanager
def forked(work: Callable[[int], object]) -> Iterator[tuple[int, int]]:
    """Process id and read end of a pipe of a child that calls `work` with the write end, then ends.

    The caller waits for it, by `killed` or os.waitpid.
    """
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(read)
            work(write)
            code = 0
        finally:
            os._exit(code)
    os.close(write)
    try:
        yield child, read
    finally:
        os.close(read)


def killed(child: int) -> None:
    """Kill a child by the signal that no process sees coming."""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
