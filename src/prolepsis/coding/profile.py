"""Profiles: the statistics of a KV cache that its coding relies on, measured on the cache itself and kept with it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from prolepsis.coding import streams, tables
from prolepsis.coding.floats import DType, to_float
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.static import StaticPredictor, StaticStatistics
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables
from prolepsis.kernels.kv_tokens import CONSTANT

GRID = 256  # tokens of a segment, at absolute positions that are multiples of it

_SAMPLED_SEGMENTS = 16  # for means and scales; a quarter of them for the token tables
_FEW_TOKENS = 24  # below it, statistics of single channels cost more than they save
_FEW_VALUES = 1 << 22  # below it, the universal tables cost less than fitted ones
_LARGEST_SCALE = 2039  # of a finite float32
_LARGEST_MEAN = (100 + 127) << 7  # bf16 bits of 2**100: turned and added, it stays finite
_PER_CHANNEL, _OWN_TABLES = 1, 2


class Geometry(NamedTuple):
    """Shape and dtype of one token's KV."""

    dtype: DType
    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class Profile:
    """Means (bf16 bits) and scale codes of every channel, uint16 [layers, 2, kv_heads, head_dim], and token tables.

    `means` is None where all are zero and the heads' scales hold for all their channels; `frequencies` is None for
    the universal tables.
    """

    means: NDArray[np.uint16] | None
    scales: NDArray[np.uint16]
    frequencies: NDArray[np.uint16] | None

    def predictor(self, rope: RopeSpec | None) -> StaticPredictor:
        """The predictor with these statistics."""
        means = np.zeros_like(self.scales) if self.means is None else self.means
        return StaticPredictor(to_float(means, "bf16"), self.scales.astype(np.int32), rope)

    def tables(self, dtype: DType) -> TokenTables:
        """The token tables, ready to code with."""
        return TokenTables(dtype, tables.universal() if self.frequencies is None else self.frequencies)

    def to_bytes(self) -> bytes:
        """A flag byte, then the arrays as byte planes, high bytes first, in one Zstandard frame."""
        flags = (_PER_CHANNEL if self.means is not None else 0) | (_OWN_TABLES if self.frequencies is not None else 0)
        scales = self.scales if self.means is not None else self.scales[..., 0]
        arrays = [a for a in (self.means, scales, self.frequencies) if a is not None]
        planes = b"".join(np.ascontiguousarray(a.reshape(-1, 1).view(np.uint8).T[::-1]).tobytes() for a in arrays)
        return bytes([flags]) + zstandard.ZstdCompressor(level=19).compress(planes)

    @classmethod
    def from_bytes(cls, data: bytes, geometry: Geometry) -> "Profile":
        """The inverse of `to_bytes`.

        Raises:
            ValueError: the bytes are no profile of this geometry, or hold numbers no profile has.
        """
        if not data or data[0] > (_PER_CHANNEL | _OWN_TABLES):
            raise ValueError("unknown kind of profile")
        shape = (geometry.layers, 2, geometry.kv_heads, geometry.head_dim)
        per_channel, own_tables = bool(data[0] & _PER_CHANNEL), bool(data[0] & _OWN_TABLES)
        shapes = ([shape, shape] if per_channel else [shape[:3]]) + [tables.SHAPE] * own_tables
        size = sum(2 * int(np.prod(s)) for s in shapes)
        try:
            planes = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(data[1:], max_output_size=size)
        except zstandard.ZstdError as error:
            raise ValueError(f"profile cannot be decompressed: {error}") from error
        if len(planes) != size:
            raise ValueError(f"profile of {len(planes)} bytes where {size} were expected")
        arrays, at = [], 0
        for s in shapes:
            count = int(np.prod(s))
            part = np.frombuffer(planes, np.uint8, 2 * count, at).reshape(2, count)
            arrays.append((part[0].astype(np.uint16) << 8 | part[1]).reshape(s))
            at += 2 * count
        frequencies = arrays.pop() if own_tables else None
        means = arrays[0] if per_channel else None
        scales = arrays[-1] if per_channel else np.repeat(arrays[-1][..., None], geometry.head_dim, axis=-1)
        _check(means, scales, frequencies)
        return cls(means, scales, frequencies)


def _check(
    means: NDArray[np.uint16] | None, scales: NDArray[np.uint16], frequencies: NDArray[np.uint16] | None
) -> None:
    if means is not None and (means & 0x7FFF).max() > _LARGEST_MEAN:
        raise ValueError("profile with a mean that is not a moderate number")
    if scales.max() > _LARGEST_SCALE:
        raise ValueError("profile with a scale that is not finite")
    if frequencies is not None and not tables.is_valid(frequencies):
        raise ValueError("profile with token frequencies that do not sum to 4096")


def fingerprint(data: bytes) -> str:
    """Name of a profile: xxh3-128 of its bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def grid_spans(start: int, count: int) -> Iterator[Segment]:
    """Cut positions start ... start + count - 1 at the multiples of GRID."""
    stop = start + count
    while start < stop:
        end = min(stop, (start // GRID + 1) * GRID)
        yield Segment(start, end - start)
        start = end


def measure(kv: NDArray[np.uint16], dtype: DType, rope: RopeSpec | None, start: int) -> Profile:
    """The profile that codes `kv` (uint16 [layers, 2, tokens, kv_heads, head_dim], from position `start`) well.

    Looks at up to 16 segments, spread evenly. A cache of a few tokens gets one scale for each head and the universal
    tables.
    """
    layers, _, count, heads, dim = kv.shape
    spans = list(grid_spans(start, count))
    sample = spans[:: max(1, -(-len(spans) // _SAMPLED_SEGMENTS))]

    def parts(every: int = 1) -> Iterator[tuple[Segment, NDArray[np.uint16]]]:
        for span in sample[::every]:
            yield span, kv[:, :, span.start - start : span.start - start + span.count].copy()

    statistics = StaticStatistics(layers, heads, dim, dtype, rope)
    means = None
    if count >= _FEW_TOKENS:
        for span, part in parts():
            statistics.add(span, part)
        means = _bf16(statistics.means)
    known_means = to_float(np.zeros(kv.shape[:2] + kv.shape[3:], np.uint16) if means is None else means, "bf16")
    for span, part in parts():
        statistics.add_errors(span, part, known_means)
    deviations = statistics.deviations
    if means is None:
        deviations = np.broadcast_to(np.sqrt((deviations**2).mean(axis=-1, keepdims=True)), deviations.shape)
    profile = Profile(means, scale_codes(deviations), None)
    if kv.size < _FEW_VALUES:
        return profile
    predictor, token_tables = profile.predictor(rope), profile.tables(dtype)
    group = streams.heads_per_stream(heads, dim)
    counts = sum(
        streams.count_layers(part, predictor.begin(span).predict(range(layers), None), token_tables, group)
        for span, part in parts(4)
    )
    return Profile(means, profile.scales, tables.fit(np.asarray(counts)))


def scale_codes(deviations: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The leading bits of float32: exponent and 3 mantissa bits, rounded. CONSTANT stands for exactly 0."""
    bits = np.minimum(deviations, 1e38).astype(np.float32).view(np.uint32).astype(np.int64)
    codes = np.clip((bits + (1 << 19)) >> 20, 1, _LARGEST_SCALE)
    return np.where(deviations > 0, codes, CONSTANT).astype(np.uint16)


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16; what is larger than any sensible mean becomes 2**99."""
    bits = np.clip(values, -(2.0**99), 2.0**99).astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
