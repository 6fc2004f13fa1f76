"""A decoder in plain Python, written from docs/format.md alone: it shares no code with the product.

It holds the specification to its word: whoever has only the page can read the files.
"""

import lzma
import math
import struct
from decimal import Context, Decimal
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import xxhash
import zstandard

import prolepsis.coding

TABLES = Path(prolepsis.coding.__file__).parent
f32 = np.float32


class Form(NamedTuple):
    """Columns of the table in "Context and centre", and the dtype's universal tables."""

    m: int
    e: int
    c: int
    n: int
    h: int
    k: int
    tables: str


FORMS = {
    "bf16": Form(7, 0, 0x7F80, -16384, 0, 22, "universal_tables.xz"),
    "fp16": Form(10, 112, 0x7C00, -16384, 0, 28, "universal_tables.xz"),
    "fp8_e4m3": Form(3, 120, 0x7E, 984, 121, 14, "universal_tables_fp8_e4m3.xz"),
    "fp8_e5m2": Form(2, 112, 0x7C, 920, 113, 12, "universal_tables_fp8_e5m2.xz"),
    "int8": Form(7, 133, 127, 16384, 255, 264, "universal_tables_int.xz"),
    "int4": Form(3, 129, 7, 16384, 255, 264, "universal_tables_int.xz"),
}


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
    if kind == 1 or rope is None or header["predictor"] == "marginal/1":
        return mean
    out, half = list(mean), rope["dim"] // 2
    for i, (c, s) in enumerate(angles(rope, position)):
        a, b = (2 * i, 2 * i + 1) if rope["style"] == "interleaved" else (i, i + half)
        out[a], out[b] = mean[a] * c - mean[b] * s, mean[a] * s + mean[b] * c
    return out


class Profile(NamedTuple):
    """Means and scales [layers][2][kv_heads][channels]; of the steps, with one channel."""

    means: list
    scales: list
    step_means: list
    step_scales: list
    frequencies: list


def universal(dtype: str) -> list:
    return np.frombuffer(lzma.decompress((TABLES / FORMS[dtype].tables).read_bytes()), "<u2").reshape(72, 128).tolist()


def profile(header: dict) -> Profile:
    flags, planes = header["profile"][0], zstandard.decompress(header["profile"][1:])
    heads = [header["layers"], 2, header["kv_heads"]]

    def take(shape: list[int]) -> np.ndarray:
        nonlocal planes
        n = int(np.prod(shape))
        high, low, planes = planes[:n], planes[n : 2 * n], planes[2 * n :]
        return np.array([h << 8 | b for h, b in zip(high, low, strict=True)]).reshape(shape)

    def means_and_scales(channels: int) -> tuple[list, list]:
        shape = [*heads, channels]
        if flags & 1:
            return (take(shape).astype(np.uint32) << 16).view(np.float32).tolist(), take(shape).tolist()
        return np.zeros(shape).tolist(), np.repeat(take(heads)[..., None], channels, axis=-1).tolist()

    own = means_and_scales(header["head_dim"])
    steps = means_and_scales(1) if header["dtype"] in ("int8", "int4") else ([], [])
    frequencies = take([72, 128]).tolist() if flags & 2 else universal(header["dtype"])
    assert planes == b""
    return Profile(*own, *steps, frequencies)


