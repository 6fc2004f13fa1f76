"""What tests of tiers share: keys, directories on a fast disk, processes that die, a server."""

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

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


class RedisServer:
    """A server of its own on a free port of this machine, without files."""

    def __init__(self) -> None:
        program = shutil.which("redis-server")
        if program is None:
            pytest.skip("redis-server is not installed")
        self._program = program
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.start()

    @property
    def url(self) -> str:
        """For `open_tiers`."""
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def process_id(self) -> int:
        """Of the server that runs."""
        return self._process.pid

    def start(self) -> None:
        """Start it, and wait until it answers."""
        listen = ["--port", str(self.port), "--bind", "127.0.0.1"]
        self._process = subprocess.Popen(
            [self._program, *listen, "--save", "", "--appendonly", "no"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        said = []
        for line in self._process.stdout:
            said.append(line)
            if "Ready to accept connections" in line:
                return
        raise AssertionError(f"redis-server did not start:\n{''.join(said)}")

    def kill(self) -> None:
        """End it without a farewell."""
        with self._process as process:
            process.kill()
