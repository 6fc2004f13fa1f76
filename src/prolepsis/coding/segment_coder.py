"""One segment of KV to streams and back: predict some layers, code them, go on to the layers above."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding import chains, runs, streams
from prolepsis.coding.cache_dtypes import (
    KIVI_RUN,
    KV,
    DType,
    Geometry,
    KiviKV,
    QuantisedKV,
    are_scalars,
    from_scalars,
    to_scalars,
)
from prolepsis.coding.past import OwnPast
from prolepsis.coding.predictors import Chain, Past, Prediction, Predictor, Segment
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.threads import pause
from prolepsis.coding.uniform_grid import on_grid
from prolepsis.errors import InputError

_CHANNELS_ON_GRID = 1 << 17  # bounds the memory of predictions that are made for each token: 128 MiB a segment

T = TypeVar("T")
Scalars = NDArray[np.uint16]
Check = Callable[[int, Scalars, bool], None]


class CodedStream(NamedTuple):
    """A stream's bytes, uint8, and the checksum of the scalars in it."""

    data: NDArray[np.uint8]
    checksum: int


class Statistics(Protocol):
    """What segments are coded with."""

    @property
    def steps(self) -> "Statistics | None":
        """That of the steps of an integer dtype, which are coded like an fp16 cache (`Geometry.steps`)."""
        ...

    @property
    def minimums(self) -> "Statistics | None":
        """That of the minimums of kivi4."""
        ...

    def predictor(self, rope: RopeSpec | None) -> Predictor:
        """What predicts the values."""
        ...

    def tables(self, dtype: DType) -> TokenTables:
        """The token tables, ready to code with."""
        ...


