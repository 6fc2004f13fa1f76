"""One line for each request on standard error, without what was said in it."""

import json
import time
from datetime import UTC, datetime
from typing import Any, TextIO

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prolepsis.serve.asgi import is_last
from prolepsis.serve.logs import write_line

_QUIET = ("/health", "/metrics")  # asked for every few seconds by machines: only what fails is worth a line
_ENDLESS = ("/v1/engine/events",)  # whoever reads these leaves before their end
_LONGEST_PATH = 200


def note_tokens(request: Request, prompt: int, cached: int, output: int) -> None:
    """Have the request's line say how many tokens it took; what was noted last counts."""
    request.scope.setdefault("state", {})["tokens"] = (prompt, cached, output)


class AccessLog:
    """Writes the line once a request has ended, or its client has left."""

    def __init__(self, app: ASGIApp, *, as_json: bool, prompts: bool, stream: TextIO | None = None) -> None:
        """`prompts`: the bodies of requests too. `stream`: standard error unless told otherwise."""
        self._app, self._as_json, self._prompts, self._stream = app, as_json, prompts, stream

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start = time.perf_counter()
        status, whole = 0, scope["path"] in _ENDLESS

        async def watched_send(message: Message) -> None:
            nonlocal status, whole
            if message["type"] == "http.response.start":
                status = message["status"]
            whole = whole or is_last(message)
            await send(message)

        try:
            await self._app(scope, receive, watched_send)
        finally:
            if scope["path"] not in _QUIET or status >= 400:
                self._write(scope, status, whole, time.perf_counter() - start)

    def _write(self, scope: Scope, status: int, whole: bool, seconds: float) -> None:
        state = scope.get("state", {})
        fields: dict[str, Any] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "method": scope["method"],
            "path": scope.get("raw_path", scope["path"].encode())[:_LONGEST_PATH].decode("latin-1"),
            "status": status,
            "complete": whole,
            "seconds": round(seconds, 4),
        }
        if "ended" in state:
            fields["ended"] = state["ended"]
        if "tokens" in state:
            fields.update(zip(("prompt_tokens", "cached_tokens", "output_tokens"), state["tokens"], strict=True))
        if self._prompts and state.get("body"):
            fields["body"] = state["body"].decode("utf-8", "replace")
        # ascii() and JSON leave no line break or control character of a path or body as it is.
        line = json.dumps(fields) if self._as_json else _line(fields)
        write_line(line, self._stream)


def _line(fields: dict[str, Any]) -> str:
    parts = [fields["time"], fields["method"], ascii(fields["path"])[1:-1], str(fields["status"])]
    if not fields["complete"]:
        parts.append("(cut off)")
    if "ended" in fields:
        parts.append(f"({fields['ended']})")
    if "prompt_tokens" in fields:
        parts.append("{prompt_tokens} tokens ({cached_tokens} cached) + {output_tokens}".format(**fields))
    parts.append(f"{fields['seconds']:.3f} s")
    if "body" in fields:
        parts.append(ascii(fields["body"]))
    return " ".join(parts)
