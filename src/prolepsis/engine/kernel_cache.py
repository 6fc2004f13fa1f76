"""Compiled kernels on disk: every installation, and every version, has a directory of its own, which nobody empties."""

import os
import re
import time
from contextlib import suppress
from pathlib import Path

from numba import config

from prolepsis.model.pull import cache_directory

UNUSED_S = 30 * 86400.0
"""Seconds after which compiled kernels that no process has used are removed; who comes back compiles them again."""

_NAME = re.compile(r"[0-9a-f]{16}")


def outlives_process() -> bool:
    """Whether the next process finds what this one compiles; not where `cache_directory` cannot be written."""
    return bool(os.environ.get("NUMBA_CACHE_DIR")) or _is_ours(Path(config.CACHE_DIR))


def mark_used() -> None:
    """Have this installation's kernels be kept for another while."""
    with suppress(OSError):
        os.utime(config.CACHE_DIR)


def remove_unused() -> None:
    """Remove what other installations compiled and no process has used for `UNUSED_S`.

    Directories stay: a process that is about to keep something in one would fail without it. A file that another is
    about to load may go, it then compiles. Nothing is done where the place is not ours, but NUMBA_CACHE_DIR say,
    and links are not followed.
    """
    own = Path(config.CACHE_DIR)
    if not _is_ours(own):
        return
    with suppress(OSError):  # another process does the same, or the place is another user's
        for directory in own.parent.iterdir():
            if directory != own and _NAME.fullmatch(directory.name) and not directory.is_symlink():
                _empty_if_unused(directory)


def _is_ours(directory: Path) -> bool:
    return directory.parent == cache_directory() / "kernels"


def _empty_if_unused(directory: Path) -> None:
    files = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    if max(path.stat().st_mtime for path in (directory, *files)) < time.time() - UNUSED_S:
        for path in files:
            path.unlink(missing_ok=True)
