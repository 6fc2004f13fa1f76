"""A server that speaks S3 for tests, where `moto` and what it needs for that are installed."""

import os
import signal
import socket
import subprocess
import sys
from importlib.util import find_spec
from urllib.request import Request, urlopen

import pytest

_PACKAGES = ("s3fs", "moto", "flask", "flask_cors")
_PROGRAM = """
import logging, sys
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = make_server("127.0.0.1", int(sys.argv[1]), DomainDispatcherApplication(create_backend_app), threaded=True)
print("ready", flush=True)
server.serve_forever()
"""
_HEADERS = {
    "Authorization": "AWS4-HMAC-SHA256 Credential=a/1/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0",
    "Content-Type": "application/octet-stream",
}  # it believes everybody, but who says nothing
LISTED_AT_ONCE = 5
"""Keys in one answer."""


class S3Server:
    """A server of its own on a free port of this machine. When it ends, what it had is gone."""

    def __init__(self) -> None:
        for package in _PACKAGES:
            if find_spec(package) is None:
                pytest.skip(f"{package} is not installed")
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        self.start()

    @property
    def environment(self) -> dict[str, str]:
        """What tells clients where it is, and who they are."""
        return {
            "AWS_ENDPOINT_URL": self._url,
            "AWS_ACCESS_KEY_ID": "somebody",
            "AWS_SECRET_ACCESS_KEY": "not-to-be-shown",
            "AWS_DEFAULT_REGION": "us-east-1",
        }

    def put(self, path: str, data: bytes = b"") -> None:
        """Make a bucket, or an object in one."""
        self._call("PUT", path, data)

    def get(self, path: str) -> bytes:
        """What an object holds; of the path "", which buckets there are, in XML."""
        return self._call("GET", path)

    def check_credentials(self, checked: bool) -> None:
        """Whether it refuses those that it does not know, which are all. At first it does not."""
        self._call("POST", "moto-api/reset-auth", b"0" if checked else b"inf")

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, self._url.rpartition(":")[2]],
            env=os.environ | {"MOTO_S3_DEFAULT_MAX_KEYS": str(LISTED_AT_ONCE)},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n"

    def freeze(self) -> None:
        """Let it take connections, and answer nothing."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it without a farewell."""
        with self._process as process:
            process.kill()

    def _call(self, method: str, path: str, data: bytes | None = None) -> bytes:
        with urlopen(Request(f"{self._url}/{path}", data, _HEADERS, method=method), timeout=60) as answer:
            return answer.read()
