"""Damaged, foreign, truncated, newer and hostile session files: one clear error each, and never a wrong value."""

from collections.abc import Callable
from functools import cache
from io import BytesIO

import numpy as np
import pytest
from file_parts import put_together, taken_apart
from kv_samples import ROPE, realistic_kv

from prolepsis.coding import SessionReader, SessionStream, SessionWriter, decode, encode
from prolepsis.coding.container import INDEX_ENTRY
from prolepsis.coding.hashes import checksum
from prolepsis.errors import InputError, SegmentError

KV = realistic_kv(layers=1, tokens=20, heads=1, dim=16)
LONG_KV = realistic_kv(layers=2, tokens=300, heads=2, dim=16)


@cache
def short_file() -> bytes:
    """Of KV."""
    return encode(KV, dtype="bf16", rope=ROPE, token_ids=range(20), metadata=b"{}", model={"weights": "abc"})


@cache
def long_file() -> bytes:
    """Of LONG_KV, in two segments."""
    return encode(LONG_KV, dtype="bf16", rope=ROPE)


def test_every_flipped_byte_is_found() -> None:
    for i in range(len(short_file())):
        for flip in (0x01, 0x80, 0xFF):
            damaged = bytearray(short_file())
            damaged[i] ^= flip
            with pytest.raises(SegmentError):
                decode(damaged)


def test_every_truncation_is_found() -> None:
    for length in range(len(short_file())):
        with pytest.raises(SegmentError):
            decode(short_file()[:length])


def test_flips_in_a_longer_file_are_found() -> None:
    random = np.random.default_rng(0)
    for i in random.integers(0, len(long_file()), 150):
        damaged = bytearray(long_file())
        damaged[i] ^= int(random.integers(1, 256))
        with pytest.raises(SegmentError):
            decode(damaged)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is empty"),
        (lambda data: b"GGUF" + bytes(40), "is not a Prolepsis session file: it begins with b'GGUF"),
        (lambda data: b"\x89PK", "is truncated: 3 bytes"),
        (lambda data: data[:100], "is truncated: a header of"),
        (lambda data: data[:-1], "is truncated: it ends within the trailer"),
        (
            lambda data: data + b"\n",
            "is truncated: it ends within record 1; it lies behind the trailer of a whole save",
        ),
        (lambda data: data + bytes(100), "segment 1 is damaged: it begins with b"),
        (
            lambda data: data[:8] + b"\x03\x00" + data[10:],
            "format version 3; this Prolepsis reads up to version 2: upgrade",
        ),
        (lambda data: data[:8] + b"\x00\x00" + data[10:], "the preamble is damaged"),
        (lambda data: data[:12] + b"\xff\xff\xff\xff" + data[16:], "the preamble is damaged"),
        (lambda data: data[:30] + b"?" + data[31:], "the header is damaged: its checksum differs"),
    ],
)
def test_each_fault_has_its_message(change: Callable[[bytes], bytes], message: str) -> None:
    with pytest.raises(SegmentError, match=r"some\.pkv") as caught:
        SessionReader(BytesIO(change(short_file())), "some.pkv")
    assert message in str(caught.value)


def test_a_damaged_stream_is_named() -> None:
    segment = SessionReader(BytesIO(long_file())).segments[1]
    third = segment.offset + int(segment.index["length"][:3].sum())
    damaged = bytearray(long_file())
    damaged[third] ^= 1
    reader = SessionReader(BytesIO(damaged), "some.pkv")
    assert np.array_equal(reader.read(0), LONG_KV[:, :, :256])
    with pytest.raises(
        SegmentError, match=r"some.pkv: segment 1 \(tokens 256-299\), layer 1, V, heads 0-1: .*checksum"
    ):
        reader.verify()


def test_nothing_is_written_before_all_is_checked() -> None:
    segment = SessionReader(BytesIO(long_file())).segments[0]
    damaged = bytearray(long_file())
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
        {"dtype": "fp16"},
        {"dtype": "fp8_e5m2"},
        {"dtype": "int8"},
        {"dtype": "int4"},
        {"dtype": "int4", "head_dim": 15},
        {"segment_tokens": 1},
        {"start": 1},
        {"start": 1 << 63},
        {"tokens": "hashes"},
        {"tokens": "none"},
        {"predictor": "twin/9"},
        {"profile": b""},
        {"profile": b"\x01garbage"},
        {"profile": None},
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
    header, records = taken_apart(short_file())
    assert put_together(header, records) == short_file()
    data = put_together(header | change, records)
    with pytest.raises(SegmentError):
        decode(data)
    with pytest.raises(SegmentError):
        list(SessionStream(BytesIO(data)))


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
    names = ("marker", "count", "start", "hashes", "reserved", "payload")
    header, records = taken_apart(short_file())
    records[0].fields = [change.get(name, value) for name, value in zip(names, records[0].fields, strict=True)]
    data = put_together(header, records)
    with pytest.raises(SegmentError):
        decode(data)
    with pytest.raises(SegmentError):
        list(SessionStream(BytesIO(data)).entries())


