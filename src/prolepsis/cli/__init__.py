"""The `prolepsis` command: parses, calls, prints.

Exit codes: 0 fine, 1 failed, 2 misuse (bad flags, files or prompts), 130 interrupted.
"""

import sys

from prolepsis.cli.app import app
from prolepsis.errors import InputError, ProlepsisError


def main() -> None:
    """Entry point of the console script."""
    try:
        app()
    except ProlepsisError as error:
        print(f"prolepsis: error: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, InputError) else 1)
