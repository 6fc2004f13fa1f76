"""A Redis server for tests, where Debian's or another is installed."""

import shutil
import socket
import subprocess

import pytest


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