@pytest.mark.parametrize(
    "change", [{1: 0xFFFFFFFF}, {1: 3}, {2: 0}, {2: 1 << 63}, {3: 0}, {3: 2}, {4: 1}], ids=lambda change: str(change)
)
def test_hostile_trailers(change: dict[int, int]) -> None:
    header, records = taken_apart(short_file())
    for place, value in change.items():
        records[-1].fields[place] = value
    data = put_together(header, records)
    for read in (decode, lambda d: list(SessionStream(BytesIO(d)).entries())):
        with pytest.raises(SegmentError):
            read(data)


def test_a_stream_longer_than_its_values_is_refused_before_it_is_read() -> None:
    """Lengths add up, but to more than any writer needs: nothing of that size is asked for."""
    header, records = taken_apart(short_file())
    index = np.frombuffer(records[0].rest[-2 * INDEX_ENTRY.itemsize :], INDEX_ENTRY).copy()
    index["length"] = [5 + 2 * KV[0, 0].size, 4]
    records[0].rest = records[0].rest[: -index.nbytes] + index.tobytes()
    records[0].fields[5] = int(index["length"].sum())
    with pytest.raises(SegmentError, match="segment 0 is damaged: its streams cannot make up"):
        decode(put_together(header, records))


def test_version_1_is_read_but_does_not_grow() -> None:
    header, records = taken_apart(short_file())
    old = put_together(header, records, version=1)
    reader = SessionReader(old, "old.pkv")
    assert reader.version == 1
    assert np.array_equal(reader.read_all(), KV)
    assert np.array_equal(next(iter(SessionStream(BytesIO(old))))[1], KV)
    with pytest.raises(InputError, match=r"old\.pkv has format version 1, which cannot be appended to"):
        SessionWriter.append_to(SessionReader(BytesIO(old), "old.pkv"))
    with pytest.raises(InputError, match="is in memory"):
        SessionWriter.append_to(reader)
    salvaged = SessionReader(old[:-3], salvage=True)
    assert (salvaged.stop, salvaged.saves, salvaged.torn is None) == (20, [], False)
    longer = put_together(header, [*records, records[-1]], version=1)
    with pytest.raises(SegmentError, match="bytes behind the trailer, which version 1 does not have"):
        decode(longer)
    with pytest.raises(SegmentError, match="the preamble is damaged"):
        decode(put_together(header, records, version=1, minor=1))


def test_a_newer_minor_version_may_say_more_in_the_header() -> None:
    header, records = taken_apart(short_file())
    newer = put_together(header | {"colour": ["blue"]}, records, minor=1)
    assert np.array_equal(decode(newer), KV)
    with pytest.raises(SegmentError, match="colour"):
        decode(put_together(header | {"colour": ["blue"]}, records))
    del header["numerics"]
    with pytest.raises(SegmentError, match="numerics"):
        decode(put_together(header, records, minor=1))


def test_hostile_streams_with_sound_payload_checksums() -> None:
    """Anything may stand in a stream whose checksum was made to fit: refused, and nothing out of bounds is touched."""
    header, records = taken_apart(long_file())
    first = records[0]
    index, payload = np.frombuffer(first.rest, INDEX_ENTRY), first.payload
    length = int(index["length"][0])
    random = np.random.default_rng(5)
    for trial in range(400):
        stream = bytearray(payload[:length])
        if trial % 4 == 0:
            stream[:4] = int(random.integers(0, 1 << 32)).to_bytes(4, "little")
        elif trial % 4 == 1:
            stream[:4] = int(random.integers(0, length // 2 + 8)).to_bytes(4, "little")
        elif trial % 4 == 2:
            stream[4:] = random.bytes(length - 4)
        else:
            stream[int(random.integers(0, length))] ^= int(random.integers(1, 256))
        changed = index.copy()
        changed["payload"][0] = int.from_bytes(checksum(stream), "little")
        first.rest, first.payload = changed.tobytes(), bytes(stream) + payload[length:]
        with pytest.raises(SegmentError, match=r"layer 0, K, heads 0-1: (its bytes are no valid|the decoded values)"):
            SessionReader(put_together(header, records)).read(0)


def test_token_ids_must_give_the_hashes() -> None:
    """Ids changed by someone who mends the checksum still do not fit the chained hashes."""
    header, records = taken_apart(short_file())
    records[0].rest = bytes([records[0].rest[0] ^ 1]) + records[0].rest[1:]
    data = put_together(header, records)
    for read in (SessionReader, lambda d: list(SessionStream(BytesIO(d)).entries())):
        with pytest.raises(SegmentError, match="segment 0: its token ids do not give its block hashes"):
            read(data)
