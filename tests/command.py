"""The command, run in this process where only its outcome counts, or in one of its own."""

import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from prolepsis.cli import main

COMMAND = [sys.executable, "-m", "prolepsis"]


class Outcome(NamedTuple):
    """Exit code, standard output and standard error."""

    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    """With the same imports as this process, and output buffered as it usually is."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**kept, "PYTHONPATH": os.pathsep.join(sys.path)}


def call(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
    """Run the command in this process: a tenth of a second instead of one."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    argv = ["prolepsis", *map(str, arguments)]
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGHUP)}
    code: Any = None
    with (
        mock.patch("sys.argv", argv),
        mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
    return Outcome(code, *(stream.buffer.getvalue().decode() for stream in (out, err)))


def run(*arguments: str | Path, stdin: bytes = b"") -> Outcome:
    """Run the command in a process of its own."""
    outcome = subprocess.run(
        [*COMMAND, *map(str, arguments)], env=environment(), input=stdin, capture_output=True, timeout=120, check=False
    )
    return Outcome(outcome.returncode, outcome.stdout.decode(), outcome.stderr.decode())


# Runs the command, but stands still in a call of one method, after saying so.
STALLING = """
import importlib, sys, time
module, owner, method, calls = sys.argv.pop(1).split(":")
owner = getattr(importlib.import_module(module), owner)
original, left = getattr(owner, method), int(calls)
def stalling(*arguments, **named):
    global left
    left -= 1
    if left == 0:
        print("stalled", file=sys.stderr, flush=True)
        for _ in range(600):  # a signal between Python's last look for one and a sleep waits for the sleep's end
            time.sleep(0.1)
    return original(*arguments, **named)
setattr(owner, method, stalling)
from prolepsis.cli import main
main()
"""


def stalling(where: str, *arguments: str | Path) -> list[str]:
    """A command line that stands still at `where`: "module:class:method:the how manieth call"."""
    return [sys.executable, "-c", STALLING, where, *map(str, arguments)]


def assert_refused(outcome: Outcome, *parts: str, code: int = 2) -> None:
    """One line of complaint that holds all `parts`, nothing on standard output, and the exit code of misuse."""
    assert outcome.code == code, outcome
    assert outcome.out == ""
    assert outcome.err.startswith("prolepsis: error: "), outcome.err
    assert outcome.err.count("\n") == 1, outcome.err
    for part in parts:
        assert part in outcome.err


def json_of(outcome: Outcome) -> dict[str, Any]:
    """The one JSON object on standard output, with nothing beside it."""
    assert outcome.code == 0, outcome.err
    assert outcome.out.endswith("}\n")
    value = json.loads(outcome.out)
    assert isinstance(value, dict)
    return value
