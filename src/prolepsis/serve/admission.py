"""Who may wait: a bounded queue, and an honest word on when to come back."""

import time
from collections import deque
from collections.abc import Callable
from math import ceil

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from prolepsis.errors import InputError
from prolepsis.serve.asgi import refuse
from prolepsis.serve.errors import APIError, retry_after

_REMEMBERED = 64  # ends of sequences, from which the throughput is measured
_AT_FIRST_S, _AT_MOST_S = 5, 120
_QUEUED = ("/v1/chat/completions", "/v1/completions", "/v1/sessions")
_OF_TEXTS = ("/tokenize", "/detokenize")
_PAUSES = {"loading": ("the model is being loaded", 5), "draining": ("the server is shutting down", 10)}


class Admission:
    """Counts the sequences that requests have asked for and not yet ended. For one event loop."""

    def __init__(
        self,
        waiting: int,
        most: int,
        clock: Callable[[], float] = time.monotonic,
        of: str = "sequences (--max-queue)",
    ) -> None:
        """`waiting`: sequences that may wait beside those that run; `most`: those of one request. `of`: their name."""
        self._waiting, self._most, self._clock, self._of = waiting, most, clock, of
        self._ends: deque[float] = deque(maxlen=_REMEMBERED)
        self.running = 0
        """Sequences that the engine runs at once; whoever has loaded it says so here."""
        self.open = 0
        """Sequences that run or wait."""
        self.refused = 0
        """Requests that found the queue full."""

    def take(self, sequences: int, held: int) -> None:
        """So many more, for a request that holds `held`. Raises InputError above what one may have, APIError 429 where
        there is no room. One that is alone always finds room."""
        if held + sequences > self._most:
            message = f"a request may have {self._most} sequences, prompts times n or best_of (--max-sequences)"
            raise InputError(f"{message}, not {held + sequences}", field="n")
        if self.open + sequences > self.running + self._waiting and self.open > held:
            self.refused += 1
            message = f"too many requests: at most {self._waiting} {self._of} may wait, and {self.open} run or wait"
            raise APIError(429, message, code="overloaded", headers=retry_after(self.retry_after_s()))
        self.open += sequences

    def leave(self, sequences: int, served: bool) -> None:
        """So many have ended. `served`: they were run, and did not merely prove unsound."""
        self.open -= sequences
        if self.open == 0:
            self._ends.clear()  # the throughput of an idle server says nothing
        elif served:
            self._ends.extend([self._clock()] * sequences)

    def retry_after_s(self) -> int:
        """About when what waits now will run, in whole seconds, at the pace at which sequences ended of late."""
        ahead = max(self.open - self.running, 0) + 1
        if len(self._ends) < 2:
            return _AT_FIRST_S
        each_s = (self._clock() - self._ends[0]) / (len(self._ends) - 1)
        return min(max(ceil(ahead * each_s), 1), _AT_MOST_S)


class Ticket:
    """The places of one request, one to begin with. Raises as `Admission.take`."""

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._sequences = 0
        self.widen_to(1)

    def widen_to(self, sequences: int) -> None:
        """Hold so many. Raises as `Admission.take`."""
        more = max(sequences - self._sequences, 0)
        self._admission.take(more, self._sequences)
        self._sequences += more

    def close(self, served: bool) -> None:
        """Give them back. See `Admission.leave`."""
        self._admission.leave(self._sequences, served)
        self._sequences = 0


def claim(request: Request, sequences: int) -> None:
    """Have a request hold places for all its sequences, before they are begun. Raises as `Admission.take`."""
    ticket = request.scope.get("state", {}).get("ticket")
    if isinstance(ticket, Ticket):
        ticket.widen_to(sequences)


def note_encoded(request: Request) -> None:
    """Have a request that made tokens of a text, or a text of tokens, count as served."""
    request.scope.setdefault("state", {})["encoded"] = True


class Gate:
    """Turns away what cannot be served now: 503 while there is no model, 429 while the queue is full."""

    def __init__(self, app: ASGIApp, phase: Callable[[], str], admission: Admission, texts: Admission) -> None:
        """`phase` tells whether the server is "loading", "ready" or "draining". `texts` is for those to tokenize, of
        which one thread does one at a time: a crowd of them is to keep out nobody else."""
        self._app, self._phase, self._admission, self._texts = app, phase, admission, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self._app(scope, receive, send)  # to look at the server is possible at any time
        elif self._phase() in _PAUSES:
            why, seconds = _PAUSES[self._phase()]
            error = APIError(503, why, code=self._phase(), headers=retry_after(seconds))
            await refuse(error, scope, receive, send)
        elif scope["path"].startswith(_QUEUED):
            await self._admit(self._admission, scope, receive, send)
        elif scope["path"].startswith(_OF_TEXTS):
            await self._admit(self._texts, scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _admit(self, admission: Admission, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            ticket = Ticket(admission)
        except APIError as error:
            await refuse(error, scope, receive, send)
            return
        state = scope.setdefault("state", {})
        state["ticket"] = ticket
        try:
            await self._app(scope, receive, send)
        finally:
            ticket.close(served="tokens" in state or "encoded" in state)
