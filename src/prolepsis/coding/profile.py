"""Profiles: the statistics of a KV cache that its coding relies on, measured on the cache itself and kept with it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import prod
from typing import Any, Literal

import numpy as np
import xxhash
import zstandard
from numpy.typing import NDArray

from prolepsis.coding import kv_array, runs, tables
from prolepsis.coding.cache_dtypes import KV, DType, Geometry, KiviKV, QuantisedKV, as_stored, quantise, to_float
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.static import MARGINAL, STATIC, StaticPredictor, StaticStatistics
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.threads import pause
from prolepsis.errors import InputError
from prolepsis.kernels.kv_contexts import CONSTANT

GRID = 256  # tokens of a segment, at absolute positions that are multiples of it
PREDICTORS = (STATIC, MARGINAL)

_SAMPLED_SEGMENTS = 16  # for means and scales; a quarter of them for the token tables
_FEW_TOKENS = 24  # below it, statistics of single channels cost more than they save
_FEW_VALUES = 1 << 22  # below it, the universal tables cost less than fitted ones
_FEW_CODES = 1 << 18  # the same of kivi4, whose codes end where the tables' bell curves go on
_LARGEST_SCALE = 2039  # of a finite float32
_LARGEST_MEAN = (100 + 127) << 7  # bf16 bits of 2**100: turned and added, it stays finite
_PER_CHANNEL, _OWN_TABLES = 1, 2
_LEVEL = 5  # of Zstandard; 19 would save 7 % of the profile, and take half as long as coding the segment itself

Parts = Callable[[], Iterable[tuple[Segment, KV]]]


@dataclass(frozen=True)
class Profile:
    """Means (bf16 bits) and scale codes of every channel, uint16 [layers, 2, kv_heads, head_dim], and token tables.

    `means` is None where all are zero and the heads' scales hold for all their channels; `frequencies` is None for
    the universal tables. `steps`: the same of an integer dtype's steps (`Geometry.steps`); `minimums`: of those of
    kivi4. `embedded`: whether the files coded with it hold it. `packed`: the bytes it was read from.
    """

    means: NDArray[np.uint16] | None
    scales: NDArray[np.uint16]
    frequencies: NDArray[np.uint16] | None
    steps: "Profile | None" = None
    minimums: "Profile | None" = None
    predictor_name: str = STATIC
    embedded: bool = True
    packed: bytes | None = field(default=None, compare=False, repr=False)

    def predictor(self, rope: RopeSpec | None) -> StaticPredictor:
        """The predictor with these statistics."""
        means = np.zeros_like(self.scales) if self.means is None else self.means
        turned = None if self.predictor_name == MARGINAL else rope
        return StaticPredictor(to_float(means, "bf16"), self.scales.astype(np.int32), turned, self.predictor_name)

    def tables(self, dtype: DType) -> TokenTables:
        """The token tables, ready to code with."""
        return tables.universal_tables(dtype) if self.frequencies is None else TokenTables(dtype, self.frequencies)

    @property
    def fingerprint(self) -> str:
        """What files call it by."""
        return fingerprint(self.to_bytes())

    def to_bytes(self) -> bytes:
        """A flag byte, then the arrays as byte planes, high bytes first, in one Zstandard frame."""
        if self.packed is not None:  # another release of Zstandard might pack it differently
            return self.packed
        flags = (_PER_CHANNEL if self.means is not None else 0) | (_OWN_TABLES if self.frequencies is not None else 0)
        arrays = self._arrays() + ([] if self.frequencies is None else [self.frequencies])
        planes = b"".join(np.ascontiguousarray(a.reshape(-1, 1).view(np.uint8).T[::-1]).tobytes() for a in arrays)
        return bytes([flags]) + zstandard.ZstdCompressor(level=_LEVEL).compress(planes)

    def _arrays(self) -> list[NDArray[np.uint16]]:
        own = [self.scales[..., 0]] if self.means is None else [self.means, self.scales]
        return [*own, *(array for one in (self.steps, self.minimums) if one is not None for array in one._arrays())]

    @classmethod
    def from_bytes(cls, data: bytes, geometry: Geometry, predictor_name: str = STATIC) -> "Profile":
        """The inverse of `to_bytes`.

        Raises:
            ValueError: the bytes are no profile of this predictor and geometry, or hold numbers no profile has.
        """
        if not data or data[0] > (_PER_CHANNEL | _OWN_TABLES):
            raise ValueError("unknown kind of profile")
        per_channel, own_tables = bool(data[0] & _PER_CHANNEL), bool(data[0] & _OWN_TABLES)
        if per_channel and predictor_name == MARGINAL:
            raise ValueError(f"profile with statistics of single channels, which {MARGINAL} does not have")
        geometries = [g for g in (geometry, geometry.steps, geometry.minimums) if g is not None]
        shapes = [shape for g in geometries for shape in _shapes(g, per_channel)]
        arrays = _unpack(data[1:], shapes + [tables.SHAPE] * own_tables)
        frequencies = arrays.pop() if own_tables else None
        if frequencies is not None and not tables.is_valid(frequencies):
            raise ValueError("profile with token frequencies that do not sum to 4096")
        size = len(arrays) // len(geometries)
        parts = [cls(*_checked(arrays[i * size : (i + 1) * size], g), None) for i, g in enumerate(geometries)]
        whole = _with_beside(parts)
        return replace(whole, frequencies=frequencies, predictor_name=predictor_name, packed=data)


class KeptOutside:
    """What profiles share that are too large to go into every session file.

    static: the static profile of an integer cache, whose steps are coded with it.
    """

    static: Profile | None
    embedded = False

    @property
    def steps(self) -> Profile | None:
        """That of an integer cache's steps."""
        return None if self.static is None else self.static.steps

    @property
    def minimums(self) -> None:
        """That of the minimums of kivi4, which only static profiles are for."""


