"""`static`: every channel at its mean; the mean of K, taken before RoPE, is turned by the token's position.

`marginal` is the same with all means zero: no prediction, but how wide the values of each head spread.
"""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, Geometry, QuantisedKV, moderate_values, to_float, to_scalars
from prolepsis.coding.predictors import Past, Prediction, Segment, Turn
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.threads import for_each
from prolepsis.kernels import kv_static

STATIC, MARGINAL = "static/1", "marginal/1"


class StaticPredictor:
    """Means and scales of every channel: float32 and int32 [layers, 2, kv_heads, head_dim]."""

    positions = None

    def __init__(
        self, means: NDArray[np.float32], scales: NDArray[np.int32], rope: RopeSpec | None, name: str = STATIC
    ) -> None:
        self.means, self.scales, self.rope, self.name = means, scales, rope, name
        self.layers_at_once = len(means)

    def begin(self, segment: Segment, past: Past | None = None) -> "_StaticSegment":
        """Only the segment's positions matter, for the turn of K."""
        return _StaticSegment(self, turn_at(self.rope, segment))


class _StaticSegment:
    def __init__(self, predictor: StaticPredictor, turn: Turn) -> None:
        self._predictor, self._turn = predictor, turn

    def predict(self, layers: range) -> Prediction:
        """The same for every token but for the turn of K."""
        predictor, part = self._predictor, slice(layers.start, layers.stop)
        return Prediction(predictor.means[part, :, None], predictor.scales[part], None, self._turn)

    def learn(self, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """No value changes what is said of the others."""


def turn_at(rope: RopeSpec | None, segment: Segment) -> Turn:
    """The turn at the positions of `segment`; of no pairs where there is no RoPE."""
    if rope is None:
        empty = np.empty((segment.count, 0), np.float32)
        return Turn(empty, empty, False)
    return Turn(*rope.table(segment.start, segment.count), rope.style == "half")


class StaticStatistics:
    """Means and errors of every channel, gathered segment by segment in two passes.

    First `add` every segment, then read `means`; then `add_errors` every segment with the means that will be used,
    then read `deviations`. Infinities and NaNs count as zero.
    """

    def __init__(self, geometry: Geometry, rope: RopeSpec | None) -> None:
        self._geometry, self._rope = geometry, rope
        self._floats = moderate_values(geometry.dtype)
        self._sums = np.zeros((2 * geometry.layers, geometry.kv_heads, geometry.head_dim))
        self._squares = np.zeros_like(self._sums)
        self._added = self._compared = 0

    def add(self, segment: Segment, kv: KV) -> None:
        """First pass."""
        cos, sin, half = turn_at(self._rope, segment)
        values, steps = self._flat(kv)
        back = (cos, -sin), (cos[:, :0], sin[:, :0])
        for_each(
            len(values),
            lambda s: kv_static.add_unturned(values[s], self._floats, steps[s], *back[s % 2], half, self._sums[s]),
        )
        self._added += segment.count

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean of every channel, K before RoPE. float64 [layers, 2, kv_heads, head_dim]."""
        return self._per_channel(self._sums / max(1, self._added))

    def add_errors(self, segment: Segment, kv: KV, means: NDArray[np.uint16] | None) -> None:
        """Second pass: compare with the predictions that `means` (bf16 bits, None for zeros) give."""
        values, steps = self._flat(kv)
        known = np.zeros(self.means.shape, np.float32) if means is None else to_float(means, "bf16")
        expected = known.reshape(-1, *known.shape[2:])
        cos, sin, half = turn_at(self._rope, segment)
        turn = (cos, sin), (cos[:, :0], sin[:, :0])
        for_each(
            len(values),
            lambda s: kv_static.add_squared_residuals(
                values[s], self._floats, steps[s], expected[s], *turn[s % 2], half, self._squares[s]
            ),
        )
        self._compared += segment.count

    @property
    def deviations(self) -> NDArray[np.float64]:
        """Root mean square error of every channel. float64 [layers, 2, kv_heads, head_dim]."""
        return self._per_channel(np.sqrt(self._squares / max(1, self._compared)))

    def _flat(self, kv: KV) -> tuple[NDArray[np.uint16], NDArray[np.float32]]:
        """(scalars [layers * 2, tokens, kv_heads, head_dim], what their values are multiplied by: [..., kv_heads])."""
        scalars = np.ascontiguousarray(to_scalars(kv, self._geometry.dtype))
        flat = scalars.reshape(-1, *scalars.shape[2:])
        if isinstance(kv, QuantisedKV):
            return flat, moderate_values("fp16")[kv.steps].reshape(flat.shape[:-1])
        return flat, np.ones(flat.shape[:-1], np.float32)

    def _per_channel(self, flat: NDArray[np.float64]) -> NDArray[np.float64]:
        return flat.reshape(-1, 2, *flat.shape[1:])
