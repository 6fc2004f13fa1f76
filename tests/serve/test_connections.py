"""Connections that misbehave are closed; those that behave are kept."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send

from prolepsis.serve.connections import limited_protocol
from prolepsis.serve.limits import BodyLimit

MOST, MAX_BODY, PATIENCE_S = 3, 1000, 30
REQUEST = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\nhi"


class App:
    """Answers with the body, or at /endless with more than anybody would read, until the client is gone."""

    def __init__(self) -> None:
        self.gone = threading.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]
                    if scope["path"] == "/" else []})  # fmt: skip
        if scope["path"] == "/endless":
            left = asyncio.ensure_future(receive())
            while not left.done():
                await send({"type": "http.response.body", "body": bytes(1 << 16), "more_body": True})
                await asyncio.sleep(0)
            self.gone.set()
        await send({"type": "http.response.body", "body": body})


@pytest.fixture(scope="module")
def app() -> App:
    return App()


@pytest.fixture(scope="module")
def address(app: App) -> Iterator[tuple[str, int]]:
    config = uvicorn.Config(
        BodyLimit(app, MAX_BODY, PATIENCE_S),
        http=limited_protocol(MOST, 0.2, 0.2),
        h11_max_incomplete_event_size=4096,
        lifespan="off",
        ws="none",
        log_level="critical",
    )
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    yield listener.getsockname()
    server.should_exit = True
    thread.join()


@pytest.fixture
def connection(address: tuple[str, int]) -> Iterator[socket.socket]:
    with socket.create_connection(address, PATIENCE_S) as connection:
        yield connection


@pytest.mark.parametrize("sent", [b"", b"P", b"POST / HTTP/1.1\r\nhost: x\r\n"])
def test_one_that_sends_no_request_is_closed(connection: socket.socket, sent: bytes) -> None:
    connection.sendall(sent)
    assert connection.recv(1) == b""


def test_one_that_sends_no_second_request_to_its_end_is_closed_too(connection: socket.socket) -> None:
    connection.sendall(REQUEST)
    assert _read_answer(connection)[1] == b"hi"
    connection.sendall(REQUEST[:20])
    assert connection.recv(1) == b""


def test_one_can_carry_many_requests(connection: socket.socket) -> None:
    for _ in range(3):
        connection.sendall(REQUEST)
        assert _read_answer(connection) == (200, b"hi")
    connection.sendall(REQUEST * 2)
    assert [_read_answer(connection) for _ in range(2)] == [(200, b"hi")] * 2


def test_what_is_left_of_a_body_that_was_refused_is_thrown_away(connection: socket.socket) -> None:
    size = 1 << 20
    connection.sendall(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"x" * size + REQUEST)
    status, body = _read_answer(connection)
    assert (status, json.loads(body)["error"]["code"]) == (413, "body_too_large")
    assert _read_answer(connection) == (200, b"hi")


def test_too_many_are_told_so(address: tuple[str, int]) -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(socket.create_connection(address, PATIENCE_S)) for _ in range(MOST)]
        for each in held:
            each.sendall(REQUEST)
            assert _read_answer(each)[0] == 200
        one_more = stack.enter_context(socket.create_connection(address, PATIENCE_S))
        status, body = _read_answer(one_more)
        assert (status, json.loads(body)["error"]["code"]) == (503, "too_many_connections")
        assert one_more.recv(1) == b""
        held[0].sendall(REQUEST)
        assert _read_answer(held[0])[0] == 200


def test_one_that_does_not_read_its_answer_is_closed(app: App, connection: socket.socket) -> None:
    connection.sendall(REQUEST.replace(b"/ ", b"/endless "))
    assert app.gone.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),  # TLS
        (b"NONSENSE\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: -1\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"POST / HTTP/1.1\r\nhost: x\r\nx: " + b"y" * 5000, 431),
    ],
)
def test_what_is_no_http_is_told_so(connection: socket.socket, sent: bytes, status: int) -> None:
    connection.sendall(sent)
    got, body = _read_answer(connection)
    assert got == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def _read_answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body of the next answer, and no byte beyond."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        assert byte, head
        head += byte
    length = next(int(line.split(b":")[1]) for line in head.lower().splitlines() if line.startswith(b"content-length"))
    body = b""
    while len(body) < length:
        body += connection.recv(length - len(body))
    return int(head.split()[1]), body
