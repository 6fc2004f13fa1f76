"""Faults for session files and profiles: at any byte, or where they hurt, with all checksums made right again."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import xxhash
import zstandard
from file_parts import Record, put_together, streams_of, taken_apart
from safetensors.numpy import save
from spec_linear import fingerprint, safetensors

from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.container import INDEX_ENTRY, SEGMENT
from prolepsis.coding.hashes import BlockHashes, checksum
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.profile_file import from_bytes

_POWERS = (0, 1, 2, 4, 5, 7, 8, 9, 12, 15, 16, 20, 21, 26, 30, 31, 32, 40, 41, 52, 62, 63, 64)
EXTREMES = sorted({max(0, (1 << p) + d) for p in _POWERS for d in (-1, 0, 1)})


class Sample(NamedTuple):
    """A sound file, and the profile it needs."""

    name: str
    data: bytes
    profile: AnyProfile | None
    profile_file: bytes
    version: int = 2


def extreme(r: random.Random, bits: int) -> int:
    """A number of so many bits, likely near a bound."""
    return r.choice(EXTREMES) & ((1 << bits) - 1) if r.random() < 0.7 else r.getrandbits(bits)


def with_noise(r: random.Random, data: bytes) -> bytes:
    """Some bytes changed, left out, put in or doubled."""
    out, way, at = bytearray(data), r.randrange(6), r.randrange(len(data) + 1)
    until = min(len(data), at + r.choice((1, 1, 4, 8, 40, len(data))))
    if way <= 1 and data:
        for _ in range(r.choice((1, 1, 2, 8))):
            out[r.randrange(len(out))] ^= 1 << r.randrange(8) if way else r.randrange(1, 256)
    elif way == 2:
        size = r.choice((1, 2, 4, 8))
        out[at : at + size] = extreme(r, 8 * size).to_bytes(size, "little")
    elif way == 3:
        del out[at:until]
    elif way == 4:
        out[at:at] = r.randbytes(r.choice((1, 4, 30)))
    else:
        out[at:at] = out[at:until]
    return bytes(out)


def noise(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Without mending anything."""
    return with_noise(r, sample.data)


