"""The queue is bounded, and says when to come back."""

import asyncio
from collections.abc import Awaitable, Callable

import httpx
import pytest
from asgi_client import Echo, ask, error_of
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from prolepsis.errors import InputError
from prolepsis.serve.admission import Admission, Gate, Ticket, claim, note_encoded
from prolepsis.serve.errors import APIError


class Clock:
    """Stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _admission(running: int, waiting: int, most: int = 8, clock: Callable[[], float] | None = None) -> Admission:
    admission = Admission(waiting, most, clock or Clock())
    admission.running = running
    return admission


def test_as_many_get_in_as_run_and_may_wait_and_each_that_ends_makes_room() -> None:
    admission = _admission(running=2, waiting=1)
    tickets = [Ticket(admission) for _ in range(3)]
    with pytest.raises(APIError, match=r"at most 1 sequences \(--max-queue\) may wait") as caught:
        Ticket(admission)
    assert (caught.value.status, caught.value.headers["Retry-After"]) == (429, "5")
    assert (admission.open, admission.refused) == (3, 1)
    tickets[0].close(served=True)
    Ticket(admission)
    assert admission.open == 3


def test_every_sequence_of_a_request_has_its_place() -> None:
    admission = _admission(running=2, waiting=1)
    alone = Ticket(admission)
    alone.widen_to(8)  # more than there is room for: nobody else waits for it
    alone.widen_to(2)
    assert admission.open == 8
    with pytest.raises(APIError, match="too many requests"):
        Ticket(admission)
    alone.close(served=True)
    first, second = Ticket(admission), Ticket(admission)
    with pytest.raises(APIError, match="too many requests"):
        second.widen_to(3)
    second.widen_to(2)
    first.close(served=True)
    second.close(served=True)
    assert admission.open == 0


def test_one_request_has_a_limit_of_its_own_which_is_no_overload() -> None:
    ticket = Ticket(_admission(running=64, waiting=64, most=8))
    with pytest.raises(InputError, match="--max-sequences") as caught:
        ticket.widen_to(9)
    assert caught.value.field == "n"


def test_when_to_come_back_is_what_ended_of_late_makes_of_those_ahead() -> None:
    clock = Clock()
    admission = _admission(running=1, waiting=5, clock=clock)
    tickets = [Ticket(admission) for _ in range(6)]
    for ticket in tickets[:3]:
        clock.now += 3
        ticket.close(served=True)
    assert admission.retry_after_s() == 9  # two wait, one of them ends every 3 s, then there is room
    clock.now += 3000
    assert admission.retry_after_s() == 120
    for ticket in tickets[3:]:
        ticket.close(served=True)
    assert admission.retry_after_s() == 5  # it has been idle, so nothing is known


def test_what_proved_unsound_is_no_throughput() -> None:
    admission = _admission(running=1, waiting=9)
    tickets = [Ticket(admission) for _ in range(6)]
    for ticket in tickets[:5]:
        ticket.close(served=False)
    assert admission.retry_after_s() == 5


@pytest.mark.parametrize("phase", ["loading", "draining"])
def test_until_there_is_a_model_and_once_it_ends_nothing_is_begun(phase: str) -> None:
    inner = Echo()
    gate = Gate(inner, lambda: phase, _admission(1, 1), _admission(1, 1))
    for method, path in [("DELETE", "/v1/sessions/a"), ("POST", "/v1/completions"), ("POST", "/tokenize")]:
        answer = ask(gate, method, path)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) > 0
        assert error_of(answer)["code"] == phase
    assert inner.calls == 0
    assert ask(gate, "GET", "/v1/engine").status_code == 200


def test_the_gate_gives_back_what_a_request_held_even_if_it_fails_and_counts_others_not_at_all() -> None:
    admission, texts = _admission(running=1, waiting=0), _admission(running=1, waiting=0)
    held: list[int] = []

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        held.append(admission.open)
        held.append(texts.open)
        if scope["path"] == "/v1/completions":
            claim(Request(scope), 3)
            held.append(admission.open)
            raise KeyError("oh")
        await Echo()(scope, receive, send)

    gate = Gate(inner, lambda: "ready", admission, texts)
    with pytest.raises(KeyError):
        ask(gate, "POST", "/v1/completions")
    ask(gate, "GET", "/v1/models")
    ask(gate, "POST", "/tokenize")
    assert held == [1, 0, 3, 0, 0, 0, 1]
    assert (admission.open, texts.open) == (0, 0)


@pytest.mark.parametrize(
    ("path", "elsewhere"),
    [("/v1/chat/completions", "/tokenize"), ("/tokenize", "/v1/completions"), ("/detokenize", "/v1/sessions")],
)
def test_a_full_queue_answers_429_and_the_others_go_on(path: str, elsewhere: str) -> None:
    admission, texts = _admission(running=1, waiting=1), _admission(running=1, waiting=1)

    async def run() -> list[httpx.Response]:
        release, reached = asyncio.Event(), asyncio.Semaphore(0)

        async def inner(scope: Scope, receive: Receive, send: Send) -> None:
            reached.release()
            await release.wait()
            await Echo()(scope, receive, send)

        gate = Gate(inner, lambda: "ready", admission, texts)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(gate), base_url="http://localhost") as client:

            def send() -> Awaitable[httpx.Response]:
                return client.post(path, json={})

            asked = [asyncio.ensure_future(send()) for _ in range(2)]
            await reached.acquire()
            await reached.acquire()
            refused = await send()
            asked.append(asyncio.ensure_future(client.post(elsewhere, json={})))
            await reached.acquire()
            release.set()
            return [refused, *await asyncio.gather(*asked)]

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [429, 200, 200, 200]
    assert error_of(answers[0])["type"] == "rate_limit_error"
    assert int(answers[0].headers["retry-after"]) > 0


def test_texts_that_were_encoded_tell_when_to_come_back() -> None:
    clock = Clock()
    texts = _admission(running=1, waiting=9, clock=clock)

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        clock.now += 7
        note_encoded(Request(scope))
        await Echo()(scope, receive, send)

    gate = Gate(inner, lambda: "ready", _admission(1, 1), texts)
    waiting = [Ticket(texts), Ticket(texts)]
    for _ in range(3):
        ask(gate, "POST", "/tokenize")
    assert texts.retry_after_s() == 14  # one runs, and one waits
    for ticket in waiting:
        ticket.close(served=False)
