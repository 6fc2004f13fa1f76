"""The `prolepsis` command: parses, calls, prints.

Results go to standard output, everything else to standard error. Exit codes: 0 fine, 1 failed, 2 misuse (bad flags,
files or prompts), 130 interrupted.
"""

import io
import os
import sys

from prolepsis.errors import InputError, ProlepsisError

_NO_CACHE = "no locator available"  # what Numba says of it when kernels are imported
_NO_CACHE_ADVICE = (
    "this user cannot write where compiled kernels are kept: another one made the directory, perhaps root; "
    "set PROLEPSIS_CACHE (or NUMBA_CACHE_DIR, where that is set) to a directory of your own"
)

FORESEEN = (ProlepsisError, MemoryError, OSError)
"""What may end a command without a traceback."""


def main() -> None:
    """Entry point of the console script."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by whoever started this
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 - open until the process ends
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows "?" for it
    try:
        code = _run()
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        code = 1
        _drop_output()
    except FORESEEN as error:
        code = _fail(*failure(error))
        if isinstance(error, OSError):
            _drop_output()
    if code == 130 and sys.stderr.isatty():
        print(file=sys.stderr)
    sys.exit(code)


def failure(error: BaseException) -> tuple[str, int]:
    """What to tell of an error that is foreseen, and the exit code."""
    if isinstance(error, MemoryError):
        return f"there is not enough memory for this: {error}".rstrip(": "), 1
    return str(error), 2 if isinstance(error, InputError) else 1


def cache_advice(error: Exception) -> str | None:
    """What to do where compiled kernels cannot be kept; None for any other error."""
    return _NO_CACHE_ADVICE if _NO_CACHE in str(error) else None


def _run() -> int:
    from prolepsis.cli import app  # here, so that Ctrl-C while it loads is caught too

    try:
        return app.app_for(sys.argv[1:])(prog_name="prolepsis", standalone_mode=False) or 0
    except Exception as error:
        misuse = cache_advice(error) or app.usage_message(error)
        if misuse is None:
            raise
        return _fail(misuse, 2)


def _fail(reason: str, code: int) -> int:
    print(f"prolepsis: error: {reason}", file=sys.stderr)
    return code


def _drop_output() -> None:
    """Python would try once more to write what standard output still holds when it exits, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
