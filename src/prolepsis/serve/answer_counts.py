"""How many answers a server has given, by endpoint, method and status."""

from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH"})


class AnswerCounts:
    """Counts them. What clients make up, paths and methods, is counted under one name each."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, str, str]] = Counter()
        """By (endpoint as its route has it or "none", method or "other", status or "none")."""

    def count(self, scope: Scope, status: int) -> None:
        """One more; a status of 0 is a client that left before there was one."""
        handler = getattr(scope.get("route"), "path", "none")
        method = scope["method"] if scope["method"] in _METHODS else "other"
        self.counts[handler, method, str(status) if status else "none"] += 1


class CountAnswers:
    """Middleware that has every answer counted. It stands outermost, so that refusals count too."""

    def __init__(self, app: ASGIApp, answers: AnswerCounts) -> None:
        self._app, self._answers = app, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def watched_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            self._answers.count(scope, status)
