"""Size and speed of coded KV caches: each predictor on each number of threads, beside other lossless coders."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Literal, NamedTuple, cast, get_args

import numpy as np
from numpy.typing import NDArray

from prolepsis.bench.part_sizes import Bits, Part, PartSizes, part_sizes
from prolepsis.coding import SessionReader, SessionWriter, kv_array, peers
from prolepsis.coding.any_profile import AnyProfile
from prolepsis.coding.cache_dtypes import KV, DType, Geometry, arrays_of
from prolepsis.coding.container import INDEX_ENTRY
from prolepsis.coding.peers import Peer, PeerSpeed
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import Profile, measure
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.threads import limited_to
from prolepsis.errors import ProlepsisError
from prolepsis.kv.stored import KIVI_BLOCK

MeasuredKind = Literal["marginal", "static"]
MEASURED: tuple[MeasuredKind, ...] = get_args(MeasuredKind)
"""Predictors whose profile a save measures on the very cache it codes. The others have theirs calibrated before."""


class Span(NamedTuple):
    """A part of a cache, by positions."""

    part: Part
    start: int
    stop: int


class Cache(NamedTuple):
    """What is coded: the KV of the tokens `ids` (uint32) from position 0, as a cache of this geometry stores it.

    prompt: how many of the tokens were given; the others were generated. These begin a segment of their own, so that
    the bytes of either part can be told.
    """

    kv: KV
    ids: NDArray[np.uint32]
    prompt: int
    geometry: Geometry
    rope: RopeSpec | None
    model: dict[str, str]

    @property
    def spans(self) -> list[Span]:
        """The prompt, and what was generated, if anything was."""
        spans: list[Span] = [Span("prompt", 0, self.prompt), Span("generated", self.prompt, len(self.ids))]
        return [span for span in spans if span.start < span.stop]

    @property
    def raw(self) -> bytes:
        """All values, then the steps where there are any."""
        return b"".join(array.tobytes() for array in arrays_of(self.kv))


class Candidate(NamedTuple):
    """A predictor and its profile, of `profile_bytes`.

    predictor: without its version. fitted_s: seconds that it took to fit the profile to other text; None where it comes
    from a file or, as `measured` says, is measured on the very cache it codes.
    """

    predictor: str
    profile: AnyProfile
    profile_bytes: int
    fitted_s: float | None = None

    @property
    def measured(self) -> bool:
        """Whether a writer measures the profile on each cache and puts it into the file."""
        return self.profile.embedded


@dataclass(frozen=True)
class Row:
    """What one predictor makes of a cache on some threads. Speeds are medians; MB: 10^6 bytes that the cache stores.

    bits_per_scalar: of the streams and their index entries, for each value of the cache; the steps of integers count
    for the values they belong to. ideal_bits: the same under the model alone, without what real streams cost beyond.
    ratio: stored bytes per byte of a whole session file, with header, token ids, and the profile where it is embedded.
    profile_bytes: of the profile, in the file or outside. measure_s: seconds to measure it on the cache, or to fit it
    to other text; None where it comes from a file.
    """

    predictor: str
    dtype: DType
    threads: int
    bits_per_scalar: float
    ideal_bits: float
    ratio: float
    encode_mb_s: float
    decode_mb_s: float
    encode_tok_s: float
    decode_tok_s: float
    profile_bytes: int
    measure_s: float | None


class Measurement(NamedTuple):
    """Of one predictor: a row for each number of threads, and what the parts of the cache take."""

    rows: list[Row]
    parts: list[PartSizes]


def measured_on(cache: Cache, predictor: MeasuredKind) -> Candidate:
    """Measured on the cache itself, as a save does."""
    profile = _measure(cache, predictor)
    return Candidate(predictor, profile, len(profile.to_bytes()))


def measure_rows(
    cache: Cache, candidate: Candidate, threads: Sequence[int], runs: int, on_run: Callable[[], None]
) -> Measurement:
    """Measure on each number of threads. Those take turns in each run; a run before the first does not count.

    `on_run` is called after each turn, and before the first.

    Raises:
        ProlepsisError: what was decoded is not what was coded.
    """
    data, _ = _encode(cache, candidate)
    _decode(cache, candidate, data)
    on_run()
    seconds: dict[int, list[_Seconds]] = {count: [] for count in threads}
    for _ in range(runs):
        for count in threads:
            with limited_to(count):
                seconds[count].append(_turn(cache, candidate, data))
            on_run()
    sizes = _sizes(cache, candidate, data)
    parts = [_part(cache, candidate, span, sizes) for span in cache.spans]
    return Measurement([_row(cache, candidate, count, sizes, turns) for count, turns in seconds.items()], parts)


def count_turns(candidates: int, threads: Sequence[int], runs: int) -> int:
    """How often `measure_rows` calls `on_run` for that many candidates."""
    return candidates * (1 + runs * len(threads))


def measure_peers(cache: Cache, coders: Sequence[Peer], runs: int) -> Iterator[PeerSpeed | ProlepsisError]:
    """What each of the `coders` (`peers.installed`) makes of the same bytes, on one thread; or how it failed."""
    raw = cache.raw
    for peer in coders:
        try:
            yield peers.measure(peer, raw, runs)
        except ProlepsisError as error:
            yield error


class _Seconds(NamedTuple):
    measure: float
    encode: float
    decode: float


class _Sizes(NamedTuple):
    """Bits of each segment that begins at one of `starts`, float64 [segments, layers, 2]; and the ratio of the file."""

    starts: NDArray[np.int64]
    coded: Bits
    ideal: Bits
    ratio: float


def _turn(cache: Cache, candidate: Candidate, data: bytes) -> _Seconds:
    start = time.perf_counter()
    if candidate.measured:
        _measure(cache, cast(MeasuredKind, candidate.predictor))
    measured = time.perf_counter() - start
    again, encoded = _encode(cache, candidate)
    if again != data:
        raise ProlepsisError(f"{candidate.predictor} made different bytes of the same cache; please report this")
    return _Seconds(measured, encoded, _decode(cache, candidate, data))


def _measure(cache: Cache, predictor: MeasuredKind) -> Profile:
    return measure(cache.kv, cache.geometry.dtype, cache.rope, 0, predictor)


def _encode(cache: Cache, candidate: Candidate) -> tuple[bytes, float]:
    """(session file, seconds to code the cache)."""
    file = BytesIO()
    dtype = cache.geometry.dtype
    block = KIVI_BLOCK if dtype == "kivi4" else 16
    writer = SessionWriter(file, candidate.profile, dtype=dtype, rope=cache.rope, model=cache.model, block_size=block)
    start = time.perf_counter()
    for _, first, stop in cache.spans:
        writer.add(kv_array.part(cache.kv, first, stop), cache.ids[first:stop])
    seconds = time.perf_counter() - start
    writer.finish()
    return file.getvalue(), seconds


def _open(candidate: Candidate, data: bytes) -> SessionReader:
    return SessionReader(data, "the coded cache", profile=None if candidate.measured else candidate.profile)


def _decode(cache: Cache, candidate: Candidate, data: bytes) -> float:
    """Seconds to decode the whole file."""
    reader = _open(candidate, data)
    _ = reader.coder  # made before the clock starts, as a writer's is
    start = time.perf_counter()
    decoded = reader.read_all()
    seconds = time.perf_counter() - start
    if not all(map(np.array_equal, arrays_of(decoded), arrays_of(cache.kv))):
        raise ProlepsisError(f"{candidate.predictor} restored a cache that differs; please report this")
    return seconds


def _sizes(cache: Cache, candidate: Candidate, data: bytes) -> _Sizes:
    reader, coded, ideal = _open(candidate, data), [], []
    past = reader.coder.new_past()
    for entry in reader.segments:
        part = kv_array.copy(kv_array.part(cache.kv, entry.start, entry.stop))
        ideal.append(reader.coder.ideal_bits(Segment(entry.start, entry.count, entry.ids), part, past))
        lengths = entry.index["length"].astype(np.int64) + INDEX_ENTRY.itemsize
        coded.append(8.0 * lengths.reshape(cache.geometry.layers, 2, -1).sum(axis=2))
    starts = np.array([entry.start for entry in reader.segments])
    return _Sizes(starts, np.stack(coded), np.stack(ideal), _stored_bytes(cache) / len(data))


def _part(cache: Cache, candidate: Candidate, span: Span, sizes: _Sizes) -> PartSizes:
    inside = (sizes.starts >= span.start) & (sizes.starts < span.stop)
    ideal, coded = sizes.ideal[inside].sum(axis=0), sizes.coded[inside].sum(axis=0)
    return part_sizes(candidate.predictor, cache.geometry, span.part, span.stop - span.start, ideal, coded)


def _stored_bytes(cache: Cache) -> int:
    return sum(array.nbytes for array in arrays_of(cache.kv))


def _row(cache: Cache, candidate: Candidate, threads: int, sizes: _Sizes, turns: list[_Seconds]) -> Row:
    median = _Seconds(*map(statistics.median, zip(*turns, strict=True)))
    megabytes, tokens = _stored_bytes(cache) / 1e6, len(cache.ids)
    _, layers, heads, dim = cache.geometry
    scalars = tokens * 2 * layers * heads * dim
    return Row(
        candidate.predictor,
        cache.geometry.dtype,
        threads,
        bits_per_scalar=float(sizes.coded.sum()) / scalars,
        ideal_bits=float(sizes.ideal.sum()) / scalars,
        ratio=sizes.ratio,
        encode_mb_s=megabytes / median.encode,
        decode_mb_s=megabytes / median.decode,
        encode_tok_s=tokens / median.encode,
        decode_tok_s=tokens / median.decode,
        profile_bytes=candidate.profile_bytes,
        measure_s=median.measure if candidate.measured else candidate.fitted_s,
    )