class SegmentCoder:
    """Codes segments of one geometry under one profile.

    `predictor` is what it predicts with; `group` how many heads share a stream. Unless `sequential`, segments do not
    depend on each other, and threads may code several at a time. Else each takes the `past` of its sequence, which
    knows all tokens before the segment, and afterwards those of the segment.
    """

    def __init__(
        self, geometry: Geometry, profile: Statistics, rope: RopeSpec | None, *, group: int | None = None
    ) -> None:
        """`group`: as the file has it; by default `streams.heads_per_stream`.

        Raises:
            InputError: the profile is one for integers, and the geometry is not, or the other way round.
        """
        self._geometry = geometry
        self._tables = profile.tables(geometry.dtype)
        self._beside = self._coders_beside(profile)
        self.predictor = profile.predictor(rope)
        self.group = group or streams.heads_per_stream(geometry.kv_heads, geometry.head_dim)
        self._kivi = geometry.dtype == "kivi4"
        self._heads = self.group * (geometry.head_dim if self._kivi else 1)  # as scalars have them, in a stream

    def _coders_beside(self, profile: Statistics) -> list["SegmentCoder"]:
        """Of steps and of minimums, where there are any."""
        geometry, coders = self._geometry, list[SegmentCoder]()
        for what, own, known in (
            ("steps", geometry.steps, profile.steps),
            ("minimums", geometry.minimums, profile.minimums),
        ):
            if (own is None) != (known is None):
                told = f"nothing about {what}" if known is None else f"about {what}"
                raise InputError(f"the profile knows {told}, so it is not one for {geometry.dtype}")
            if own is not None and known is not None:
                coders.append(SegmentCoder(own, known, None, group=own.kv_heads))
        return coders

    @property
    def sequential(self) -> bool:
        """Whether the segments of a sequence must be coded in order, from position 0."""
        return self.predictor.positions is not None

    def new_past(self) -> OwnPast | None:
        """What a new sequence begins with; None unless `sequential`."""
        positions = self.predictor.positions
        return None if positions is None else OwnPast(self._geometry, positions)

    def encode(self, segment: Segment, kv: KV, past: Past | None = None) -> list[CodedStream]:
        """The streams of `kv`, in the order of docs/format.md.

        Raises:
            InputError: token ids that the predictor does not know, or more positions than it can look at.
        """
        scalars, beside = self._parts(kv)
        out: list[CodedStream] = []
        for layers, prediction in self._predictions(segment, scalars, beside, past):
            out += self._encode_layers(scalars[layers.start : layers.stop], prediction)
        rows = self._rows(segment)
        return _in_order([c.encode(rows, x) for c, x in zip(self._beside, beside, strict=True)], out)

    def _parts(self, kv: KV) -> tuple[Scalars, list[Scalars]]:
        """(scalars, what is beside them as an fp16 cache has it)."""
        if isinstance(kv, KiviKV):
            return runs.to_scalars(kv), [kv.steps, kv.minimums]
        return to_scalars(kv, self._geometry.dtype), [kv.steps[..., None]] if isinstance(kv, QuantisedKV) else []

    def _rows(self, segment: Segment) -> Segment:
        """What stands for the segment in what is beside the values."""
        return runs.rows_of(segment) if self._kivi else segment

    def _encode_layers(self, part: Scalars, prediction: Prediction | Chain) -> list[CodedStream]:
        if isinstance(prediction, Chain):
            chained = chains.encode_layer(part[0], prediction, self._geometry.dtype, self._tables, self.group)
            return [CodedStream(c.data, xxhash.xxh3_64_intdigest(c.scalars.data)) for c in chained]
        coded = streams.encode_layers(part, prediction, self._tables, self._heads)
        out = []
        for data, values in zip(coded, streams.values_of(part, self._heads), strict=True):
            out.append(CodedStream(data, xxhash.xxh3_64_intdigest(values.data)))
            pause()
        return out

    def decode(
        self,
        segment: Segment,
        data: NDArray[np.uint8],
        ends: NDArray[np.int64],
        check: Check,
        out: Scalars | None = None,
        past: Past | None = None,
    ) -> KV:
        """The inverse of `encode`.

        data: the streams one after the other, then READ_AHEAD bytes of anything. ends: where each stream ends.
        check(stream, scalars, sound) is told of each stream before anything is made of its scalars, and raises where
        they are not what they should be. out: where to put values of 16 bits, and what is returned; its layers may lie
        apart. What it holds means nothing where `check` has raised.
        """
        bounds = np.stack([np.concatenate([[0], ends[:-1]]), ends, np.arange(len(ends))], axis=1)
        bounds = bounds.reshape(2 * self._geometry.layers, -1, 3)
        rows, first = self._rows(segment), len(self._beside)
        beside = [c._decode(rows, data, bounds[:, i : i + 1], [], check) for i, c in enumerate(self._beside)]
        scalars = self._decode(segment, data, bounds[:, first:], beside, check, out, past)
        if self._kivi:
            return runs.from_scalars(scalars, *beside)
        return from_scalars(scalars, _steps(beside), self._geometry.dtype)

    def _decode(
        self,
        segment: Segment,
        data: NDArray[np.uint8],
        bounds: NDArray[np.int64],
        beside: list[Scalars],
        check: Check,
        out: Scalars | None = None,
        past: Past | None = None,
    ) -> Scalars:
        """bounds: (begin, end, number) of each stream, [layers * 2, streams, 3]."""
        _, depth, heads, dim = self._geometry
        shape = (self._rows(segment).count, heads * dim, KIVI_RUN) if self._kivi else (segment.count, heads, dim)
        scalars = np.empty((depth, 2, *shape), np.uint16) if out is None else out
        for layers, prediction in self._predictions(segment, scalars, beside, past):
            part = bounds[2 * layers.start : 2 * layers.stop].reshape(-1, 3)
            self._decode_layers(data, part, prediction, check, scalars[layers.start : layers.stop])
        return scalars

    def _decode_layers(
        self,
        data: NDArray[np.uint8],
        bounds: NDArray[np.int64],
        prediction: Prediction | Chain,
        check: Check,
        out: Scalars,
    ) -> None:
        begins, ends, numbers = bounds.T
        decoded: Iterable[tuple[Scalars, bool]]
        if isinstance(prediction, Chain):
            dtype = self._geometry.dtype
            decoded = chains.decode_layer(data, begins, ends, out[0], prediction, dtype, self._tables, self.group)
        else:
            sound = streams.decode_layers(data, begins, ends, prediction, self._tables, self._heads, out)
            decoded = zip(streams.values_of(out, self._heads), sound.tolist(), strict=True)
        for number, (stream, whole) in zip(numbers.tolist(), decoded, strict=True):
            check(number, stream, whole and are_scalars(stream, self._geometry.dtype))

    def checksums(self, kv: KV) -> list[int]:
        """Of the values of each stream, as an index holds them, where they are predicted layer by layer."""
        scalars, beside = self._parts(kv)
        sums = [xxhash.xxh3_64_intdigest(stream.data) for stream in streams.values_of(scalars, self._heads)]
        return _in_order([c.checksums(x) for c, x in zip(self._beside, beside, strict=True)], sums)

    def count(self, segment: Segment, kv: KV, past: Past | None = None) -> NDArray[np.int64]:
        """How often each token occurs in each context: int64 [contexts, 128], of the values alone."""
        counts = np.zeros(self._tables.frequencies.shape, np.int64)
        for part in self._counts(segment, kv, past):
            counts += part.sum(axis=0)
        return counts

    def ideal_bits(self, segment: Segment, kv: KV, past: Past | None = None) -> NDArray[np.float64]:
        """The code length of each layer's K and V under this coder's model, float64 [layers, 2].

        Steps and minimums are included, but not what streams cost beyond the model.
        """
        lengths = [self._tables.code_length(count) for part in self._counts(segment, kv, past) for count in part]
        bits, rows = np.array(lengths).reshape(-1, 2), self._rows(segment)
        for coder, array in zip(self._beside, self._parts(kv)[1], strict=True):
            bits = bits + coder.ideal_bits(rows, array)
        return bits

    def _counts(self, segment: Segment, kv: KV, past: Past | None) -> Iterator[NDArray[np.int64]]:
        """As `count`, of the K and V of some layers: int64 [layers * 2, contexts, 128]."""
        scalars, beside = self._parts(kv)
        for layers, prediction in self._predictions(segment, scalars, beside, past):
            part = scalars[layers.start : layers.stop]
            if isinstance(prediction, Chain):
                yield chains.count_layer(part[0], prediction, self._geometry.dtype, self._tables, self.group).tokens
            else:
                yield streams.count_layers(part, prediction, self._tables, self._heads)

    def _predictions(
        self, segment: Segment, scalars: Scalars, beside: list[Scalars], past: Past | None
    ) -> Iterator[tuple[range, Prediction | Chain]]:
        """Some layers, and their prediction. Before the next are asked for, their `scalars` must be there."""
        work, at_once = self.predictor.begin(segment, past), self.predictor.layers_at_once
        if beside:
            at_once = max(1, min(at_once, _CHANNELS_ON_GRID // (2 * self._geometry.kv_heads * self._geometry.head_dim)))
        for first in range(0, self._geometry.layers, at_once):
            layers = range(first, min(first + at_once, self._geometry.layers))
            part, prediction = slice(layers.start, layers.stop), work.predict(layers)
            own = [array[part] for array in beside]
            yield layers, self._of_scalars(prediction, own)
            work.learn(scalars[part], _steps(own))

    def _of_scalars(self, prediction: Prediction | Chain, beside: list[Scalars]) -> Prediction | Chain:
        """What is predicted of values, of the scalars that are stored for them."""
        if self._kivi:
            assert isinstance(prediction, Prediction)  # nothing else has statistics of minimums
            return runs.on_runs(prediction, *beside)
        steps = _steps(beside)
        return prediction if steps is None else on_grid(prediction, steps)


def _in_order(beside: list[list[T]], values: list[T]) -> list[T]:
    """Something of each stream, in the order of a file: of a layer's K or V, those beside its values, then these."""
    if not beside:
        return values
    units = len(beside[0])
    groups = len(values) // units
    return [x for i in range(units) for x in (*(one[i] for one in beside), *values[i * groups : (i + 1) * groups])]


def _steps(beside: list[Scalars]) -> Scalars | None:
    """Those of each token's head."""
    return beside[0][..., 0] if beside else None
