"""The `prolepsis` command: parses, calls, prints.

Exit codes: 0 fine, 1 failed, 2 misuse (bad flags, files or prompts), 130 interrupted.
"""

import os
import sys

import click

from prolepsis.cli.app import app
from prolepsis.errors import InputError, ProlepsisError


def main() -> None:
    """Entry point of the console script."""
    sys.exit(_run())


def _run() -> int:
    try:
        result = app(standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has seen enough; what Python would still flush at exit must not complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except ProlepsisError as error:
        print(f"prolepsis: error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return result if isinstance(result, int) else 0
