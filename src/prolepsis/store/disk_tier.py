"""A tier in a directory: a file for each entry, and an index. Sound after a kill or a power cut at any moment."""

import errno
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from prolepsis.errors import InputError, TierDamagedError, TierError, TierFullError
from prolepsis.store.disk_index import DiskIndex, cost_of
from prolepsis.store.disk_recovery import UNFINISHED, reconcile
from prolepsis.store.files import BusyError, lock_file, sync_directory
from prolepsis.store.frame import HEADER_BYTES, LARGEST_FRAME, check, header_of
from prolepsis.store.tier import Usage, path_of

_LOCK = "prolepsis-store.lock"  # also the sign that a directory is a store
_INDEX = "index.sqlite"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class DiskTier:
    """Entries in files below `directory`, up to `budget` bytes; those longest unused are evicted.

    Implements PinningTier; pins last as long as the directory. A file is written beside its place, synced, renamed, and
    then entered into the index: an entry is whole or not there. What the budget counts are whole blocks of 4 KiB;
    beside it come the index (about 300 bytes an entry) and one file for each thread that is putting.

    Raises InputError where the directory cannot be used, holds other things, or is another process's store.
    """

    kind = "disk"

    def __init__(self, directory: str | os.PathLike[str], budget: int) -> None:
        self._directory = Path(directory)
        self._budget = budget
        self.name = f"disk:{self._directory}"
        self._evictions = 0
        self._lock = threading.Lock()
        self._lock_file = _own(self._directory)
        try:
            self._index = DiskIndex(self._directory / _INDEX)
            try:
                reconcile(self._directory, self._index)
                with self._index.change():
                    self._evict(0)
            except BaseException:
                self._index.close()
                raise
        except (OSError, sqlite3.Error) as error:
            self._lock_file.close()
            raise InputError(f"the store directory {directory} cannot be used: {_reason(error)}") from error

    def put(self, key: str, data: bytes) -> None:
        """As `Tier.put`. Where the disk is full before the budget is, older entries make way."""
        header = header_of(key, data)
        with self._errors():
            with self._lock:
                self._require_room(key, len(data))
            try:
                self._store(key, header, data)
            except (OSError, sqlite3.Error) as error:
                if not _is_full(error):
                    raise
                with self._lock, self._index.change():
                    self._remove(self._index.oldest(2 * cost_of(len(data))))
                self._store(key, header, data)

    def get(self, key: str) -> bytes | None:
        """As `Tier.get`."""
        with self._errors():
            with self._lock:
                if self._index.size(key) is None:
                    return None
                self._index.touch(key)
            try:
                file = open(self._path(key), "rb", buffering=0)  # noqa: SIM115 - closed below
            except FileNotFoundError:
                self._gone(key)
                return None
            with file:
                try:
                    return _read(key, file)
                except TierDamagedError:
                    self._remove_damaged(key, file)
                    raise

    def size(self, key: str) -> int | None:
        """As `Tier.size`."""
        with self._errors(), self._lock:
            return self._index.size(key)

    def touch(self, key: str) -> None:
        """As `PinningTier.touch`."""
        with self._errors(), self._lock:
            self._index.touch(key)

    def delete(self, key: str) -> None:
        """As `Tier.delete`: the file is gone for good when this returns."""
        path = self._path(key)
        with self._errors(), self._lock:
            with suppress(FileNotFoundError):
                path.unlink()
                sync_directory(path.parent)
            if self._index.size(key) is not None:
                with self._index.change():
                    self._index.remove(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        """As `Tier.keys`."""
        last = ""
        while True:
            with self._errors(), self._lock:
                page = self._index.page(last, kind)
            if not page:
                return
            yield from page
            last = page[-1]

    def pin(self, key: str) -> bool:
        """As `PinningTier.pin`."""
        with self._errors(), self._lock, self._index.durable_change():
            return self._index.pin(key, True)

    def unpin(self, key: str) -> None:
        """As `PinningTier.unpin`."""
        with self._errors(), self._lock:
            self._index.touch(key)
            with self._index.change():
                self._index.pin(key, False)

    def pinned(self) -> list[str]:
        """As `PinningTier.pinned`."""
        with self._errors(), self._lock:
            return self._index.pinned()

    def usage(self) -> Usage:
        """As `Tier.usage`."""
        return Usage(self._index.entries, self._index.bytes, self._budget, self._evictions)

    def close(self) -> None:
        """Write down the order of use, and let other processes have the directory."""
        with self._errors(), self._lock:
            if not self._lock_file.closed:
                with self._lock_file:
                    self._index.close()

    def _store(self, key: str, header: bytes, data: bytes) -> None:
        path = self._path(key)
        unfinished = path.with_name(f"{key}.{secrets.token_hex(4)}{UNFINISHED}")
        _make_directories(path.parent, self._directory)
        try:
            _write(unfinished, header, data)
            with self._lock:
                self._place(key, len(data), unfinished, path)
        finally:
            with suppress(OSError):
                unfinished.unlink(missing_ok=True)

    def _place(self, key: str, size: int, unfinished: Path, path: Path) -> None:
        """Give a written file its place, and enter it into the index. Should that fail, there is neither."""
        placed = False
        try:
            with self._index.change():
                self._require_room(key, size)
                self._evict(cost_of(size), key)
                os.replace(unfinished, path)
                placed = True
                sync_directory(path.parent)
                self._index.add(key, size)
        except BaseException:
            if placed:
                with suppress(OSError):
                    path.unlink()
            raise

    def _require_room(self, key: str, size: int) -> None:
        old, pinned = self._index.cost(key)
        others = self._index.pinned_bytes - (old if pinned else 0)
        if cost_of(size) > self._budget - others:
            raise TierFullError(
                f"{self.name}: {cost_of(size)} bytes do not fit beside {others} pinned ones into {self._budget}"
            )

    def _evict(self, needed: int, key: str = "") -> None:
        """Make room for `needed` bytes in place of what `key` takes, if anything. Within a change of the index."""
        old, _ = self._index.cost(key)
        excess = self._index.bytes - old + needed - self._budget
        if excess > 0:
            self._remove(self._index.oldest(excess, but=key))

    def _remove(self, keys: list[str]) -> None:
        """Evict entries: files first, so that none is found again without its place in the index."""
        for key in keys:
            self._path(key).unlink(missing_ok=True)
            self._index.remove(key)
            self._evictions += 1

    def _gone(self, key: str) -> None:
        """There was no file: removed by us meanwhile, which is well, or by someone else."""
        with self._lock:
            if self._index.size(key) is None or self._path(key).exists():
                return
            with self._index.change():
                self._index.remove(key)
        raise TierDamagedError(f"{self.name}: the file of {key} is gone")

    def _remove_damaged(self, key: str, file: BinaryIO) -> None:
        """Delete the file that was read, unless another took its place meanwhile."""
        path = self._path(key)
        with self._lock, suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                path.unlink()
                with self._index.change():
                    self._index.remove(key)

    def _path(self, key: str) -> Path:
        return self._directory / path_of(key)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error) as error:
            raise (TierFullError if _is_full(error) else TierError)(f"{self.name}: {_reason(error)}") from error


