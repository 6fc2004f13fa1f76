"""Files on a disk: replaced whole or not at all, and locked."""

import errno
import os
import secrets
import stat
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from prolepsis.errors import InputError

if sys.platform != "win32":
    import fcntl

_STALE = 3600  # seconds after which the rest of a killed save is removed by the next one


@contextmanager
def replace_file(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new binary file that takes the place of `path` when the block ends well.

    The file is written beside `path`, synced, and renamed, then the directory is synced: whatever happens on the
    way (an exception, Ctrl-C, a full disk, a killed process, a power cut), `path` holds either all of the old bytes
    or all of the new ones. On an exception the unfinished file is removed.

    Raises:
        InputError: `path` is a directory, its directory is missing or not writable, or the disk is full.
    """
    target = Path(os.path.realpath(path))
    mode = check_target(Path(path), target)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    _remove_stale(target)
    try:
        file = open(unfinished, "xb")  # noqa: SIM115 - closed below, before the rename
    except OSError as error:
        raise cannot_save(path, error) from error
    try:
        with file:
            if mode is not None:
                os.chmod(unfinished, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
        sync_directory(target.parent)
    except OSError as error:
        raise cannot_save(path, error) from error
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def require_writable(path: str | os.PathLike[str]) -> None:
    """Ask before long work whether `replace_file` will take `path`. Raises InputError where it is clear that not."""
    target = Path(os.path.realpath(path))
    check_target(Path(path), target)
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{os.fspath(path)} cannot be saved: the directory {target.parent} is write-protected")


class BusyError(InputError):
    """Another process is at the file."""


def lock_file(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Be the only process that has locked `file`, the one at `path`, until it is closed.

    Some file systems have no locks; then nobody has one. Raises BusyError where another process has it, or has removed
    or replaced the file meanwhile.
    """
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(path) from error
        except OSError:
            pass
    require_in_place(file, path)


def require_in_place(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Raise BusyError where `path` is another file by now, or none.

    Whoever replaces a file takes no lock: what is written to the old one would be lost without a word.
    """
    try:
        same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        same = False
    if not same:
        raise _busy(path)


def _busy(path: str | os.PathLike[str]) -> BusyError:
    return BusyError(f"{os.fspath(path)} cannot be saved: another process is saving to it; save again")


def check_target(path: Path, target: Path) -> int | None:
    """Permission bits of the file to be replaced, if there is one. Raises InputError for what will not be replaced."""
    if not target.parent.is_dir():
        raise InputError(f"{path} cannot be saved: there is no directory {target.parent}")
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise cannot_save(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a directory; give the name of a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file and will not be replaced")
    if not os.access(target, os.W_OK):
        raise InputError(f"{path} is write-protected and will not be replaced")
    return stat.S_IMODE(status.st_mode)


def cannot_save(path: str | os.PathLike[str], error: OSError) -> InputError:
    """What to raise for an error of the system while `path` is saved."""
    reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
    return InputError(f"{os.fspath(path)} cannot be saved: {reason}; an older file of that name is unchanged")


def _remove_stale(target: Path) -> None:
    """Delete what earlier saves of `target` left behind when they were killed."""
    for rest in target.parent.glob(f".{_literal(target.name)}.*.part"):
        with suppress(OSError):
            if time.time() - rest.stat().st_mtime > _STALE:
                rest.unlink()


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def sync_directory(directory: Path) -> None:
    """Make a rename durable. Some file systems refuse to sync a directory; the file itself is synced already."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
