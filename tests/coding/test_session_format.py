"""Damaged, foreign, truncated, newer and hostile session files: one clear error each, and never a wrong value."""

import struct
from io import BytesIO

import msgspec
import numpy as np
import pytest
from kv_samples import ROPE, realistic_kv

from prolepsis.coding import SessionReader, container, decode, encode
from prolepsis.coding.container import INDEX_ENTRY, PREAMBLE, SEGMENT, checksum
from prolepsis.coding.profile import measure
from prolepsis.coding.writer import SessionWriter
from prolepsis.errors import SegmentError

KV = realistic_kv(layers=1, tokens=20, heads=1, dim=16)
DATA = encode(KV, dtype="bf16", rope=ROPE, token_ids=range(20), metadata=b"{}", model={"weights": "abc"})
LONG_KV = realistic_kv(layers=2, tokens=300, heads=2, dim=16)
LONG = encode(LONG_KV, dtype="bf16", rope=ROPE)


def header_of(data: bytes) -> tuple[container.Header, bytes]:
    """The header of a file, and what follows it."""
    length = PREAMBLE.unpack(data[: PREAMBLE.size])[3]
    end = PREAMBLE.size + length
    return msgspec.msgpack.decode(data[PREAMBLE.size : end], type=container.Header), data[end:]


def test_every_flipped_byte_is_found() -> None:
    for i in range(len(DATA)):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(DATA)
            damaged[i] ^= flip
            with pytest.raises(SegmentError):
                decode(damaged)


def test_every_truncation_is_found() -> None:
    for length in range(len(DATA)):
        with pytest.raises(SegmentError):
            decode(DATA[:length])


def test_flips_in_a_longer_file_are_found() -> None:
    random = np.random.default_rng(0)
    for i in random.integers(0, len(LONG), 300):
        damaged = bytearray(LONG)
        damaged[i] ^= int(random.integers(1, 256))
        with pytest.raises(SegmentError):
            decode(damaged)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is empty"),
        (b"GGUF" + bytes(40), "is not a Prolepsis session file: it begins with b'GGUF"),
        (b"\x89PK", "is truncated: 3 bytes"),
        (DATA[:100], "is truncated: a header of"),
        (DATA[:-1], "is truncated: it ends within the trailer"),
        (DATA + b"\n", "bytes behind the trailer"),
        (DATA[:8] + b"\x02\x00" + DATA[10:], "format version 2; this Prolepsis reads up to version 1: upgrade"),
        (DATA[:8] + b"\x00\x00" + DATA[10:], "the preamble is damaged"),
        (DATA[:12] + b"\xff\xff\xff\xff" + DATA[16:], "the preamble is damaged"),
        (DATA[:30] + b"?" + DATA[31:], "the header is damaged: its checksum differs"),
    ],
)
def test_each_fault_has_its_message(data: bytes, message: str) -> None:
    with pytest.raises(SegmentError, match=r"some\.pkv") as caught:
        SessionReader(BytesIO(data), "some.pkv")
    assert message in str(caught.value)


def test_a_damaged_stream_is_named() -> None:
    segment = SessionReader(BytesIO(LONG)).segments[1]
    third = segment.offset + int(segment.index["length"][:3].sum())
    damaged = bytearray(LONG)
    damaged[third] ^= 1
    reader = SessionReader(BytesIO(damaged), "some.pkv")
    assert np.array_equal(reader.read(0), LONG_KV[:, :, :256])
    with pytest.raises(
        SegmentError, match=r"some.pkv: segment 1 \(tokens 256-299\), layer 1, V, heads 0-1: .*checksum"
    ):
        reader.verify()