def _own(directory: Path) -> BinaryIO:
    """The lock file of a store's directory, made if need be, locked."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = directory / _LOCK
        if not lock.exists() and any(path.name != "lost+found" for path in directory.iterdir()):
            raise InputError(f"{directory} holds other things and no {_LOCK}; give the store a directory of its own")
        file = open(os.open(lock, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)  # noqa: SIM115 - kept
    except OSError as error:
        raise InputError(f"the store directory {directory} cannot be used: {_reason(error)}") from error
    try:
        lock_file(file, lock)
    except BusyError as error:
        file.close()
        raise InputError(
            f"the store directory {directory} is in use by another process; give each its own, or share one by redis://"
        ) from error
    return file


def _make_directories(directory: Path, top: Path) -> None:
    """Make directories below `top` durably, for their owner alone."""
    if directory == top or directory.is_dir():
        return
    _make_directories(directory.parent, top)
    with suppress(FileExistsError):
        directory.mkdir(mode=0o700)
        sync_directory(directory.parent)


def _write(path: Path, header: bytes, data: bytes) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as file:
        for part in (header, data):
            rest = memoryview(part)
            while rest:
                rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def _read(key: str, file: BinaryIO) -> bytes:
    size = os.fstat(file.fileno()).st_size
    if size > LARGEST_FRAME:
        raise TierDamagedError(f"the file of {key} is longer than any entry")
    header, data = file.read(HEADER_BYTES), file.read(size)
    check(key, header, data)
    return data


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_FULL


def _reason(error: Exception) -> str:
    return (isinstance(error, OSError) and error.strerror) or str(error)
