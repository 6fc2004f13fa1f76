"""docs/serving.md has every flag, and what lies in deploy/ is sound: systemd takes the unit, streams pass nginx."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from command import call

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
PATIENCE_S = 30

needs_sources = pytest.mark.skipif(not DEPLOY.is_dir(), reason="the source tree is not beside the tests")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="nginx is not installed")


@needs_sources
def test_every_flag_is_in_the_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    flags = set(re.findall(r"^. (--[a-z-]+)", call("serve", "--help").out, re.MULTILINE)) - {"--help"}
    assert len(flags) > 20
    rows = re.findall(r"^\| `(--[a-z-]+)` \|", (ROOT / "docs" / "serving.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(rows) == sorted(flags)


@needs_sources
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "prolepsis.service"
    text = (DEPLOY / "prolepsis.service").read_text("utf-8")
    program = re.search(r"ExecStart=(\S+)", text)
    assert program is not None
    unit.write_text(text.replace(program[1], sys.executable))  # one that exists
    outcome = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert (outcome.returncode, unit.name in outcome.stderr) == (0, False), outcome.stderr


@needs_sources
def test_an_image_is_built_of_what_it_copies_and_no_more() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (DEPLOY / "Containerfile").read_text("utf-8"), re.MULTILINE)
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    assert "*" in lines
    assert sorted(" ".join(copied).split()) == sorted(line[1:] for line in lines if line.startswith("!"))


class Upstream(BaseHTTPRequestHandler):
    """Sends one event of a stream, and the second only when its reader has the first."""

    protocol_version = "HTTP/1.1"
    received = threading.Event()
    hosts: list[str]

    def do_GET(self) -> None:
        type(self).hosts.append(self.headers["Host"])
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._send(b"data: first\n\n")
        if self.received.wait(PATIENCE_S):
            self._send(b"data: second\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _send(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))

    def log_message(self, *arguments: object) -> None:
        """It has nothing to say."""


@pytest.fixture
def upstream() -> Iterator[int]:
    """Its port."""
    Upstream.hosts = []
    Upstream.received.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_port
    Upstream.received.set()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def configuration(tmp_path: Path, upstream: int) -> Path:
    """A whole one around the site, for a user without privileges: on a socket in `tmp_path`."""
    site = (DEPLOY / "nginx.conf").read_text("utf-8")
    for there, here in (("127.0.0.1:8000", f"127.0.0.1:{upstream}"), ("listen 80;", f"listen unix:{tmp_path}/nginx;")):
        assert there in site
        site = site.replace(there, here)
    paths = "".join(
        f"{kind}_temp_path {tmp_path}/{kind};\n" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (tmp_path / "nginx.conf").write_text(
        f"user {'root' if os.getuid() == 0 else 'nobody'};\ndaemon off;\nmaster_process off;\n"
        f"pid {tmp_path}/pid;\nerror_log {tmp_path}/errors;\nevents {{ }}\n"
        f"http {{\naccess_log off;\n{paths}{site}}}\n"
    )
    return tmp_path / "nginx.conf"


def nginx(configuration: Path, *arguments: str) -> list[str]:
    return [str(NGINX), "-e", str(configuration.with_name("errors")), "-c", str(configuration), *arguments]


@needs_sources
@needs_nginx
def test_streams_pass_nginx_as_they_come(configuration: Path, tmp_path: Path) -> None:
    checked = subprocess.run(nginx(configuration, "-t"), capture_output=True, text=True, check=False)
    assert (checked.returncode, "warn" in checked.stderr) == (0, os.getuid() != 0), checked.stderr
    process = subprocess.Popen(nginx(configuration))
    try:
        client = connected(tmp_path / "nginx", process)
        client.request("GET", "/v1/chat/completions", headers={"Host": "chat.example.com"})
        answer = client.getresponse()
        assert answer.readline() == b"data: first\n"  # would not come, were it held back until there is more
        Upstream.received.set()
        assert answer.read() == b"\ndata: second\n\n"
        assert Upstream.hosts == ["chat.example.com"]
        client.request("GET", "/metrics", headers={"Host": "chat.example.com"})
        answer = client.getresponse()
        assert (answer.status, bool(answer.read())) == (403, True)  # a socket is not the loopback
        client.request("POST", "/tokenize", headers={"Host": "chat.example.com", "Content-Length": "6000000"})
        answer = client.getresponse()
        assert (answer.status, json.loads(answer.read())["error"]["code"]) == (413, "body_too_large")
        client.close()
    finally:
        process.terminate()
        process.wait()


def connected(path: Path, process: subprocess.Popen[bytes]) -> HTTPConnection:
    """A connection to the server on the socket at `path`, once it listens."""
    client = HTTPConnection("localhost")
    client.sock = socket.socket(socket.AF_UNIX)
    client.sock.settimeout(PATIENCE_S)
    while process.poll() is None:
        try:
            client.sock.connect(str(path))
        except (FileNotFoundError, ConnectionRefusedError):
            threading.Event().wait(0.01)
        else:
            return client
    raise AssertionError(path.with_name("errors").read_text())
