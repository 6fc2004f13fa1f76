"""A decoder in plain Python, written from docs/format.md alone: it shares no code with the product.

It holds the specification to its word: whoever has only the page can read the files.
"""

import lzma
import math
import struct
from decimal import Context, Decimal
from pathlib import Path
from typing import Any, NamedTuple

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
    "int8": Form(0, 0, 127, 0, 0, 0, "universal_tables_int.xz"),
    "int4": Form(0, 0, 7, 0, 0, 0, "universal_tables_int.xz"),
    "kivi4": Form(0, 0, 7, 0, 0, 0, "universal_tables_int.xz"),
}
INTEGERS = ("int8", "int4", "kivi4")
BESIDE = {"int8": 1, "int4": 1, "kivi4": 2}  # streams of steps and minimums


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
    """Means and scales [layers][2][kv_heads][channels]; those of the steps, and of the minimums."""

    means: list
    scales: list
    beside: list[tuple[list, list]]
    frequencies: list


def universal(dtype: str) -> list:
    return np.frombuffer(lzma.decompress((TABLES / FORMS[dtype].tables).read_bytes()), "<u2").reshape(72, 128).tolist()


def profile(header: dict, packed: bytes) -> Profile:
    flags, planes = packed[0], zstandard.decompress(packed[1:])
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
    channels = header["head_dim"] if header["dtype"] == "kivi4" else 1
    beside = [means_and_scales(channels) for _ in range(BESIDE.get(header["dtype"], 0))]
    frequencies = take([72, 128]).tolist() if flags & 2 else universal(header["dtype"])
    assert planes == b""
    return Profile(*own, beside, frequencies)


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


def context_and_centre(prediction: float, s: int, dtype: str) -> tuple[int, int, bool, int]:
    """(context, centre, whether near, neg) of one scalar."""
    form = FORMS[dtype]
    p, negative = float_bits(prediction) & 0x7FFFFFFF, float_bits(prediction) >> 31
    if dtype in INTEGERS:
        return of_integer(abs(prediction), s, form.c, negative)
    h = p >> 20
    if h - s < 12 and s >= form.n:
        context = 4 * max(0, (h - s + 28) >> 2) + ((s >> 1) & 3)
        return context, min(max(0, (s >> 3) - form.e), form.c >> form.m) << form.m, True, negative
    context = 40 + min(max((s >> 2) - 2 * max(h >> 3, form.h) + form.k, 0), 31)
    return context, min(form.c, rounded(p, form)), False, negative


def of_integer(size: float, s: int, largest: int, negative: int) -> tuple[int, int, bool, int]:
    q = 2 + min(int(4 * size), 4096)
    centre, quarter, w = min(q >> 2, largest), q & 3, (s >> 2) - 254
    if negative and centre == 0:
        quarter, negative = 3 - quarter, 0
    context = 40 + 4 * max(0, w + 5) + quarter if w < 0 else 60 + min(w, 11)
    return context, centre - negative, False, negative


def plain_values(data: bytes, n: int, dtype: str) -> list[int]:
    """Values that follow as they are."""
    if dtype in ("bf16", "fp16"):
        return list(struct.unpack(f"<{n}H", data))
    if dtype in ("int4", "kivi4"):
        data = bytes(nibble for byte in data for nibble in (byte & 15, byte >> 4))
    sign = 0x8 if dtype in ("int4", "kivi4") else 0x80
    assert len(data) == n
    return [(value & sign - 1) | (0x8000 if value & sign else 0) for value in data]


