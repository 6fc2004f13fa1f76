"""A decoder in plain Python, written from docs/format.md alone: it shares no code with the product.

It holds the specification to its word: whoever has only the page can read the files.
"""

import lzma
import math
import struct
from decimal import Context, Decimal
from pathlib import Path

import msgspec
import numpy as np
import xxhash
import zstandard

import prolepsis.coding

UNIVERSAL = Path(prolepsis.coding.__file__).with_name("universal_tables.xz")
f32 = np.float32


def float_bits(x: float) -> int:
    """Bits of a float32."""
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def cos_sin(phi: float) -> tuple[float, float]:
    k = round(phi * float.fromhex("0x1.45f306dc9c883p-1"))
    r = (phi - k * float.fromhex("0x1.921fb544p+0")) - k * float.fromhex("0x1.0b4611a626331p-34")
    square, s, c = r * r, 0.0, 0.0
    for j in reversed(range(8)):
        s = (-1) ** j / math.factorial(2 * j + 1) + (s * square if j < 7 else 0.0)
    for j in reversed(range(9)):
        c = (-1) ** j / math.factorial(2 * j) + (c * square if j < 8 else 0.0)
    s *= r
    return [(c, s), (-s, c), (-c, -s), (s, -c)][k % 4]


def angles(rope: dict, position: int) -> list[tuple[np.float32, np.float32]]:
    exact, half = Context(prec=50), rope["dim"] // 2
    result = []
    for i in range(half):
        factor = (rope["frequency_factors"] or [1.0] * half)[i] * rope["scaling_factor"]
        power = exact.power(Decimal(rope["theta"]), exact.divide(Decimal(-2 * i), Decimal(rope["dim"])))
        c, s = cos_sin(position * float(exact.divide(power, Decimal(factor))))
        result.append((f32(c), f32(s)))
    return result


def predictions(header: dict, means: list, layer: int, kind: int, head: int, position: int) -> list[float]:
    mean = [f32(m) for m in means[layer][kind][head]]
    rope = header["rope"]
    if kind == 1 or rope is None:
        return mean
    out, half = list(mean), rope["dim"] // 2
    for i, (c, s) in enumerate(angles(rope, position)):
        a, b = (2 * i, 2 * i + 1) if rope["style"] == "interleaved" else (i, i + half)
        out[a], out[b] = mean[a] * c - mean[b] * s, mean[a] * s + mean[b] * c
    return out


def profile(header: dict) -> tuple[list, list, list]:
    flags, frame = header["profile"][0], header["profile"][1:]
    planes = zstandard.decompress(frame)
    shape = [header["layers"], 2, header["kv_heads"], header["head_dim"]]

    def take(shape: list[int]) -> np.ndarray:
        nonlocal planes
        n = int(np.prod(shape))
        high, low, planes = planes[:n], planes[n : 2 * n], planes[2 * n :]
        return np.array([h << 8 | b for h, b in zip(high, low, strict=True)]).reshape(shape)

    if flags & 1:
        means = (take(shape).astype(np.uint32) << 16).view(np.float32).tolist()
        scales = take(shape).tolist()
    else:
        means = np.zeros(shape).tolist()
        scales = np.repeat(take(shape[:3])[..., None], shape[3], axis=-1).tolist()
    if flags & 2:
        frequencies = take([72, 128])
    else:
        frequencies = np.frombuffer(lzma.decompress(UNIVERSAL.read_bytes()), "<u2").reshape(72, 128)
    return means, scales, frequencies.tolist()


def near_bins(m: int) -> list[tuple[int, int]]:
    bins = []
    for k, parts in zip(range(-10, 4), (1, 1, 1, 1, 1, 1, 2, 2, 4, 8, 8, 8, 4, 2), strict=True):
        size = 2**m // parts
        bins += [(k * 2**m + part * size, size.bit_length() - 1) for part in range(parts)]
    return bins


