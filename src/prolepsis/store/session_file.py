"""Session files on a disk: replaced whole or not at all, or appended to with what they held intact."""

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

from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.predictors import Past
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
    mode = _check_target(Path(path), target)
    unfinished = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    _remove_stale(target)
    try:
        file = open(unfinished, "xb")  # noqa: SIM115 - closed below, before the rename
    except OSError as error:
        raise _cannot_save(path, error) from error
    try:
        with file:
            if mode is not None:
                os.chmod(unfinished, mode)
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, target)
        _sync_directory(target.parent)
    except OSError as error:
        raise _cannot_save(path, error) from error
    finally:
        with suppress(FileNotFoundError):
            unfinished.unlink()


def require_writable(path: str | os.PathLike[str]) -> None:
    """Ask before long work whether `replace_file` will take `path`. Raises InputError where it is clear that not."""
    target = Path(os.path.realpath(path))
    _check_target(Path(path), target)
    if not os.access(target.parent, os.W_OK):
        raise InputError(f"{os.fspath(path)} cannot be saved: the directory {target.parent} is write-protected")


@contextmanager
def open_session(
    path: str | os.PathLike[str], *, profile: AnyProfile | None = None, salvage: bool = False
) -> Iterator[SessionReader]:
    """The session file at `path`, for reading. `profile` and `salvage` are those of `SessionReader`.

    It is read, not mapped into memory: another process may cut it short or replace it at any time.

    Raises:
        InputError: it cannot be opened.
        SegmentError: it is no whole, sound session file.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed by the block below
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist") from error
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
    with file:
        yield SessionReader(file, str(path), profile=profile, salvage=salvage)


@contextmanager
def append_session(
    path: str | os.PathLike[str], *, profile: AnyProfile | None = None, past: Past | None = None
) -> Iterator[tuple[SessionReader, SessionWriter]]:
    """The session file at `path`, and a writer that goes on behind its last whole save.

    Only one process at a time appends to a file. Whatever happens on the way, what was saved before stays: on an
    exception what was added is cut off again, and what a killed process leaves behind is left out by readers that
    salvage, and cut off by the next save. As long as nothing is added or finished, the file is not touched. `past` is
    that of `SessionWriter.append_to`.

    Raises:
        InputError: it cannot be opened for writing or appended to, another process is at it, or the disk is full.
        SegmentError: it is no session file, or its profile is kept outside and is not `profile`.
    """
    _check_target(Path(path), Path(os.path.realpath(path)))
    try:
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by the block below
    except OSError as error:
        raise _cannot_save(path, error) from error
    with file:
        _lock(file, path)
        reader = SessionReader(file, str(path), profile=profile, salvage=True)
        writer = SessionWriter.append_to(reader, past)
        try:
            yield reader, writer
            _require_in_place(file, path)
        except BaseException as error:
            with suppress(OSError):
                writer.abandon()
            if isinstance(error, OSError):
                raise _cannot_save(path, error) from error
            raise


class BusyError(InputError):
    """Another process is saving to the file."""


def _lock(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Keep other processes from appending until `file` is closed. Some file systems have no locks; then nobody has."""
    if sys.platform != "win32":
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _busy(path) from error
        except OSError:
            pass
    _require_in_place(file, path)


def _require_in_place(file: BinaryIO, path: str | os.PathLike[str]) -> None:
    """Whoever replaces a file takes no lock: what is written to the old one would be lost without a word."""
    try:
        same = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        same = False
    if not same:
        raise _busy(path)


def _busy(path: str | os.PathLike[str]) -> BusyError:
    return BusyError(f"{os.fspath(path)} cannot be saved: another process is saving to it; save again")


def _check_target(path: Path, target: Path) -> int | None:
    """Permission bits of the file to be replaced, if there is one."""
    if not target.parent.is_dir():
        raise InputError(f"{path} cannot be saved: there is no directory {target.parent}")
    try:
        status = target.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _cannot_save(path, error) from error
    if stat.S_ISDIR(status.st_mode):
        raise InputError(f"{path} is a directory; give the name of a file in it")
    if not stat.S_ISREG(status.st_mode):
        raise InputError(f"{path} is not a regular file and will not be replaced")
    if not os.access(target, os.W_OK):
        raise InputError(f"{path} is write-protected and will not be replaced")
    return stat.S_IMODE(status.st_mode)


def _cannot_save(path: str | os.PathLike[str], error: OSError) -> InputError:
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


def _sync_directory(directory: Path) -> None:
    """Make a rename durable. Some file systems refuse to sync a directory; the file itself is synced already."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
