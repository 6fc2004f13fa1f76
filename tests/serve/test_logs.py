"""What the server says of itself, as text and as JSON."""

import gc
import io
import json
import logging
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from unittest import mock

import pytest

from prolepsis.serve.logs import logging_on, write_line


def _warn() -> None:
    try:
        raise ValueError("oh")
    except ValueError:
        logging.getLogger("uvicorn.error").exception("failed\nbadly")


def _end_a_thread() -> None:
    thread = threading.Thread(target=lambda: [].pop(), name="worker")
    thread.start()
    thread.join()


class _Unclosable:
    def __del__(self) -> None:
        raise OSError("in vain")


def _lose_an_error() -> None:
    _Unclosable()
    gc.collect()


@pytest.mark.parametrize(
    ("fail", "message", "error"),
    [
        (_warn, "failed\nbadly", "ValueError: oh"),
        (_lose_an_error, "Exception ignored in", "OSError: in vain"),
        (_end_a_thread, "the thread worker has failed", "IndexError: pop from empty list"),
    ],
)
def test_failures_are_told_with_their_traceback(
    fail: Callable[[], None], message: str, error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_on(as_json=True):
        fail()
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (fields,) = (each for each in said if each["message"].startswith(message))  # what other tests left may be told too
    assert fields["level"] == "error"
    assert error in fields["traceback"]
    with logging_on(as_json=False):
        fail()
    text = capsys.readouterr().err
    assert f"ERROR {message}" in text
    assert "\nTraceback" in text
    assert error in text


def test_pythons_warnings_are_lines_too(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings.catch_warnings(), logging_on(as_json=True):
        warnings.simplefilter("always")
        warnings.warn("mind the gap", stacklevel=1)
    said = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    (fields,) = (each for each in said if "mind the gap" in each["message"])
    assert fields["level"] == "warning"


def test_afterwards_everything_is_as_it_was() -> None:
    root = logging.getLogger()
    before = root.handlers[:], root.level, threading.excepthook, sys.unraisablehook, warnings.showwarning
    with suppress(KeyError), logging_on(as_json=True):
        assert threading.excepthook != before[2]
        raise KeyError("oh")
    after = root.handlers, root.level, threading.excepthook, sys.unraisablehook, warnings.showwarning
    assert after == before


def test_a_line_is_written_in_one_piece() -> None:
    """Else the end of one thread's line may stand behind that of another's."""
    stream = mock.Mock(wraps=io.StringIO())
    write_line("one", stream)
    write_line("two", stream)
    assert stream.write.call_args_list == [mock.call("one\n"), mock.call("two\n")]
    assert stream.flush.call_count == 2