def decode_stream(data: bytes, guesses: list[tuple[float, int]], dtype: str, frequencies: list) -> list[int]:
    """Bits of each float. guesses: prediction and scale code of each."""
    m, e = (7, 0) if dtype == "bf16" else (10, 112)
    (words,) = struct.unpack_from("<I", data)
    if words == 0xFFFFFFFF:
        return list(struct.unpack(f"<{len(guesses)}H", data[4:]))
    lanes, words = 4 if len(guesses) < 8192 or words >> 31 else 32, words & 0x7FFFFFFF
    stream = struct.unpack_from(f"<{words}H", data, 4)
    raw_bits, raw_at = int.from_bytes(data[4 + 2 * words :], "little"), 0
    states = [stream[2 * j] | stream[2 * j + 1] << 16 for j in range(lanes)]
    at, out, near = 2 * lanes, [], near_bins(m)
    far = [(n, 0) for n in range(16)] + [((4 + t) << (j + 2), j + 2) for j in range(12) for t in range(4)]
    slots: dict[int, list[tuple[int, int, int]]] = {}
    buffered = 0
    for i, (prediction, code) in enumerate(guesses):
        if i % 4096 == 0:  # keep the big integer short
            raw_bits, buffered = int.from_bytes(data[4 + 2 * words + raw_at // 8 :], "little") >> raw_at % 8, 0
        p, negative = float_bits(prediction) & 0x7FFFFFFF, float_bits(prediction) >> 31
        h, s = p >> 20, code or -16384
        is_near = h - s < 12
        if is_near:
            context = 4 * max(0, (h - s + 28) >> 2) + ((s >> 1) & 3)
            centre = min(max(0, (s >> 3) - e), 2 ** (15 - m) - 1) << m
        else:
            context = 40 + min(max((s >> 2) - 2 * (h >> 3) + 2 * m + 8, 0), 31)
            centre = (p + 0x7FFF + ((p >> 16) & 1)) >> 16
            if dtype == "fp16":
                with np.errstate(over="ignore"):
                    centre = int(f32(abs(prediction)).astype(np.float16).view(np.uint16))
        if context not in slots:
            slots[context], total = [], 0
            for token, f in enumerate(frequencies[context]):
                slots[context] += [(token, f, total)] * f
                total += f
        x = states[i % lanes]
        token, f, start = slots[context][x % 4096]
        x = f * (x >> 12) + x % 4096 - start
        if x < 1 << 16:
            x, at = x << 16 | stream[at], at + 1
        states[i % lanes] = x
        base, n = (0, 16) if token == 127 else (near if is_near else far)[token // 2]
        raw = (raw_bits >> buffered) & ((1 << n) - 1)
        buffered, raw_at = buffered + n, raw_at + n
        if token == 127:
            o = raw - (raw >> 15 << 16)
        else:
            size, sign = base + raw, token % 2
            if is_near:  # noqa: SIM108 - one line of it would be unreadable
                o = -1 - (size + centre) if sign else size + centre
            else:
                o = centre + (-1 - size if sign else size)
            o = -1 - o if negative else o
        out.append(o if o >= 0 else 0x8000 | (-1 - o))
    assert states == [1 << 16] * lanes
    assert at == words
    assert (raw_at + 7) // 8 == len(data) - 4 - 2 * words
    return out


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def records(data: bytes, header: dict, streams: int) -> list[tuple[int, int, list[int], int]]:
    """(tokens, position, length of each stream, offset of the payload) of every segment, all of it checked."""
    (version,) = struct.unpack_from("<H", data, 8)
    at = 24 + struct.unpack_from("<I", data, 12)[0]
    assert checksum(data[:16] + data[24:at]) == data[16:24]
    link, found, saves = data[16:24] if version > 1 else b"", [], 0
    while at < len(data):
        assert version > 1 or saves == 0
        if data[at : at + 4] == b"SEGM":
            count, start, hashes, _, payload = struct.unpack_from("<IQIIQ", data, at + 4)
            front, rest = 40, (4 * count if header["tokens"] == "ids" else 0) + 8 * hashes + 20 * streams
        else:
            assert data[at : at + 4] == b"TAIL"
            metadata, _, segments = struct.unpack_from("<IQI", data, at + 4)
            assert segments == len(found)
            front, rest, payload, saves = 32, metadata, 0, saves + 1
        end = at + front + rest
        own = data[at + front - 8 : at + front]
        assert checksum(link + data[at : at + front - 8] + data[at + front : end]) == own
        link = own if version > 1 else b""
        if front == 40:
            index = [struct.unpack_from("<IQQ", data, end - 20 * (streams - i)) for i in range(streams)]
            found.append((count, start, [length for length, _, _ in index], end))
            assert sum(found[-1][2]) == payload
        at = end + payload
    assert data[end - front - rest : end - front - rest + 4] == b"TAIL"
    return found


def decode_file(data: bytes) -> np.ndarray:
    """uint16 [layers, 2, tokens, kv_heads, head_dim] of a sound session file."""
    (length,) = struct.unpack_from("<I", data, 12)
    header = msgspec.msgpack.decode(data[24 : 24 + length])
    means, scales, frequencies = profile(header)
    layers, heads, dim, group = (header[k] for k in ("layers", "kv_heads", "head_dim", "heads_per_stream"))
    streams = [(k, kind, g) for k in range(layers) for kind in (0, 1) for g in range(0, heads, group)]
    segments = []
    for count, start, lengths, at in records(data, header, len(streams)):
        values = np.zeros((layers, 2, count, heads, dim), np.uint16)
        for (layer, kind, first), size in zip(streams, lengths, strict=True):
            guesses = [
                guess
                for t in range(count)
                for head in range(first, first + group)
                for guess in zip(
                    predictions(header, means, layer, kind, head, start + t), scales[layer][kind][head], strict=True
                )
            ]
            out = decode_stream(data[at : at + size], guesses, header["dtype"], frequencies)
            values[layer, kind, :, first : first + group] = np.array(out).reshape(count, group, dim)
            at += size
        segments.append(values)
    return np.concatenate(segments, axis=2)