def fingerprint(data: bytes) -> str:
    """Name of a profile: xxh3-128 of its bytes, in hex."""
    return xxhash.xxh3_128_hexdigest(data)


def _with_beside(parts: Sequence[Profile]) -> Profile:
    """One profile of those of the values, and of the steps and of the minimums where there are any."""
    values, steps, minimums, *_ = *parts, None, None
    assert values is not None
    return replace(values, steps=steps, minimums=minimums)


def _shapes(geometry: Geometry, per_channel: bool) -> list[tuple[int, ...]]:
    """Of means and scales, or of the heads' scales alone."""
    heads = (geometry.layers, 2, geometry.kv_heads)
    return [(*heads, geometry.head_dim)] * 2 if per_channel else [heads]


def _unpack(frame: bytes, shapes: Sequence[tuple[int, ...]]) -> list[NDArray[np.uint16]]:
    """Arrays of these shapes from their byte planes. Raises ValueError where there are more bytes, or fewer."""
    counts = [prod(shape) for shape in shapes]
    size = 2 * sum(counts)
    try:
        if zstandard.frame_content_size(frame) > size:  # Zstandard would allocate what the frame says
            raise ValueError(f"profile of {zstandard.frame_content_size(frame)} bytes where {size} were expected")
        planes = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompress(frame, max_output_size=size)
    except zstandard.ZstdError as error:
        raise ValueError(f"profile cannot be decompressed: {error}") from error
    if len(planes) != size:
        raise ValueError(f"profile of {len(planes)} bytes where {size} were expected")
    arrays: list[NDArray[np.uint16]] = []
    at = 0
    for shape, count in zip(shapes, counts, strict=True):
        high, low = np.frombuffer(planes, np.uint8, 2 * count, at).reshape(2, count)
        arrays.append((high.astype(np.uint16) << 8 | low).astype(np.uint16).reshape(shape))
        at += 2 * count
    return arrays


def _checked(
    arrays: list[NDArray[np.uint16]], geometry: Geometry
) -> tuple[NDArray[np.uint16] | None, NDArray[np.uint16]]:
    """Means and scales of every channel, from arrays of `_shapes`."""
    *means, scales = arrays
    if means and (means[0] & 0x7FFF).max() > _LARGEST_MEAN:
        raise ValueError("profile with a mean that is not a moderate number")
    if scales.max() > _LARGEST_SCALE:
        raise ValueError("profile with a scale that is not finite")
    if means:
        return means[0], scales
    return None, np.repeat(scales[..., None], geometry.head_dim, axis=-1)


