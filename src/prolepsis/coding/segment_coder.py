"""One segment of KV to streams and back: predict some layers, code them, go on to the layers above."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from prolepsis.coding import streams
from prolepsis.coding.floats import to_float
from prolepsis.coding.predictors import Prediction, Segment
from prolepsis.coding.profile import Geometry, Profile
from prolepsis.coding.rope import RopeSpec


class CodedStream(NamedTuple):
    """A stream's bytes, uint8, and the checksum of the values in it."""

    data: NDArray[np.uint8]
    checksum: int


class SegmentCoder:
    """Codes segments of one geometry under one profile. Segments do not depend on each other.

    `predictor` is what it predicts with; `group` how many heads share a stream.
    """

    def __init__(self, geometry: Geometry, profile: Profile, rope: RopeSpec | None) -> None:
        self._geometry = geometry
        self._tables = profile.tables(geometry.dtype)
        self.predictor = profile.predictor(rope)
        self.group = streams.heads_per_stream(geometry.kv_heads, geometry.head_dim)

    def encode(self, segment: Segment, kv: NDArray[np.uint16]) -> list[CodedStream]:
        """The streams of `kv`, uint16 [layers, 2, tokens, kv_heads, head_dim], in the order of docs/format.md."""
        out: list[CodedStream] = []
        for layers, prediction in self._predictions(segment, kv):
            part = kv[layers.start : layers.stop]
            coded = streams.encode_layers(part, prediction, self._tables, self.group)
            values = streams.split(part, self.group)
            out += [CodedStream(c, xxhash.xxh3_64_intdigest(v.data)) for c, v in zip(coded, values, strict=True)]
        return out

    def decode(
        self,
        segment: Segment,
        data: NDArray[np.uint8],
        ends: NDArray[np.int64],
        check: Callable[[int, NDArray[np.uint16], bool], None],
    ) -> NDArray[np.uint16]:
        """The inverse of `encode`.

        data: the streams one after the other, then READ_AHEAD bytes of anything. ends: where each stream ends.
        check(stream, values, sound) is told of each stream before anything is made of its values, and raises where
        they are not what they should be.
        """
        geometry = self._geometry
        kv = np.empty((geometry.layers, 2, segment.count, geometry.kv_heads, geometry.head_dim), np.uint16)
        per_layer = len(ends) // geometry.layers
        for layers, prediction in self._predictions(segment, kv):
            begin, end = layers.start * per_layer, layers.stop * per_layer
            base = int(ends[begin - 1]) if begin else 0
            part, sound = streams.decode_layers(
                data[base:], ends[begin:end] - base, prediction, self._tables, self.group
            )
            for i, stream in enumerate(part):
                check(begin + i, stream, bool(sound[i]))
            kv[layers.start : layers.stop] = streams.join(part, geometry.kv_heads, geometry.head_dim)
        return kv

    def _predictions(self, segment: Segment, kv: NDArray[np.uint16]) -> Iterator[tuple[range, Prediction]]:
        """Each step's layers and their prediction. `kv` must hold the true values of all layers below by then."""
        work, step = self.predictor.begin(segment), self.predictor.layers_at_once
        for first in range(0, self._geometry.layers, step):
            layers = range(first, min(first + step, self._geometry.layers))
            below = to_float(kv[first - 1], self._geometry.dtype) if step == 1 and first else None
            yield layers, work.predict(layers, below)
