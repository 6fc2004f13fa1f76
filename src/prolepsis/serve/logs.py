"""What the server says of itself on standard error, beside its requests (`access_log`)."""

import json
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Literal, TextIO

Level = Literal["info", "warning", "error"]
_log = logging.getLogger(__name__)


def write_line(line: str, stream: TextIO | None = None) -> None:
    """Write it, by default on standard error, at once and in one piece: several threads write there."""
    stream = stream or sys.stderr
    stream.write(f"{line}\n")
    stream.flush()


def json_line(level: str, message: str, **more: str) -> str:
    """One thing that is said, as JSON."""
    now = datetime.now(UTC).isoformat(timespec="milliseconds")
    return json.dumps({"time": now, "level": level, "message": message, **more})


@contextmanager
def logging_on(*, as_json: bool) -> Iterator[None]:
    """Within the block, warnings, errors and what ends a thread are logged, with tracebacks, as JSON if told so; and so
    are Python's own warnings, and errors that nothing can catch."""
    root, hook, unraisable_hook = logging.getLogger(), threading.excepthook, sys.unraisablehook
    handlers, level = root.handlers[:], root.level
    handler = logging.StreamHandler()
    handler.setFormatter(_JSONFormatter() if as_json else logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    threading.excepthook, sys.unraisablehook = _log_thread, _log_unraisable
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        threading.excepthook, sys.unraisablehook = hook, unraisable_hook
        root.handlers[:] = handlers
        root.setLevel(level)


def _log_thread(ended: threading.ExceptHookArgs) -> None:
    if ended.exc_type is SystemExit:
        return
    name = "a thread" if ended.thread is None else f"the thread {ended.thread.name}"
    _log.error("%s has failed", name, exc_info=ended.exc_value)


def _log_unraisable(lost: "sys.UnraisableHookArgs") -> None:
    _log.error("%s %r", lost.err_msg or "Exception ignored in", lost.object, exc_info=lost.exc_value)


class _JSONFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        traceback = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json_line(record.levelname.lower(), record.getMessage(), **traceback)
