"""Session files on a disk: read, or appended to with what they held intact."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from prolepsis.coding import SessionReader, SessionWriter
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.predictors import Past
from prolepsis.errors import InputError
from prolepsis.store.files import cannot_save, check_target, lock_file, require_in_place


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
    check_target(Path(path), Path(os.path.realpath(path)))
    try:
        file = open(path, "r+b", buffering=0)  # noqa: SIM115 - closed by the block below
    except OSError as error:
        raise cannot_save(path, error) from error
    with file:
        lock_file(file, path)
        reader = SessionReader(file, str(path), profile=profile, salvage=True)
        writer = SessionWriter.append_to(reader, past)
        try:
            yield reader, writer
            require_in_place(file, path)
        except BaseException as error:
            with suppress(OSError):
                writer.abandon()
            if isinstance(error, OSError):
                raise cannot_save(path, error) from error
            raise
