"""One segment of KV to streams and back: predict some layers, code them, go on to the layers above."""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding import chains, streams
from prolepsis.coding.cache_dtypes import (
    KV,
    DType,
    Geometry,
    QuantisedKV,
    are_scalars,
    from_scalars,
    to_scalars,
)
from prolepsis.coding.past import OwnPast
from prolepsis.coding.predictors import Chain, Past, Prediction, Predictor, Segment
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables
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
        """That of the steps of an integer dtype, which are coded like an fp16 cache of one channel a head."""
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
        if (geometry.steps is None) != (profile.steps is None):
            told = "nothing about steps" if profile.steps is None else "about steps"
            raise InputError(f"the profile knows {told}, so it is not one for {geometry.dtype}")
        self._geometry = geometry
        self._tables = profile.tables(geometry.dtype)
        self._steps = None
        if geometry.steps is not None and profile.steps is not None:
            self._steps = SegmentCoder(geometry.steps, profile.steps, None, group=geometry.kv_heads)
        self.predictor = profile.predictor(rope)
        self.group = group or streams.heads_per_stream(geometry.kv_heads, geometry.head_dim)

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
        scalars, steps = to_scalars(kv, self._geometry.dtype), _steps_of(kv)
        out: list[CodedStream] = []
        for layers, prediction in self._predictions(segment, scalars, steps, past):
            out += self._encode_layers(scalars[layers.start : layers.stop], prediction)
        if self._steps is None or steps is None:
            return out
        return _with_steps(self._steps.encode(segment, steps[..., None]), out)

    def _encode_layers(self, part: Scalars, prediction: Prediction | Chain) -> list[CodedStream]:
        if isinstance(prediction, Chain):
            chained = chains.encode_layer(part[0], prediction, self._geometry.dtype, self._tables, self.group)
            return [CodedStream(c.data, xxhash.xxh3_64_intdigest(c.scalars.data)) for c in chained]
        coded = streams.encode_layers(part, prediction, self._tables, self.group)
        values = streams.values_of(part, self.group)
        return [CodedStream(c, xxhash.xxh3_64_intdigest(v.data)) for c, v in zip(coded, values, strict=True)]

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
        steps = None
        if self._steps is not None:
            steps, bounds = self._steps._decode(segment, data, bounds[:, :1], None, check)[..., 0], bounds[:, 1:]
        scalars = self._decode(segment, data, bounds, steps, check, out, past)
        return from_scalars(scalars, steps, self._geometry.dtype)

    def _decode(
        self,
        segment: Segment,
        data: NDArray[np.uint8],
        bounds: NDArray[np.int64],
        steps: Scalars | None,
        check: Check,
        out: Scalars | None = None,
        past: Past | None = None,
    ) -> Scalars:
        """bounds: (begin, end, number) of each stream, [layers * 2, streams, 3]."""
        _, depth, heads, dim = self._geometry
        scalars = np.empty((depth, 2, segment.count, heads, dim), np.uint16) if out is None else out
        for layers, prediction in self._predictions(segment, scalars, steps, past):
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
            sound = streams.decode_layers(data, begins, ends, prediction, self._tables, self.group, out)
            decoded = zip(streams.values_of(out, self.group), sound.tolist(), strict=True)
        for number, (stream, whole) in zip(numbers.tolist(), decoded, strict=True):
            check(number, stream, whole and are_scalars(stream, self._geometry.dtype))

    def checksums(self, kv: KV) -> list[int]:
        """Of the values of each stream, as an index holds them, where they are predicted layer by layer."""
        values = streams.values_of(to_scalars(kv, self._geometry.dtype), self.group)
        sums, steps = [xxhash.xxh3_64_intdigest(stream.data) for stream in values], _steps_of(kv)
        if self._steps is None or steps is None:
            return sums
        return _with_steps(self._steps.checksums(steps[..., None]), sums)

    def count(self, segment: Segment, kv: KV, past: Past | None = None) -> NDArray[np.int64]:
        """How often each token occurs in each context: int64 [contexts, 128]. Steps do not count."""
        counts = np.zeros(self._tables.frequencies.shape, np.int64)
        for part in self._counts(segment, kv, past):
            counts += part.sum(axis=0)
        return counts

    def ideal_bits(self, segment: Segment, kv: KV, past: Past | None = None) -> NDArray[np.float64]:
        """The code length of each layer's K and V under this coder's model, float64 [layers, 2].

        Steps are included, but not what streams cost beyond the model.
        """
        lengths = [self._tables.code_length(count) for part in self._counts(segment, kv, past) for count in part]
        steps, bits = _steps_of(kv), np.array(lengths).reshape(-1, 2)
        if self._steps is None or steps is None:
            return bits
        return bits + self._steps.ideal_bits(segment, steps[..., None])

    def _counts(self, segment: Segment, kv: KV, past: Past | None) -> Iterator[NDArray[np.int64]]:
        """As `count`, of the K and V of some layers: int64 [layers * 2, contexts, 128]."""
        scalars, steps = to_scalars(kv, self._geometry.dtype), _steps_of(kv)
        for layers, prediction in self._predictions(segment, scalars, steps, past):
            part = scalars[layers.start : layers.stop]
            if isinstance(prediction, Chain):
                yield chains.count_layer(part[0], prediction, self._geometry.dtype, self._tables, self.group).tokens
            else:
                yield streams.count_layers(part, prediction, self._tables, self.group)

    def _predictions(
        self, segment: Segment, scalars: Scalars, steps: Scalars | None, past: Past | None
    ) -> Iterator[tuple[range, Prediction | Chain]]:
        """Some layers, and their prediction. Before the next are asked for, their `scalars` must be there."""
        work, at_once = self.predictor.begin(segment, past), self.predictor.layers_at_once
        if steps is not None:
            at_once = max(1, min(at_once, _CHANNELS_ON_GRID // (2 * self._geometry.kv_heads * self._geometry.head_dim)))
        for first in range(0, self._geometry.layers, at_once):
            layers = range(first, min(first + at_once, self._geometry.layers))
            part, prediction = slice(layers.start, layers.stop), work.predict(layers)
            yield layers, prediction if steps is None else on_grid(prediction, steps[part])
            work.learn(scalars[part], None if steps is None else steps[part])


def _with_steps(steps: list[T], values: list[T]) -> list[T]:
    """Something of each stream, in the order of a file: of a layer's K or V, that of steps, then those of values."""
    groups = len(values) // len(steps)
    return [each for i, step in enumerate(steps) for each in (step, *values[i * groups : (i + 1) * groups])]


def _steps_of(kv: KV) -> Scalars | None:
    return kv.steps if isinstance(kv, QuantisedKV) else None