def grid_spans(start: int, count: int) -> Iterator[Segment]:
    """Cut positions start ... start + count - 1 at the multiples of GRID."""
    stop = start + count
    while start < stop:
        end = min(stop, (start // GRID + 1) * GRID)
        yield Segment(start, end - start)
        start = end


def measure(
    kv: Any,
    dtype: str | None,
    rope: RopeSpec | None = None,
    start: int = 0,
    predictor: Literal["static", "marginal"] = "static",
) -> Profile:
    """The profile that codes `kv`, from position `start`, well. Looks at up to 16 segments, spread evenly.

    kv: [layers, 2 (K, V), tokens, kv_heads, head_dim], in any form that `cache_dtypes.as_stored` takes.

    Raises:
        InputError: a shape or dtype that cannot be coded.
    """
    kv, dtype = as_stored(kv, dtype)
    tokens = kv_array.token_count(kv)
    spans = list(grid_spans(start, tokens))
    sample = spans[:: max(1, -(-len(spans) // _SAMPLED_SEGMENTS))]

    def parts() -> Iterator[tuple[Segment, KV]]:
        for span in sample:
            yield span, kv_array.part(kv, span.start - start, span.start - start + span.count)

    return measure_parts(parts, Geometry.of(kv, dtype), rope, predictor, tokens=tokens)


def measure_parts(
    parts: Parts,
    geometry: Geometry,
    rope: RopeSpec | None,
    predictor: Literal["static", "marginal"] = "static",
    *,
    tokens: int | None = None,
) -> Profile:
    """The profile that codes KV like that of `parts` well, measured in the memory that one part takes.

    `parts` is called up to three times, and gives the same segments and KV each time. tokens: how many will be coded
    with the profile; None for many. A few get one scale for each head and the universal tables.
    """
    per_channel = predictor == "static" and (tokens is None or tokens >= _FEW_TOKENS)
    values = geometry._replace(dtype="bf16") if geometry.dtype == "kivi4" else geometry
    measured = [StaticStatistics(values, rope if predictor == "static" else None)]
    measured += [StaticStatistics(one, None) for one in (geometry.steps, geometry.minimums) if one is not None]
    means: list[NDArray[np.uint16] | None] = [None] * len(measured)
    if per_channel:
        _feed(parts, [one.add for one in measured])
        pause()
        means = [_bf16(part) for part in _of_parts(geometry, [one.means for one in measured])]
        pause()
    _feed(parts, [partial(one.add_errors, means=m) for one, m in zip(measured, means, strict=True)])
    errors = _of_parts(geometry, [one.deviations for one in measured], power=2)
    fitted = [Profile(m, _scales(error, m is not None), None) for error, m in zip(errors, means, strict=True)]
    profile = replace(_with_beside(fitted), predictor_name={"static": STATIC, "marginal": MARGINAL}[predictor])
    few = _FEW_CODES if geometry.dtype == "kivi4" else _FEW_VALUES
    if tokens is not None and tokens * 2 * geometry.layers * geometry.kv_heads * geometry.head_dim < few:
        return profile
    coder = SegmentCoder(geometry, profile, rope)
    counts = sum(coder.count(segment, kv) for segment, kv in islice(parts(), 0, None, 4))
    if not isinstance(counts, np.ndarray):
        raise InputError("there are no tokens to measure a profile on")
    return replace(profile, frequencies=tables.fit(counts, geometry.dtype))


def _feed(parts: Parts, takers: Sequence[Callable[[Segment, KV], None]]) -> None:
    """The values of each part to the first taker, the steps to the second, the minimums to the third."""
    for segment, kv in parts():
        rows = segment
        arrays: tuple[KV, ...] = (kv, kv.steps[..., None]) if isinstance(kv, QuantisedKV) else (kv,)
        if isinstance(kv, KiviKV):
            rows, arrays = runs.rows_of(segment), (runs.to_bf16(kv), kv.steps, kv.minimums)
        for take, array, where in zip(takers, arrays, (segment, rows, rows), strict=False):
            take(where, array)


def _of_parts(geometry: Geometry, statistics: list[NDArray[np.float64]], power: int = 1) -> list[NDArray[np.float64]]:
    """Statistics of the values, the steps and the minimums, as they are used; their powers are averaged."""
    if geometry.dtype != "kivi4":
        return statistics
    return [statistics[0], *(runs.alike_for_tokens(one**power) ** (1 / power) for one in statistics[1:])]


def _scales(deviations: NDArray[np.float64], per_channel: bool) -> NDArray[np.uint16]:
    if not per_channel:
        deviations = np.broadcast_to(np.sqrt((deviations**2).mean(axis=-1, keepdims=True)), deviations.shape)
    return scale_codes(deviations)


def scale_codes(deviations: NDArray[np.float64]) -> NDArray[np.uint16]:
    """The leading bits of float32: exponent and 3 mantissa bits, rounded. CONSTANT stands for exactly 0."""
    bits = np.minimum(deviations, 1e38).astype(np.float32).view(np.uint32).astype(np.int64)
    codes = np.clip((bits + (1 << 19)) >> 20, 1, _LARGEST_SCALE)
    return np.where(deviations > 0, codes, CONSTANT).astype(np.uint16)


def _bf16(values: NDArray[np.float64]) -> NDArray[np.uint16]:
    """Bits of the nearest bf16; what is larger than any sensible mean becomes 2**99."""
    bits = quantise(np.clip(values, -(2.0**99), 2.0**99).astype(np.float32), "bf16")
    assert isinstance(bits, np.ndarray)
    return bits.astype(np.uint16)
