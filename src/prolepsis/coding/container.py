"""The records of a session file, byte by byte: docs/format.md. Checks that need no decoding are made here."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KIVI_BLOCK
from prolepsis.coding.hashes import checksum
from prolepsis.coding.header import Front, Header
from prolepsis.coding.profile import GRID
from prolepsis.coding.source import Source
from prolepsis.errors import SegmentError

MAX_METADATA = 1 << 24
MAX_PAYLOAD = 1 << 31

SEGMENT = struct.Struct("<4sIQIIQQ")  # "SEGM", tokens, start, block hashes, 0, payload length, checksum
TRAILER = struct.Struct("<4sIQIIQ")  # "TAIL", metadata length, end position, segments, 0, checksum
INDEX_ENTRY = np.dtype([("length", "<u4"), ("payload", "<u8"), ("values", "<u8")])
_CHECKSUM = 8  # bytes, the last ones of either front


@dataclass(frozen=True)
class SegmentEntry:
    """One segment record.

    index: INDEX_ENTRY [streams]. offset: where its payload begins in the file. link: its checksum, with which the
    next record's begins.
    """

    start: int
    count: int
    ids: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    index: NDArray[np.void]
    offset: int = 0
    link: bytes = b""

    @property
    def stop(self) -> int:
        """The position behind its last token."""
        return self.start + self.count

    @property
    def payload_bytes(self) -> int:
        """Length of all streams."""
        return int(self.index["length"].sum(dtype=np.int64))


@dataclass(frozen=True)
class Trailer:
    """The end of a save. stop: the position behind the last token. offset: the byte behind the trailer."""

    metadata: bytes
    stop: int
    offset: int
    link: bytes


def pack_segment(entry: SegmentEntry, link: bytes) -> bytes:
    """A segment record up to its payload. link: that of the record before. `link_of_segment` tells this one's."""
    front = SEGMENT.pack(b"SEGM", entry.count, entry.start, len(entry.hashes), 0, entry.payload_bytes, 0)
    return _seal(front, entry.ids.tobytes() + entry.hashes.tobytes() + entry.index.tobytes(), link)


def pack_trailer(metadata: bytes, stop: int, segments: int, link: bytes) -> bytes:
    """The record that ends a save. segments: how many there are in the whole file."""
    return _seal(TRAILER.pack(b"TAIL", len(metadata), stop, segments, 0, 0), metadata, link)


def _seal(front: bytes, rest: bytes, link: bytes) -> bytes:
    front = front[:-_CHECKSUM]
    return front + checksum(link, front, rest) + rest


def link_of(record: bytes) -> bytes:
    """The link of a packed record."""
    size = SEGMENT.size if record[:4] == b"SEGM" else TRAILER.size
    return record[size - _CHECKSUM : size]


def read_records(source: Source, front: Front) -> Iterator[SegmentEntry | Trailer]:
    """The records of a file, in order; they end behind a trailer or with an error.

    `source` stands behind the header. Whenever a SegmentEntry was given, its payload comes next, and must be taken or
    skipped before the next record is asked for.

    Raises:
        SegmentError: a record is truncated, damaged, out of order or out of bounds.
    """
    position, segments, link, whole = front.header.start, 0, front.link, False
    chained = front.version > 1
    while True:
        begin = source.position
        marker = bytes(source.read(4))
        if whole and not marker:
            return
        if whole and not chained:
            raise SegmentError(f"{source.name}: there are bytes behind the trailer, which version 1 does not have")
        if marker == b"TAIL":
            trailer = _read_trailer(source, position, segments, link)
            link, whole = trailer.link if chained else link, True
            yield trailer
        elif marker == b"SEGM":
            entry = _read_segment(source, front.header, segments, position, link)
            link, whole = entry.link if chained else link, False
            position, segments = entry.stop, segments + 1
            yield entry
        elif len(marker) < 4:
            raise SegmentError(f"{source.name} is truncated: it ends within record {segments}")
        else:
            raise SegmentError(
                f"{source.name}: segment {segments} is damaged: it begins with {marker!r} at byte {begin}"
            )


def _read_segment(source: Source, header: Header, number: int, position: int, link: bytes) -> SegmentEntry:
    name, where = source.name, f"segment {number}"
    front = b"SEGM" + _read(source, SEGMENT.size - 4, where)
    _, count, start, hashes, reserved, payload, _ = SEGMENT.unpack(front)
    room = GRID - position % GRID
    blocks = _blocks_ended(start, count, header) if header.tokens != "none" else 0
    if start != position or not 1 <= count <= room or reserved or hashes != blocks:
        raise SegmentError(
            f"{name}: {where} is damaged: tokens {start}-{start + count - 1} with {hashes} block hashes, "
            f"where at most {room} tokens from {position} belong"
        )
    if header.dtype == "kivi4" and count % KIVI_BLOCK:
        raise SegmentError(f"{name}: {where} is damaged: {count} tokens of kivi4 are no whole blocks of {KIVI_BLOCK}")
    ids = count if header.tokens == "ids" else 0
    lengths = (4 * ids, 8 * hashes, INDEX_ENTRY.itemsize * header.streams)
    rest = _read(source, sum(lengths), where)
    if checksum(link, front[:-_CHECKSUM], rest) != front[-_CHECKSUM:]:
        raise SegmentError(f"{name}: {where} is damaged: the checksum of its index differs")
    entry = SegmentEntry(
        start,
        count,
        np.frombuffer(rest, np.dtype("<u4"), ids),
        np.frombuffer(rest, np.dtype("<u8"), hashes, lengths[0]),
        np.frombuffer(rest, INDEX_ENTRY, offset=lengths[0] + lengths[1]),
        source.position,
        front[-_CHECKSUM:],
    )
    if entry.payload_bytes != payload or payload >= MAX_PAYLOAD or _has_overlong_stream(entry, header):
        raise SegmentError(f"{name}: {where} is damaged: its streams cannot make up {payload} bytes")
    return entry


def _blocks_ended(start: int, count: int, header: Header) -> int:
    return (start + count) // header.block_size - start // header.block_size


def _has_overlong_stream(entry: SegmentEntry, header: Header) -> bool:
    """No stream is longer than its values as they are."""
    longest = 4 + 2 * entry.count * np.array(header.values_per_token * 2 * header.layers)
    return bool((entry.index["length"] > longest).any())


def _read_trailer(source: Source, position: int, segments: int, link: bytes) -> Trailer:
    front = b"TAIL" + _read(source, TRAILER.size - 4, "the trailer")
    _, length, stop, count, reserved, _ = TRAILER.unpack(front)
    if length > MAX_METADATA or reserved or (stop, count) != (position, segments):
        raise SegmentError(
            f"{source.name}: the trailer is damaged: it tells of {count} segments up to position {stop}, "
            f"there are {segments} up to {position}"
        )
    metadata = _read(source, length, "the trailer")
    if checksum(link, front[:-_CHECKSUM], metadata) != front[-_CHECKSUM:]:
        raise SegmentError(f"{source.name}: the trailer is damaged: its checksum differs")
    return Trailer(metadata, stop, source.position, front[-_CHECKSUM:])


def _read(source: Source, length: int, where: str) -> bytes:
    data = bytes(source.read(length))
    if len(data) < length:
        raise SegmentError(f"{source.name} is truncated: it ends within {where}")
    return data
