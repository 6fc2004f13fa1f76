"""The session file, byte by byte: docs/format.md. Packing, unpacking and the checks that need no predictor."""

import struct
from dataclasses import dataclass
from typing import Annotated, BinaryIO, Literal

import msgspec
import numpy as np
import xxhash
from msgspec import Meta
from numpy.typing import NDArray

from prolepsis.coding.floats import DType
from prolepsis.coding.profile import GRID, Geometry
from prolepsis.coding.rope import RopeSpec
from prolepsis.errors import InputError, SegmentError

MAGIC = b"\x89PKV\r\n\x1a\n"
VERSION = 1
MAX_HEADER = 1 << 26
MAX_METADATA = 1 << 24
MAX_POSITION = 1 << 40
MAX_CHANNELS = 1 << 21  # layers * 2 * kv_heads * head_dim
MAX_ROW = 4096  # heads_per_stream * head_dim: bit positions in a stream stay far below 2**31

PREAMBLE = struct.Struct("<8sHHIQ")  # magic, version, 0, header length, checksum
SEGMENT = struct.Struct("<4sIQIIQQ")  # "SEGM", tokens, start, block hashes, 0, payload length, checksum
TRAILER = struct.Struct("<4sIQIIQ")  # "TAIL", metadata length, end position, segments, 0, checksum
INDEX_ENTRY = np.dtype([("length", "<u4"), ("payload", "<u8"), ("values", "<u8")])