def test_nothing_is_written_before_all_is_checked() -> None:
    segment = SessionReader(BytesIO(LONG)).segments[0]
    damaged = bytearray(LONG)
    damaged[segment.offset + int(segment.index["length"].sum()) - 1] ^= 1
    out = np.full((2, 2, 256, 2, 16), 7, np.uint16)
    with pytest.raises(SegmentError):
        SessionReader(BytesIO(damaged)).read(0, out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "change",
    [
        {"layers": 2},
        {"kv_heads": 4096, "heads_per_stream": 1, "layers": 4096},
        {"kv_heads": 3, "heads_per_stream": 2},
        {"head_dim": 8},
        {"kv_heads": 512, "heads_per_stream": 512},
        {"head_dim": 0},
        {"layers": -1},
        {"layers": 1 << 40},
        {"block_size": 3},
        {"dtype": "fp64"},
        {"segment_tokens": 1},
        {"start": 1},
        {"start": 1 << 63},
        {"tokens": "hashes"},
        {"tokens": "none"},
        {"predictor": "twin/9"},
        {"profile": b""},
        {"profile": b"\x01garbage"},
        {"profile_fingerprint": "0" * 32},
        {"model": "text"},
        {"rope": {"theta": 1e-3, "dim": 16, "style": "half"}},
        {"rope": {"theta": 1e4, "dim": 4096, "style": "half"}},
        {"rope": {"theta": 1e4, "dim": 16, "style": "half", "scaling_factor": 1e-300}},
        {"rope": {"theta": float("nan"), "dim": 16, "style": "half"}},
        {"rope": {"theta": 1e4, "dim": 16, "style": "half", "frequency_factors": [1.0]}},
        {"unknown": 1},
    ],
)
def test_hostile_headers(change: dict[str, object]) -> None:
    """Sound checksums around nonsense: refused before anything of that size is made."""
    header, rest = header_of(DATA)
    body = msgspec.msgpack.encode(msgspec.to_builtins(header, builtin_types=[bytes]) | change)
    front = PREAMBLE.pack(container.MAGIC, 1, 0, len(body), 0)[:-8]
    data = front + struct.pack("<Q", checksum(front, body)) + body + rest
    with pytest.raises(SegmentError):
        decode(data)


def with_segment(data: bytes, **change: int) -> bytes:
    """The file with fields of its first segment record changed, and the checksum made right again."""
    header, rest = header_of(data)
    begin = len(data) - len(rest)
    names = ("marker", "count", "start", "hashes", "reserved", "payload", "checksum")
    fields = dict(zip(names, SEGMENT.unpack(rest[: SEGMENT.size]), strict=True)) | change
    size = (4 * 20 if header.tokens == "ids" else 0) + 8 * 1 + INDEX_ENTRY.itemsize * header.streams
    index = rest[SEGMENT.size : SEGMENT.size + size]
    front = SEGMENT.pack(*fields.values())[:-8]
    return data[:begin] + front + struct.pack("<Q", checksum(front, index)) + rest[SEGMENT.size :]


@pytest.mark.parametrize(
    "change",
    [
        {"count": 0},
        {"count": 257},
        {"count": 0xFFFFFFFF},
        {"start": 16},
        {"start": (1 << 64) - 1},
        {"hashes": 0xFFFFFFFF},
        {"reserved": 1},
        {"payload": (1 << 64) - 1},
        {"payload": 0},
    ],
)
def test_hostile_segment_records(change: dict[str, int]) -> None:
    assert with_segment(DATA) == DATA
    with pytest.raises(SegmentError):
        decode(with_segment(DATA, **change))


def test_hostile_streams_with_sound_payload_checksums() -> None:
    """Anything may stand in a stream whose checksum was made to fit: refused, and nothing out of bounds is touched."""
    reader = SessionReader(BytesIO(LONG))
    segment = reader.segments[0]
    begin, index_size = segment.offset, segment.index.nbytes
    length = int(segment.index["length"][0])
    random = np.random.default_rng(5)
    for trial in range(400):
        stream = bytearray(LONG[begin : begin + length])
        if trial % 4 == 0:
            stream[:4] = int(random.integers(0, 1 << 32)).to_bytes(4, "little")
        elif trial % 4 == 1:
            stream[:4] = int(random.integers(0, length // 2 + 8)).to_bytes(4, "little")
        elif trial % 4 == 2:
            stream[4:] = random.bytes(length - 4)
        else:
            stream[int(random.integers(0, length))] ^= int(random.integers(1, 256))
        index = segment.index.copy()
        index["payload"][0] = checksum(bytes(stream))
        record = begin - index_size - SEGMENT.size
        front = LONG[record : record + SEGMENT.size - 8]
        data = (
            LONG[:record]
            + front
            + struct.pack("<Q", checksum(front, index.tobytes()))
            + index.tobytes()
            + bytes(stream)
            + LONG[begin + length :]
        )
        with pytest.raises(SegmentError, match=r"layer 0, K, heads 0-1: (its bytes are no valid|the decoded values)"):
            SessionReader(BytesIO(data)).read(0)


def test_token_ids_must_give_the_hashes() -> None:
    """Ids changed by someone who mends the checksum still do not fit the chained hashes."""
    file = BytesIO()
    writer = SessionWriter(file, measure(KV, "bf16", ROPE, 0), dtype="bf16", rope=ROPE)
    writer.add(KV, range(20))
    writer.finish()
    data = bytearray(file.getvalue())
    _, rest = header_of(bytes(data))
    at = len(data) - len(rest) + SEGMENT.size
    data[at] ^= 1
    with pytest.raises(SegmentError, match="segment 0: its token ids do not give its block hashes"):
        decode(with_segment(bytes(data)))
