"""Which entries a disk tier has, in a SQLite database: sizes, pins, and in which order they were used."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from prolepsis.store.frame import HEADER_BYTES

_VERSION = 1  # of the tables below; an index of another version is made again from the files
_SCHEMA = """
CREATE TABLE entries (key TEXT PRIMARY KEY, size INTEGER NOT NULL, used INTEGER NOT NULL, pinned INTEGER NOT NULL)
    WITHOUT ROWID;
CREATE INDEX oldest ON entries (used) WHERE pinned = 0;
"""
_BROKEN = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)
_BLOCK = 4096  # what the usual file systems give to a file at least
_MOST_TOUCHED = 1024
_PAGE = 1000  # keys read at once


def cost_of(size: int) -> int:
    """Bytes that an entry of `size` bytes takes of a disk: header and data in whole blocks."""
    return -(-(size + HEADER_BYTES) // _BLOCK) * _BLOCK


class DiskIndex:
    """The index file `path`, made if need be; one that is damaged is replaced by an empty one.

    entries, bytes (as `cost_of`), pinned_bytes: what is in it. Not safe in several threads: the caller locks. Any
    method may raise sqlite3.Error; a change is then not made, or as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._touched: dict[str, int] = {}  # used since, by key: written with the next change, not with every read
        self._database = self._open_or_replace()
        self._count()
        (newest,) = self._one("SELECT coalesce(max(used), 0) FROM entries")
        self._clock: int = newest

    def size(self, key: str) -> int | None:
        """Bytes of data of an entry, or None."""
        row = self._one("SELECT size FROM entries WHERE key = ?", key)
        return None if row is None else row[0]

    def cost(self, key: str) -> tuple[int, bool]:
        """What an entry takes, and whether it is pinned; of none: nothing."""
        row = self._one("SELECT size, pinned FROM entries WHERE key = ?", key)
        return (0, False) if row is None else (cost_of(row[0]), bool(row[1]))

    def touch(self, key: str) -> None:
        """Note that an entry was used just now."""
        self._clock += 1
        self._touched[key] = self._clock
        if len(self._touched) >= _MOST_TOUCHED:
            with self.change():
                pass

    def add(self, key: str, size: int) -> None:
        """An entry, just used; in place of an older one whose pin it keeps. Within `change`."""
        old, pinned = self.cost(key)
        self._touched.pop(key, None)
        self._clock += 1
        self._database.execute(
            "INSERT INTO entries VALUES (?, ?, ?, 0) "
            "ON CONFLICT DO UPDATE SET size = excluded.size, used = excluded.used",
            (key, size, self._clock),
        )
        self._account(0 if old else 1, cost_of(size) - old, pinned)

    def remove(self, key: str) -> None:
        """Forget an entry, if it is there. Within `change`."""
        old, pinned = self.cost(key)
        self._touched.pop(key, None)
        if old:
            self._database.execute("DELETE FROM entries WHERE key = ?", (key,))
            self._account(-1, -old, pinned)

    def pin(self, key: str, pinned: bool) -> bool:
        """Mark an entry; False where there is none. Within `change`."""
        old, was_pinned = self.cost(key)
        if old and was_pinned != pinned:
            self._database.execute("UPDATE entries SET pinned = ? WHERE key = ?", (int(pinned), key))
            self.pinned_bytes += old if pinned else -old
        return bool(old)

    def pinned(self) -> list[str]:
        """Keys of marked entries."""
        return [key for (key,) in self._database.execute("SELECT key FROM entries WHERE pinned = 1")]

    def oldest(self, needed: int, but: str = "") -> list[str]:
        """Entries without a pin, longest unused first, that take `needed` bytes together, or all. Within `change`."""
        self._write_touched()
        keys = []
        with closing(
            self._database.execute("SELECT key, size FROM entries WHERE pinned = 0 AND key != ? ORDER BY used", (but,))
        ) as rows:
            while needed > 0 and (row := rows.fetchone()):
                keys.append(row[0])
                needed -= cost_of(row[1])
        return keys

    def shards(self) -> set[str]:
        """What keys begin with up to the second digit: each stands for a directory."""
        rows = self._database.execute("SELECT DISTINCT substr(key, 1, instr(key, '-') + 2) FROM entries")
        return {shard for (shard,) in rows}

    def shard(self, shard: str) -> dict[str, int]:
        """Keys and sizes of a shard."""
        rows = self._database.execute("SELECT key, size FROM entries WHERE key > ? AND key < ?", (shard, f"{shard}~"))
        return dict(rows)

    def page(self, after: str, kind: str) -> list[str]:
        """Some keys of a kind, or of all, that follow `after`, in order; none at the end."""
        first, last = (max(after, f"{kind}-"), f"{kind}-~") if kind else (after, "~")
        rows = self._database.execute(
            "SELECT key FROM entries WHERE key > ? AND key < ? ORDER BY key LIMIT ?", (first, last, _PAGE)
        )
        return [key for (key,) in rows]

    @contextmanager
    def durable_change(self) -> Iterator[None]:
        """A change that a power cut does not undo: pins, which the files do not tell."""
        self._database.execute("PRAGMA synchronous = FULL")
        try:
            with self.change():
                yield
        finally:
            self._database.execute("PRAGMA synchronous = NORMAL")

    @contextmanager
    def change(self) -> Iterator[None]:
        """What is changed within is changed as a whole at the end, or not at all, also for a process killed then."""
        self._database.execute("BEGIN IMMEDIATE")
        try:
            self._write_touched()
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            self._count()
            raise

    def close(self) -> None:
        """Write what is not yet, and close the file."""
        with closing(self._database), self.change():
            pass

    def _write_touched(self) -> None:
        touched, self._touched = self._touched, {}
        self._database.executemany(
            "UPDATE entries SET used = ? WHERE key = ?", [(used, key) for key, used in touched.items()]
        )

    def _account(self, entries: int, size: int, pinned: bool) -> None:
        self.entries += entries
        self.bytes += size
        self.pinned_bytes += size if pinned else 0

    def _count(self) -> None:
        cost = f"(size + {HEADER_BYTES + _BLOCK - 1}) / {_BLOCK} * {_BLOCK}"
        row = self._one(f"SELECT count(*), coalesce(sum({cost}), 0), coalesce(sum({cost} * pinned), 0) FROM entries")
        self.entries, self.bytes, self.pinned_bytes = row

    def _one(self, query: str, *values: object) -> Any:
        return self._database.execute(query, values).fetchone()

    def _open_or_replace(self) -> sqlite3.Connection:
        try:
            return self._open()
        except sqlite3.DatabaseError as error:
            if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _BROKEN:
                raise
        for suffix in ("", "-wal", "-shm"):
            self._path.with_name(self._path.name + suffix).unlink(missing_ok=True)
        return self._open()

    def _open(self) -> sqlite3.Connection:
        self._path.touch(mode=0o600)  # SQLite gives its other files the same permissions
        database = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
        try:
            database.execute("PRAGMA locking_mode = EXCLUSIVE")
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = NORMAL")  # what a power cut takes is made again from the files
            database.execute("PRAGMA wal_autocheckpoint = 256")  # pages: its log takes about 1 MiB beside the budget
            (damage,) = database.execute("PRAGMA quick_check(1)").fetchone()
            (version,) = database.execute("PRAGMA user_version").fetchone()
            if damage != "ok":
                raise _broken(damage)
            if version != _VERSION:
                _create(database)
        except BaseException:
            database.close()
            raise
        return database


def _broken(damage: str) -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError(damage)
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error


def _create(database: sqlite3.Connection) -> None:
    database.executescript(
        f"BEGIN IMMEDIATE; DROP TABLE IF EXISTS entries; {_SCHEMA} PRAGMA user_version = {_VERSION}; COMMIT;"
    )