_Size = Annotated[int, Meta(ge=1, le=4096)]
_Text = Annotated[str, Meta(max_length=1024)]
TokenStorage = Literal["ids", "hashes", "none"]


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What every segment of a file shares.

    model: what identifies the model, part by part (weights, config, tokenizer ...), for comparison.
    numerics: which arithmetic computed the KV. start: position of the first token.
    """

    model: Annotated[dict[_Text, _Text], Meta(max_length=64)]
    numerics: _Text
    predictor: _Text
    profile_fingerprint: _Text
    dtype: DType
    layers: _Size
    kv_heads: _Size
    head_dim: _Size
    heads_per_stream: _Size
    block_size: _Size
    segment_tokens: Annotated[int, Meta(ge=GRID, le=GRID)]
    start: Annotated[int, Meta(ge=0, le=MAX_POSITION)]
    tokens: TokenStorage
    rope: RopeSpec | None
    profile: bytes

    @property
    def geometry(self) -> Geometry:
        """Shape and dtype of one token's KV."""
        return Geometry(self.dtype, self.layers, self.kv_heads, self.head_dim)

    @property
    def streams(self) -> int:
        """Streams of each segment."""
        return self.layers * 2 * (self.kv_heads // self.heads_per_stream)

    def stream_name(self, stream: int) -> str:
        """Layer, K or V and heads of a stream, for messages."""
        unit, group = divmod(stream, self.kv_heads // self.heads_per_stream)
        first = group * self.heads_per_stream
        return f"layer {unit // 2}, {'KV'[unit % 2]}, heads {first}-{first + self.heads_per_stream - 1}"


@dataclass(frozen=True)
class SegmentEntry:
    """One segment record. index: INDEX_ENTRY [streams]. offset: where its payload begins in the file."""

    start: int
    count: int
    ids: NDArray[np.uint32]
    hashes: NDArray[np.uint64]
    index: NDArray[np.void]
    offset: int


def checksum(*parts: bytes | memoryview) -> int:
    """xxh3-64 of the parts in a row."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.intdigest()


def pack_header(header: Header) -> bytes:
    """Preamble and header.

    Raises:
        InputError: the header holds something that a reader would refuse.
    """
    body = msgspec.msgpack.encode(header)
    try:
        _unpack_header(body)
    except ValueError as error:
        raise InputError(f"this cache cannot be saved: {error}") from error
    front = PREAMBLE.pack(MAGIC, VERSION, 0, len(body), 0)[:-8]
    return front + struct.pack("<Q", checksum(front, body)) + body


def read_header(file: BinaryIO, name: str) -> Header:
    """Read and check the header at the file's beginning.

    Raises:
        SegmentError: foreign, truncated, newer, damaged, or out of bounds.
    """
    file.seek(0)
    preamble = file.read(PREAMBLE.size)
    if not preamble:
        raise SegmentError(f"{name} is empty, so it is not a Prolepsis session file")
    if preamble[:8] != MAGIC[: len(preamble)]:
        raise SegmentError(f"{name} is not a Prolepsis session file: it begins with {preamble[:8]!r}")
    if len(preamble) < PREAMBLE.size:
        raise SegmentError(f"{name} is truncated: {len(preamble)} bytes, less than the preamble of {PREAMBLE.size}")
    _, version, reserved, length, expected = PREAMBLE.unpack(preamble)
    if version > VERSION:
        raise SegmentError(
            f"{name} has format version {version}; this Prolepsis reads up to version {VERSION}: upgrade Prolepsis"
        )
    if version < 1 or reserved or length > MAX_HEADER:
        raise SegmentError(f"{name}: the preamble is damaged (version {version}, header of {length} bytes)")
    body = file.read(length)
    if len(body) < length:
        raise SegmentError(f"{name} is truncated: a header of {length} bytes was announced, {len(body)} are there")
    if checksum(preamble[:-8], body) != expected:
        raise SegmentError(f"{name}: the header is damaged: its checksum differs")
    try:
        return _unpack_header(body)
    except ValueError as error:
        raise SegmentError(f"{name}: the header is not valid: {error}") from error


def _unpack_header(body: bytes) -> Header:
    """Raises ValueError (which msgspec's errors are) for anything out of bounds."""
    header = msgspec.msgpack.decode(body, type=Header)
    channels = header.layers * 2 * header.kv_heads * header.head_dim
    if channels > MAX_CHANNELS or len(body) > MAX_HEADER:
        raise ValueError(f"{channels} channels a token, more than the {MAX_CHANNELS} this version takes")
    if header.kv_heads % header.heads_per_stream or header.heads_per_stream * header.head_dim > MAX_ROW:
        raise ValueError(f"{header.kv_heads} heads cannot be cut into streams of {header.heads_per_stream}")
    if GRID % header.block_size or header.start % header.block_size:
        raise ValueError(f"block size {header.block_size} must divide {GRID}, and the start {header.start}")
    if header.rope is not None and header.rope.dim > header.head_dim:
        raise ValueError(f"RoPE of {header.rope.dim} channels does not fit heads of {header.head_dim}")
    return header


def pack_segment(entry: SegmentEntry, payload_length: int) -> bytes:
    """A segment record up to its payload."""
    front = SEGMENT.pack(b"SEGM", entry.count, entry.start, len(entry.hashes), 0, payload_length, 0)[:-8]
    rest = entry.ids.tobytes() + entry.hashes.tobytes() + entry.index.tobytes()
    return front + struct.pack("<Q", checksum(front, rest)) + rest


def pack_trailer(metadata: bytes, end: int, segments: int) -> bytes:
    """The last record of a file."""
    front = TRAILER.pack(b"TAIL", len(metadata), end, segments, 0, 0)[:-8]
    return front + struct.pack("<Q", checksum(front, metadata)) + metadata


def read_records(file: BinaryIO, name: str, header: Header) -> tuple[list[SegmentEntry], bytes]:
    """All segment records, without their payloads, and the metadata in the trailer.

    The file stands right behind the header.

    Raises:
        SegmentError: a record is truncated, damaged, out of order or out of bounds.
    """
    at = file.tell()
    size = file.seek(0, 2)
    file.seek(at)
    entries: list[SegmentEntry] = []
    position = header.start
    while True:
        marker = _read(file, 4, name, f"record {len(entries)}")
        if marker == b"TAIL":
            return entries, _read_trailer(file, name, position, len(entries))
        where = f"segment {len(entries)}"
        if marker != b"SEGM":
            raise SegmentError(f"{name}: {where} is damaged: it begins with {marker!r} at byte {file.tell() - 4}")
        entry, payload = _read_segment(file, name, header, where, position)
        if entry.offset + payload > size:
            raise SegmentError(
                f"{name} is truncated: {where} needs {payload} bytes from byte {entry.offset}, the file ends at {size}"
            )
        file.seek(entry.offset + payload)
        entries.append(entry)
        position += entry.count


def _read_segment(file: BinaryIO, name: str, header: Header, where: str, position: int) -> tuple[SegmentEntry, int]:
    front = b"SEGM" + _read(file, SEGMENT.size - 4, name, where)
    _, count, start, hashes, reserved, payload, expected = SEGMENT.unpack(front)
    room = GRID - position % GRID
    blocks = _blocks_ended(start, count, header) if header.tokens != "none" else 0
    if start != position or not 1 <= count <= room or reserved or hashes != blocks:
        raise SegmentError(
            f"{name}: {where} is damaged: tokens {start}-{start + count - 1} with {hashes} block hashes, "
            f"where at most {room} tokens from {position} belong"
        )
    ids = count if header.tokens == "ids" else 0
    lengths = (4 * ids, 8 * hashes, INDEX_ENTRY.itemsize * header.streams)
    rest = _read(file, sum(lengths), name, where)
    if checksum(front[:-8], rest) != expected:
        raise SegmentError(f"{name}: {where} is damaged: the checksum of its index differs")
    index = np.frombuffer(rest, INDEX_ENTRY, offset=lengths[0] + lengths[1])
    if int(index["length"].astype(np.int64).sum()) != payload or payload >= 1 << 31:
        raise SegmentError(f"{name}: {where} is damaged: its streams do not add up to {payload} bytes")
    entry = SegmentEntry(
        start,
        count,
        np.frombuffer(rest, np.dtype("<u4"), ids),
        np.frombuffer(rest, np.dtype("<u8"), hashes, lengths[0]),
        index,
        file.tell(),
    )
    return entry, payload


def _blocks_ended(start: int, count: int, header: Header) -> int:
    return (start + count) // header.block_size - start // header.block_size


def _read_trailer(file: BinaryIO, name: str, position: int, segments: int) -> bytes:
    front = b"TAIL" + _read(file, TRAILER.size - 4, name, "the trailer")
    _, length, end, count, reserved, expected = TRAILER.unpack(front)
    if length > MAX_METADATA or reserved or (end, count) != (position, segments):
        raise SegmentError(
            f"{name}: the trailer is damaged: it tells of {count} segments up to position {end}, "
            f"there are {segments} up to {position}"
        )
    metadata = _read(file, length, name, "the trailer")
    if checksum(front[:-8], metadata) != expected:
        raise SegmentError(f"{name}: the trailer is damaged: its checksum differs")
    if file.read(1):
        raise SegmentError(f"{name}: there are bytes behind the trailer, which no session file has")
    return metadata


def _read(file: BinaryIO, length: int, name: str, where: str) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise SegmentError(f"{name} is truncated: it ends within {where}")
    return data
