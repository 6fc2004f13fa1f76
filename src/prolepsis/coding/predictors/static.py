"""`static`: every channel at its mean; the mean of K, taken before RoPE, is turned by the token's position."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.floats import DType, moderate_values
from prolepsis.coding.predictors import Prediction, Segment
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.threads import for_each
from prolepsis.kernels import kv_static

_CHANNELS_AT_ONCE = 1 << 17  # bounds the memory that predictions take: 128 MiB for a segment of 256 tokens

Tables = tuple[NDArray[np.float32], NDArray[np.float32]]


class StaticPredictor:
    """Means and scales of every channel: float32 and int32 [layers, 2, kv_heads, head_dim]."""

    name = "static/1"

    def __init__(self, means: NDArray[np.float32], scales: NDArray[np.int32], rope: RopeSpec | None) -> None:
        self.means, self.scales, self.rope = means, scales, rope
        self.layers_at_once = max(1, _CHANNELS_AT_ONCE // means[0].size)

    def begin(self, segment: Segment) -> "_StaticSegment":
        """Only the segment's positions matter, for the turn of K."""
        return _StaticSegment(self, turns(self.rope, segment))


class _StaticSegment:
    def __init__(self, predictor: StaticPredictor, angles: Tables) -> None:
        self._predictor, self._angles = predictor, angles

    def predict(self, layers: range, below: NDArray[np.float32] | None) -> Prediction:
        """The same for every token but for the turn of K."""
        predictor, part = self._predictor, slice(layers.start, layers.stop)
        return Prediction(_predict(predictor.means[part], self._angles, predictor.rope), predictor.scales[part])


def turns(rope: RopeSpec | None, segment: Segment) -> Tables:
    """(cos, sin) of the positions of `segment`; of no pairs where there is no RoPE."""
    if rope is None:
        empty = np.empty((segment.count, 0), np.float32)
        return empty, empty
    return rope.table(segment.start, segment.count)


def _is_half(rope: RopeSpec | None) -> bool:
    return rope is not None and rope.style == "half"


def _predict(means: NDArray[np.float32], angles: Tables, rope: RopeSpec | None) -> NDArray[np.float32]:
    layers, _, heads, dim = means.shape
    out = np.empty((2 * layers, len(angles[0]), heads, dim), np.float32)
    flat = means.reshape(2 * layers, heads, dim)
    for_each(2 * layers, lambda s: kv_static.predict_static(flat[s], s % 2 == 0, *angles, _is_half(rope), out[s]))
    return out.reshape(layers, 2, *out.shape[1:])


class StaticStatistics:
    """Means and errors of every channel, gathered segment by segment in two passes.

    First `add` every segment, then read `means`; then `add_errors` every segment with the means that will be used,
    then read `deviations`. Infinities and NaNs count as zero.
    """

    def __init__(self, layers: int, kv_heads: int, head_dim: int, dtype: DType, rope: RopeSpec | None) -> None:
        self._shape = (layers, 2, kv_heads, head_dim)
        self._rope, self._floats = rope, moderate_values(dtype)
        self._sums = np.zeros((2 * layers, kv_heads, head_dim))
        self._squares = np.zeros_like(self._sums)
        self._added = self._compared = 0

    def add(self, segment: Segment, kv: NDArray[np.uint16]) -> None:
        """First pass. kv: uint16 [layers, 2, tokens, kv_heads, head_dim], contiguous."""
        cos, sin = turns(self._rope, segment)
        flat, half, sums = kv.reshape(-1, *kv.shape[2:]), _is_half(self._rope), self._sums
        back = -sin
        for_each(
            len(flat),
            lambda s: kv_static.add_unturned(flat[s], self._floats, s % 2 == 0, cos, back, half, sums[s]),
        )
        self._added += segment.count

    @property
    def means(self) -> NDArray[np.float64]:
        """Mean of every channel, K before RoPE. float64 [layers, 2, kv_heads, head_dim]."""
        return (self._sums / max(1, self._added)).reshape(self._shape)

    def add_errors(self, segment: Segment, kv: NDArray[np.uint16], means: NDArray[np.float32]) -> None:
        """Second pass: compare with the predictions that `means` give."""
        flat, squares = kv.reshape(-1, *kv.shape[2:]), self._squares
        predicted = _predict(means, turns(self._rope, segment), self._rope).reshape(flat.shape)
        for_each(
            len(flat),
            lambda s: kv_static.add_squared_residuals(flat[s], self._floats, predicted[s], squares[s]),
        )
        self._compared += segment.count

    @property
    def deviations(self) -> NDArray[np.float64]:
        """Root mean square error of every channel. float64 [layers, 2, kv_heads, head_dim]."""
        return np.sqrt(self._squares / max(1, self._compared)).reshape(self._shape)