def near_bins(m: int) -> list[tuple[int, int]]:
    bins = []
    for k, parts in zip(range(-10, 4), (1, 1, 1, 1, 1, 1, 2, 2, 4, 8, 8, 8, 4, 2), strict=True):
        size = max(1, 2**m // parts)
        bins += [(k * 2**m + part * size, size.bit_length() - 1) for part in range(2**m // size)]
    return bins


def rounded(p: int, form: Form) -> int:
    """The magnitude nearest to a float32 without sign, the even one of two."""
    exponent = max(p >> 23, form.e + 1)
    value = struct.unpack("<f", struct.pack("<I", p))[0]
    return round(math.ldexp(value, 127 + form.m - exponent)) + ((exponent - form.e - 1) << form.m)


def decode_stream(data: bytes, guesses: list[tuple[float, int]], dtype: str, frequencies: list) -> list[int]:
    """The scalars. guesses: prediction and S of each."""
    form = FORMS[dtype]
    m = form.m
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
    for i, (prediction, s) in enumerate(guesses):
        if i % 4096 == 0:  # keep the big integer short
            raw_bits, buffered = int.from_bytes(data[4 + 2 * words + raw_at // 8 :], "little") >> raw_at % 8, 0
        p, negative = float_bits(prediction) & 0x7FFFFFFF, float_bits(prediction) >> 31
        h = p >> 20
        is_near = h - s < 12 and s >= form.n
        if is_near:
            context = 4 * max(0, (h - s + 28) >> 2) + ((s >> 1) & 3)
            centre = min(max(0, (s >> 3) - form.e), form.c >> m) << m
        else:
            context = 40 + min(max((s >> 2) - 2 * max(h >> 3, form.h) + form.k, 0), 31)
            centre = min(form.c, rounded(p, form))
            if dtype in ("int8", "int4"):
                negative = negative if centre else 0
                centre -= negative
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


def guesses_of(prediction: list[float], codes: list[int], step: np.float16 | None = None) -> list[tuple[float, int]]:
    """Prediction and S of the channels of a token's head."""
    if step is None:
        return [(mean, code or -16384) for mean, code in zip(prediction, codes, strict=True)]
    useful = np.isfinite(step) and step != 0
    divisor = f32(step) if useful else f32(np.inf)
    moved = 1016 - ((float_bits(abs(float(step))) + 2**19) >> 20) if useful else 0
    with np.errstate(over="ignore"):
        divided = [min(max(f32(mean) / divisor, f32(-512)), f32(512)) for mean in prediction]
    return [(d, min(max(code + moved, 1), 2039) if code else -16384) for d, code in zip(divided, codes, strict=True)]


class Decoded(NamedTuple):
    """scalars: uint16 [layers, 2, tokens, kv_heads, head_dim]; steps: uint16 [layers, 2, tokens, kv_heads]."""

    scalars: np.ndarray
    steps: np.ndarray


def decode_file(data: bytes) -> Decoded:
    """What a sound session file holds."""
    (length,) = struct.unpack_from("<I", data, 12)
    header = msgspec.msgpack.decode(data[24 : 24 + length])
    known = profile(header)
    layers, heads, dim, group = (header[k] for k in ("layers", "kv_heads", "head_dim", "heads_per_stream"))
    firsts = [None] * (header["dtype"] in ("int8", "int4")) + list(range(0, heads, group))
    streams = [(k, kind, first) for k in range(layers) for kind in (0, 1) for first in firsts]
    segments = []
    for count, start, lengths, at in records(data, header, len(streams)):
        scalars = np.zeros((layers, 2, count, heads, dim), np.uint16)
        steps = np.zeros(scalars.shape[:4], np.uint16)
        for (layer, kind, first), size in zip(streams, lengths, strict=True):
            part, at = data[at : at + size], at + size
            if first is None:
                means, codes = known.step_means[layer][kind], known.step_scales[layer][kind]
                guesses = [g for _ in range(count) for m, c in zip(means, codes, strict=True) for g in guesses_of(m, c)]
                out = decode_stream(part, guesses, "fp16", universal("fp16"))
                steps[layer, kind] = np.array(out).reshape(count, heads)
                continue
            guesses = [
                guess
                for t in range(count)
                for head in range(first, first + group)
                for guess in guesses_of(
                    predictions(header, known.means, layer, kind, head, start + t),
                    known.scales[layer][kind][head],
                    steps[layer, kind, t, head].view(np.float16) if None in firsts else None,
                )
            ]
            out = decode_stream(part, guesses, header["dtype"], known.frequencies)
            scalars[layer, kind, :, first : first + group] = np.array(out).reshape(count, group, dim)
        segments.append((scalars, steps))
    return Decoded(*(np.concatenate(parts, axis=2) for parts in zip(*segments, strict=True)))
