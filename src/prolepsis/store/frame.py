"""What stands before an entry's bytes in files and on servers, so that damage is seen: 20 bytes.

"PLS1", the length of the data (u64, little-endian), and XXH3-64 of key and data (u64): an entry under another's key is
damage too.
"""

import struct
from collections.abc import Callable

import xxhash

from prolepsis.errors import TierDamagedError, TierFullError

_HEADER = struct.Struct("<4sQQ")
_MAGIC = b"PLS1"
HEADER_BYTES = _HEADER.size
LARGEST_ENTRY = 256 << 20
"""Bytes of data at most. It bounds what is allocated for what a file or a server holds."""
LARGEST_FRAME = HEADER_BYTES + LARGEST_ENTRY


def header_of(key: str, data: bytes) -> bytes:
    """The 20 bytes before `data`. Raises TierFullError for more than `LARGEST_ENTRY` bytes."""
    if len(data) > LARGEST_ENTRY:
        raise TierFullError(f"{key} has {len(data)} bytes; a tier outside this process takes {LARGEST_ENTRY} at most")
    return _HEADER.pack(_MAGIC, len(data), _checksum(key, data))


def length_in(header: bytes) -> int | None:
    """Bytes of data that a header announces, or None where it is none."""
    if len(header) != HEADER_BYTES:
        return None
    magic, length, _ = _HEADER.unpack(header)
    return length if magic == _MAGIC and length <= LARGEST_ENTRY else None


def check(key: str, header: bytes, data: bytes) -> None:
    """Raise TierDamagedError unless they are what was put under `key`."""
    if length_in(header) != len(data) or _HEADER.unpack(header)[2] != _checksum(key, data):
        raise TierDamagedError(f"what is stored under {key} is not what was put there")


def unframed_or_deleted(key: str, frame: bytes, delete: Callable[[str], None]) -> bytes:
    """The data of a header and data in one. Raises TierDamagedError, after `delete(key)`, where they do not match."""
    header, data = frame[:HEADER_BYTES], frame[HEADER_BYTES:]
    try:
        check(key, header, data)
    except TierDamagedError:
        delete(key)
        raise
    return data


def _checksum(key: str, data: bytes) -> int:
    digest = xxhash.xxh3_64(key.encode())
    digest.update(data)
    return digest.intdigest()