def splices(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """The beginning of one file and the end of another."""
    other = r.choice(samples).data
    return sample.data[: r.randrange(len(sample.data))] + other[r.randrange(len(other)) :]


def headers(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Other values in the header."""
    header, records = taken_apart(sample.data)
    other, _ = taken_apart(r.choice(samples).data)
    for _ in range(r.choice((1, 1, 2))):
        key = r.choice(list(header))
        header[key] = other.get(key) if r.random() < 0.4 else _anything(r, header[key])
    minor = r.choice((0, 0, 0, 1, 0xFFFF))
    if minor or r.random() < 0.05:
        header[r.choice(("colour", "", "rope"))] = _nested(r)
    return put_together(header, records, r.choice((sample.version, sample.version, 1, 2, 3)), minor)


def _anything(r: random.Random, value: Any) -> Any:
    """A value like this one, or of another type."""
    if isinstance(value, dict) and value and r.random() < 0.8:
        key = r.choice(list(value))
        return value | {key: _anything(r, value[key])}
    if isinstance(value, int) and r.random() < 0.8:
        return r.choice((value + 1, value - 1, 2 * value, value // 2, extreme(r, 63), -extreme(r, 63), value * 256))
    if isinstance(value, float) and r.random() < 0.8:
        return r.choice((0.0, -1.0, 1.0, 1e308, float("inf"), float("nan"), value * (1 + 1e-9), 1e-320))
    if isinstance(value, bytes) and r.random() < 0.8:
        return with_noise(r, value)
    return r.choice((None, True, 0, -1, 1 << 63, 1.5, "", "int8", "x" * 1025, b"", [], {}, [1.0] * 6, _nested(r)))


def _nested(r: random.Random) -> Any:
    value: Any = r.choice((0, "x", b"y", None))
    for _ in range(r.choice((1, 3, 400))):
        value = [value] if r.random() < 0.5 else {"a": value}
    return value


def profiles(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Other statistics in the file, or none at all, under the right fingerprint."""
    header, records = taken_apart(sample.data)
    packed = header["profile"] or b"\x00" + zstandard.compress(b"")
    planes = bytearray(zstandard.decompress(packed[1:]))
    way = r.randrange(5)
    if way == 0:
        packed = with_noise(r, packed)
    elif way == 1:
        packed = packed[:1] + _claiming_frame(r, bytes(planes))
    else:
        tables = 2 * 72 * 128 if packed[0] & 2 else 0
        for _ in range(r.choice((0, 1, 3, 50))):
            if statistics := len(planes) - tables:
                planes[r.randrange(statistics)] ^= r.choice((1, 0x80, r.randrange(1, 256)))
        if tables:
            planes[-tables:] = _other_frequencies(r, bytes(planes[-tables:]))
        flags = r.choice((packed[0], packed[0], packed[0], r.randrange(8)))
        packed = bytes([flags]) + zstandard.compress(bytes(planes if way < 4 else with_noise(r, bytes(planes))))
    header["profile"], header["profile_fingerprint"] = packed, xxhash.xxh3_128_hexdigest(packed)
    return put_together(header, records, sample.version)


def _other_frequencies(r: random.Random, planes: bytes) -> bytes:
    """Tables of extremes that mostly sum to 4096."""
    high, low = np.frombuffer(planes, np.uint8).reshape(2, 72, 128).astype(int)
    rows = high << 8 | low
    for context in r.sample(range(72), r.choice((0, 1, 20, 72))):
        token, way = r.randrange(127), r.randrange(4)
        if way == 0:
            rows[context] = 0
            rows[context, [token, 127]] = (4095, 1) if r.random() < 0.5 else (0, 4096)
        elif way == 1:
            rows[context] = 32
        else:
            rows[context, 127] += rows[context, token] + (way == 3 and r.random() < 0.1)
            rows[context, token] = 0
    return (rows >> 8).astype(np.uint8).tobytes() + (rows & 255).astype(np.uint8).tobytes()


def _claiming_frame(r: random.Random, planes: bytes) -> bytes:
    """A Zstandard frame that says it holds any number of bytes: a header of 14 bytes and one raw block."""
    block = planes[: (1 << 17) - 1]
    return b"\x28\xb5\x2f\xfd\xc0\x58" + extreme(r, 64).to_bytes(8, "little") + (len(block) << 3 | 1).to_bytes(
        3, "little"
    ) + block  # fmt: skip


def fields(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Other numbers, ids, hashes and index entries in a record."""
    header, records = taken_apart(sample.data)
    record = r.choice(records)
    if r.random() < 0.5:
        place = r.randrange(1, len(record.fields))
        bits = (32, 64, 32, 32, 64)[place - 1] if record.layout is SEGMENT else (32, 64, 32, 32)[place - 1]
        near = max(0, record.fields[place] + r.choice((-1, 1, 16, -16, 256)))
        record.fields[place] = r.choice((near, extreme(r, bits))) & ((1 << bits) - 1)
    elif record.rest:
        record.rest = with_noise(r, record.rest)
    if r.random() < 0.3:
        _rehash(header, records)
    return put_together(header, records, sample.version)


def _rehash(header: dict[str, Any], records: list[Record]) -> None:
    """Other ids, and the hashes that belong to them."""
    hashes = BlockHashes(header["block_size"])
    for record in records:
        ids = 4 * record.fields[1] if record.layout is SEGMENT and header["tokens"] == "ids" else 0
        size = ids + 8 * record.fields[3]
        if ids and len(record.rest) > size:
            numbers = np.frombuffer(record.rest[:ids], "<u4")
            record.rest = record.rest[:ids] + hashes.add(numbers).tobytes() + record.rest[size:]


def orders(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Records left out, doubled, exchanged, or from other files."""
    header, records = taken_apart(sample.data)
    _, others = taken_apart(r.choice(samples).data)
    for _ in range(r.choice((1, 2))):
        at = r.randrange(len(records) + 1)
        way = r.randrange(4)
        if way == 0 and len(records) > 1:
            records.pop(at % len(records))
        elif way == 1 and records:
            records.insert(at, r.choice(records))
        elif way == 2:
            r.shuffle(records)
        else:
            records.insert(at, r.choice(others))
    return put_together(header, records, sample.version) + (r.randbytes(3) if r.random() < 0.1 else b"")


def streams(r: random.Random, sample: Sample, samples: list[Sample]) -> bytes:
    """Other bytes in streams, with lengths and checksums of bytes to fit."""
    header, records = taken_apart(sample.data)
    segments = [record for record in records if record.layout is SEGMENT]
    record = r.choice(segments)
    parts = _parts(header, record)
    for _ in range(r.choice((1, 1, 2))):
        i = r.randrange(len(parts))
        parts[i] = _another_stream(r, parts[i], r.choice(_parts(header, r.choice(segments))))
    replace_streams(record, parts)
    return put_together(header, records, sample.version)


def replace_streams(record: Record, parts: list[bytes], values: list[int] | None = None) -> None:
    """Other streams for a segment, with an index that says what they are. values: checksums of what they decode to."""
    index = np.frombuffer(record.rest[-INDEX_ENTRY.itemsize * len(parts) :], INDEX_ENTRY).copy()
    for i, part in enumerate(parts):
        index[i]["length"], index[i]["payload"] = len(part), int.from_bytes(checksum(part), "little")
    if values is not None:
        index["values"] = values
    record.rest = record.rest[: -index.nbytes] + index.tobytes()
    record.payload = b"".join(parts)
    record.fields[5] = len(record.payload)


def _parts(header: dict[str, Any], record: Record) -> list[bytes]:
    count, out, at = streams_of(header), [], 0
    for length in np.frombuffer(record.rest[-INDEX_ENTRY.itemsize * count :], INDEX_ENTRY)["length"].tolist():
        out.append(record.payload[at : at + length])
        at += length
    return out


def _another_stream(r: random.Random, stream: bytes, other: bytes) -> bytes:
    """Damaged streams, foreign ones, and any values as they are."""
    way = r.randrange(7)
    if way == 0:
        return extreme(r, 32).to_bytes(4, "little") + stream[4:]
    if way == 1:
        words = int.from_bytes(stream[:4], "little") & 0x7FFFFFFF
        return (max(0, words + r.choice((-1, 1, -2, 2))) | r.getrandbits(1) << 31).to_bytes(4, "little") + stream[4:]
    if way == 2:
        return stream[:4] + r.randbytes(len(stream) - 4)
    if way == 3:
        return other
    if way == 4:
        values = np.frombuffer(r.randbytes(2 * r.choice((16 * 24, 16 * 48, 21 * 16, 16 * 16, 35 * 16, 16, 5))), "<u2")
        return b"\xff\xff\xff\xff" + (values & r.choice((0xFFFF, 0x807F, 0x8007))).astype("<u2").tobytes()
    return with_noise(r, stream)


CHANGES: list[Callable[[random.Random, Sample, list[Sample]], bytes]] = [
    noise, splices, headers, profiles, profiles, fields, orders, streams, streams, streams,
]  # fmt: skip


def changed_profile_file(r: random.Random, data: bytes) -> bytes:
    """Noise; or other numbers and words, under the right fingerprint."""
    if r.random() < 0.2:
        return with_noise(r, data)
    metadata, tensors = safetensors(data)
    about = json.loads(metadata["prolepsis"])
    if r.random() < 0.1:
        _other_hidden(r, about, tensors)
    for _ in range(r.choice((0, 1, 1, 3))):
        name = r.choice(list(tensors))
        tensors[name] = _changed_tensor(r, tensors[name])
    if r.random() < 0.2:
        key = r.choice(list(about))
        about[key] = _words(_anything(r, about[key]))
    if r.random() < 0.1:
        tensors.pop(r.choice(list(tensors)))
    try:
        about["fingerprint"] = fingerprint(about, tensors)
    except KeyError:
        return with_noise(r, data)
    return bytes(save(tensors, {"prolepsis": json.dumps(about)}))


def _other_hidden(r: random.Random, about: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Matrices that fit each other, and an embedding of another width."""
    about["hidden"] = r.choice((1, 8, 16, 23, 25, 40))
    columns = -(-about["hidden"] // 16) * 16
    for name in ("token.means", "token.inverses"):
        tensors[name] = np.resize(tensors[name], about["hidden"])
    for name in ("token.upper.weights", "token.rest.weights"):
        tensors[name] = np.resize(tensors[name], (*tensors[name].shape[:2], columns))


def _words(value: Any) -> Any:
    """JSON has no bytes."""
    if isinstance(value, dict):
        return {key: _words(v) for key, v in value.items()}
    if isinstance(value, list):
        return [_words(v) for v in value]
    return value.decode("latin-1") if isinstance(value, bytes) else value


def _changed_tensor(r: random.Random, tensor: np.ndarray) -> np.ndarray:
    if not tensor.size:
        return tensor
    if r.random() < 0.1:
        return np.ascontiguousarray(tensor.reshape(-1)[: r.randrange(tensor.size)])
    changed = tensor.copy().reshape(-1)
    places = np.array([r.randrange(tensor.size) for _ in range(r.choice((1, 5, 1000)))])
    if changed.dtype == np.float32:
        sizes = (0.0, -0.0, 1e-45, 1e-30, 1.0, 1e9, 2.0**60, -(2.0**60)) + (
            (2.0**61, np.nan) if r.random() < 0.1 else ()
        )
        changed[places] = r.choice(sizes)
    elif changed.dtype == np.uint16:
        changed[places] = r.choice((0, 1, 900, 2039, r.choice((2040, 65535))))
    else:
        changed[places] = np.array(r.choice((0, 1, 127, 128, 129, 255)), np.uint8).view(changed.dtype)
    return changed.reshape(tensor.shape)


def rebound(sample: Sample, profile_file: bytes, embedding: np.ndarray) -> tuple[bytes, AnyProfile]:
    """The session file as one that was written with another profile, and this profile. Raises InputError."""
    profile = from_bytes(profile_file, "a.profile").profile
    assert isinstance(profile, LinearProfile)
    if profile.matrices.token is not None:
        profile = profile.bound_to(lambda ids: embedding[ids], len(embedding))
    header, records = taken_apart(sample.data)
    header["profile_fingerprint"] = profile.fingerprint
    return put_together(header, records, sample.version), profile