class Stream:
    """A stream of n values, which are read some at a time."""

    def __init__(self, data: bytes, n: int, dtype: str, frequencies: list) -> None:
        (words,) = struct.unpack_from("<I", data)
        self.data, self.dtype, self.frequencies = data, dtype, frequencies
        self.near = near_bins(FORMS[dtype].m)
        self.far = [(n, 0) for n in range(16)] + [((4 + t) << (j + 2), j + 2) for j in range(12) for t in range(4)]
        self.slots: dict[int, list[tuple[int, int, int]]] = {}
        self.done, self.at_bit, self.lanes = 0, 0, 0
        self.plain = plain_values(data[4:], n, dtype) if words == 0xFFFFFFFF else None
        if self.plain is None:
            self.lanes, words = 4 if n < 8192 or words >> 31 else 32, words & 0x7FFFFFFF
            self.words, self.raw = struct.unpack_from(f"<{words}H", data, 4), data[4 + 2 * words :]
            self.states = [self.words[2 * j] | self.words[2 * j + 1] << 16 for j in range(self.lanes)]
            self.at = 2 * self.lanes

    def token(self, context: int) -> int:
        if context not in self.slots:
            self.slots[context], total = [], 0
            for token, f in enumerate(self.frequencies[context]):
                self.slots[context] += [(token, f, total)] * f
                total += f
        lane = (self.done - 1) % self.lanes
        x = self.states[lane]
        token, f, start = self.slots[context][x % 4096]
        x = f * (x >> 12) + x % 4096 - start
        if x < 1 << 16:
            x, self.at = x << 16 | self.words[self.at], self.at + 1
        self.states[lane] = x
        return token

    def raw_bits(self, n: int) -> int:
        first, self.at_bit = self.at_bit, self.at_bit + n
        assert self.at_bit <= 8 * len(self.raw)
        return (int.from_bytes(self.raw[first // 8 : first // 8 + 4], "little") >> first % 8) & ((1 << n) - 1)

    def read(self, guesses: list[tuple[float, int]]) -> list[int]:
        """The next scalars. guesses: prediction and S of each."""
        return [self.scalar(*guess) for guess in guesses]

    def scalar(self, prediction: float, s: int) -> int:
        self.done += 1
        if self.plain is not None:
            return int(self.plain[self.done - 1])
        context, centre, near, negative = context_and_centre(prediction, s, self.dtype)
        token = self.token(context)
        if token == 127:
            o = self.raw_bits(16)
            o -= o >> 15 << 16
        else:
            base, n = (self.near if near else self.far)[token // 2]
            size, sign = base + self.raw_bits(n), token % 2
            if near:  # noqa: SIM108 - one line of it would be unreadable
                o = -1 - (size + centre) if sign else size + centre
            else:
                o = centre + (-1 - size if sign else size)
            o = -1 - o if negative else o
        return o if o >= 0 else 0x8000 | (-1 - o)

    def end(self) -> None:
        """Everything must be used up."""
        if self.plain is None:
            assert self.states == [1 << 16] * self.lanes
            assert self.at == len(self.words)
            assert (self.at_bit + 7) // 8 == len(self.raw)


def decode_stream(data: bytes, guesses: list[tuple[float, int]], dtype: str, frequencies: list) -> list[int]:
    """All scalars of a stream."""
    stream = Stream(data, len(guesses), dtype, frequencies)
    out = stream.read(guesses)
    stream.end()
    return out


def checksum(data: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(data).to_bytes(8, "little")


def records(data: bytes, header: dict, streams: int) -> list[tuple[int, int, list[int], list[int], int]]:
    """(tokens, position, ids, length of each stream, offset of the payload) of every segment, all of it checked."""
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
            ids = list(struct.unpack_from(f"<{count}I", data, at + 40)) if header["tokens"] == "ids" else []
            found.append((count, start, ids, [length for length, _, _ in index], end))
            assert sum(found[-1][3]) == payload
        at = end + payload
    assert data[end - front - rest : end - front - rest + 4] == b"TAIL"
    return found


def guesses_of(
    prediction: list[float],
    codes: list[int],
    step: np.float16 | None = None,
    moved: int = 0,
    minimum: np.float16 | None = None,
) -> list[tuple[float, int]]:
    """Prediction and S of the values that share a step. moved: what the predictor adds to scale codes."""
    if step is not None:
        useful = np.isfinite(step) and step != 0
        divisor = f32(step) if useful else f32(np.inf)
        moved += 1016 - ((float_bits(abs(float(step))) + 2**19) >> 20) if useful else 0
        with np.errstate(over="ignore"):
            if minimum is not None:
                low = f32(minimum) if np.isfinite(minimum) else f32(0)
                prediction = [(f32(mean) - low) / divisor - f32(8) for mean in prediction]
            else:
                prediction = [f32(mean) / divisor for mean in prediction]
        prediction = [min(max(mean, f32(-512)), f32(512)) for mean in prediction]
    scales = [min(max(code + moved, 1), 2039) if code else -16384 for code in codes]
    return list(zip(prediction, scales, strict=True))


class Steps(NamedTuple):
    """How steps or minimums are coded: means and scale codes [layers][2][kv_heads][channels]."""

    means: list
    codes: list

    def read(self, data: bytes, layer: int, kind: int, count: int) -> np.ndarray:
        """uint16 [count, kv_heads * channels]."""
        one = [
            g for m, c in zip(self.means[layer][kind], self.codes[layer][kind], strict=True) for g in guesses_of(m, c)
        ]
        return np.array(decode_stream(data, one * count, "fp16", universal("fp16"))).reshape(count, -1)


class Static:
    """`marginal/1` and `static/1`."""

    def __init__(self, header: dict) -> None:
        self.header, self.known = header, profile(header, header["profile"])
        self.beside = [Steps(*one) for one in self.known.beside]

    def begin(self, start: int, ids: list[int]) -> None:
        self.start = start

    def read(
        self, data: bytes, layer: int, kind: int, first: int, steps: np.ndarray | None, shape: tuple
    ) -> np.ndarray:
        """A stream, uint16 `shape` [tokens, heads, channels]. first: its first head. steps: [2, tokens, kv_heads]."""
        count, group, _ = shape
        guesses = [
            guess
            for t in range(count)
            for head in range(first, first + group)
            for guess in guesses_of(
                predictions(self.header, self.known.means, layer, kind, head, self.start + t),
                self.known.scales[layer][kind][head],
                None if steps is None else steps[kind, t, head].view(np.float16),
            )
        ]
        return np.array(decode_stream(data, guesses, self.header["dtype"], self.known.frequencies)).reshape(shape)

    def read_runs(
        self, data: bytes, layer: int, kind: int, first: int, steps: np.ndarray, minimums: np.ndarray, shape: tuple
    ) -> np.ndarray:
        """A stream of kivi4, uint16 `shape` [rows, heads, runs, 32]. steps, minimums: [2, rows, kv_heads, runs]."""
        rows, group, dim, _ = shape
        guesses = []
        for row in range(rows):
            for head in range(first, first + group):
                scales = self.known.scales[layer][kind][head]
                tokens = [
                    predictions(self.header, self.known.means, layer, kind, head, self.start + 32 * row + t)
                    for t in range(32)
                ]
                for run in range(dim):
                    if kind == 0:
                        own, codes = [token[run] for token in tokens], [scales[run]] * 32
                    else:
                        t, at = divmod(32 * run, dim)
                        own, codes = tokens[t][at : at + 32], scales[at : at + 32]
                    step, low = (x[kind, row, head, run].view(np.float16) for x in (steps, minimums))
                    guesses += guesses_of(own, codes, step, minimum=low)
        return np.array(decode_stream(data, guesses, "kivi4", self.known.frequencies)).reshape(shape)


class Decoded(NamedTuple):
    """scalars: uint16 [layers, 2, tokens, kv_heads, head_dim]; steps: uint16 [layers, 2, tokens, kv_heads]. Of kivi4,
    [layers, 2, rows, kv_heads, runs, 32], and of the others, minimums among them, all but the last.
    """

    scalars: np.ndarray
    steps: np.ndarray
    minimums: np.ndarray


def header_of(data: bytes) -> dict:
    """The header of a session file."""
    (length,) = struct.unpack_from("<I", data, 12)
    header: dict = msgspec.msgpack.decode(data[24 : 24 + length])
    return header


def decode_file(data: bytes, predictor: Any = None) -> Decoded:
    """What a sound session file holds. predictor: what `Static` is, for a file whose profile is kept outside."""
    header = header_of(data)
    predictor = predictor or Static(header)
    layers, heads, dim, group = (header[k] for k in ("layers", "kv_heads", "head_dim", "heads_per_stream"))
    kivi, beside = header["dtype"] == "kivi4", BESIDE.get(header["dtype"], 0)
    firsts = [-1 - i for i in range(beside)] + list(range(0, heads, group))
    streams = [(k, kind, first) for k in range(layers) for kind in (0, 1) for first in firsts]
    segments = []
    for count, start, ids, lengths, at in records(data, header, len(streams)):
        rows, runs = (count // 32, (dim,)) if kivi else (count, ())
        scalars = np.zeros((layers, 2, rows, heads, dim, *(32,) * kivi), np.uint16)
        own = np.zeros((2, layers, 2, rows, heads, *runs), np.uint16)
        parts = {}
        for place, size in zip(streams, lengths, strict=True):
            parts[place], at = data[at : at + size], at + size
        for layer, kind, i in [(k, kind, i) for k in range(layers) for kind in (0, 1) for i in range(beside)]:
            numbers = predictor.beside[i].read(parts.pop((layer, kind, -1 - i)), layer, kind, rows)
            own[i, layer, kind] = numbers.reshape(rows, heads, *runs)
        predictor.begin(start, ids)
        for (layer, kind, first), part in parts.items():
            last = first + group
            if kivi:
                shape = (rows, group, dim, 32)
                found = predictor.read_runs(part, layer, kind, first, own[0, layer], own[1, layer], shape)
            else:
                steps = own[0, layer] if beside else None
                found = predictor.read(part, layer, kind, first, steps, (count, group, dim))
            scalars[layer, kind, :, first:last] = found
        segments.append((scalars, *own))
    return Decoded(*(np.concatenate(parts, axis=2) for parts in zip(*segments, strict=True)))
