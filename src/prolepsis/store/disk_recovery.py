"""What is found when a disk tier is opened: the files are right, and the index is made to agree with them."""

import os
from collections.abc import Iterator
from pathlib import Path

from prolepsis.store.disk_index import DiskIndex
from prolepsis.store.frame import HEADER_BYTES, length_in
from prolepsis.store.tier import is_key

UNFINISHED = ".part"
"""Suffix of a file that is being written."""


def reconcile(directory: Path, index: DiskIndex) -> None:
    """Make the index agree with the files below `directory`.

    Unfinished files are removed. A whole file that the index does not know, or knows with another size, is taken in (it
    was put, or the index was lost); one that is not whole is removed. Entries without a file are forgotten. Files with
    other names are left alone. Raises OSError and sqlite3.Error.
    """
    on_disk = set(_shards(directory))
    with index.change():
        for shard in sorted(on_disk | index.shards()):
            _reconcile(directory, shard, index)


def _shards(directory: Path) -> Iterator[str]:
    for kind in _directories(directory):
        for digits in _directories(directory / kind):
            if is_key(f"{kind}-{digits}{'0' * 62}"):
                yield f"{kind}-{digits}"


def _directories(directory: Path) -> list[str]:
    with os.scandir(directory) as entries:
        return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _reconcile(directory: Path, shard: str, index: DiskIndex) -> None:
    known = index.shard(shard)
    for key, path, size in _files(directory, shard):
        if known.pop(key, None) == size - HEADER_BYTES:
            continue
        if _is_whole(path, size):
            index.add(key, size - HEADER_BYTES)
        else:
            os.unlink(path)
            index.remove(key)
    for key in known:
        index.remove(key)


def _files(directory: Path, shard: str) -> list[tuple[str, str, int]]:
    """Key, path and size of each entry's file; those that were being written when a process died are removed."""
    found = []
    try:
        entries = os.scandir(directory / shard.replace("-", "/"))
    except FileNotFoundError:
        return []
    with entries:
        for entry in entries:
            if not entry.name.startswith(shard) or not entry.is_file(follow_symlinks=False):
                continue
            if entry.name.endswith(UNFINISHED):
                os.unlink(entry.path)
            elif is_key(entry.name):
                found.append((entry.name, entry.path, entry.stat(follow_symlinks=False).st_size))
    return found


def _is_whole(path: str, size: int) -> bool:
    """Whether the file has the length that it announces. Its bytes are checked when they are read."""
    with open(path, "rb") as file:
        return length_in(file.read(HEADER_BYTES)) == size - HEADER_BYTES
