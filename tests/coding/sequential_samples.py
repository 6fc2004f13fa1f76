"""A predictor that needs its past, and little else: the token before the segment, and the layer below."""

from dataclasses import dataclass

import numpy as np

from prolepsis.coding.cache_dtypes import DType, Geometry, moderate_values
from prolepsis.coding.predictors import Past, Prediction, Segment
from prolepsis.coding.profile import Profile, measure, scale_codes
from prolepsis.coding.rope import RopeSpec
from prolepsis.coding.tables import TokenTables, universal_tables
from prolepsis.kernels.kv_pool import KVPool

POSITIONS = 1000


@dataclass(frozen=True)
class EchoProfile:
    """What coders ask of a profile. weight: by how much to multiply what is echoed."""

    geometry: Geometry
    weight: float = 0.5
    positions: int = POSITIONS

    predictor_name = "echo/1"
    embedded = False

    @property
    def fingerprint(self) -> str:
        return f"echo {self.weight}"

    def predictor(self, rope: RopeSpec | None) -> "EchoPredictor":
        return EchoPredictor(self)

    def tables(self, dtype: DType) -> TokenTables:
        return universal_tables(dtype)

    @property
    def steps(self) -> Profile | None:
        """Any statistics of steps will do."""
        if self.geometry.steps is None:
            return None
        layers, heads = self.geometry.layers, self.geometry.kv_heads
        return measure(np.full((layers, 2, 40, heads, 1), 0x3000, np.uint16), "fp16", None, 0)

    @property
    def minimums(self) -> None:
        """There are none."""


class EchoPredictor:
    name = EchoProfile.predictor_name
    layers_at_once = 1

    def __init__(self, profile: EchoProfile) -> None:
        self.profile, self.positions = profile, profile.positions

    def begin(self, segment: Segment, past: Past | None = None) -> "_EchoSegment":
        assert past is not None
        assert past.known >= segment.start
        return _EchoSegment(self.profile, segment, past)


class _EchoSegment:
    def __init__(self, profile: EchoProfile, segment: Segment, past: Past) -> None:
        self._geometry, self._weight, self._past = profile.geometry, np.float32(profile.weight), past
        self._start, self._stop = segment.start, segment.start + segment.count

    def predict(self, layers: range) -> Prediction:
        self._layer, (_, _, heads, dim) = layers.start, self._geometry
        table = self._past.blocks(self._stop)
        means = np.zeros((2, self._stop - self._start, heads, dim), np.float32)
        if self._start:
            means += self._weight * rows(self._past.pool, table, self._layer, self._start - 1, self._start)
        if self._layer:
            means += self._weight * rows(self._past.pool, table, self._layer - 1, self._start, self._stop)
        codes = np.full((1, 2, heads, dim), scale_codes(np.array([0.5]))[0], np.int32)
        return Prediction(means[None], codes)

    def learn(self, scalars: np.ndarray, steps: np.ndarray | None) -> None:
        if self._past.known < self._stop:
            self._past.put(self._layer, self._start, scalars[0], None if steps is None else steps[0])
            if self._layer == self._geometry.layers - 1:
                self._past.known = self._stop


def rows(pool: KVPool, table: np.ndarray, layer: int, start: int, stop: int) -> np.ndarray:
    """What the blocks of a bf16 pool hold: float32 [2, tokens, heads, dim]."""
    shape = (-1, pool.num_blocks, pool.kv_heads, pool.head_dim, pool.block_size)
    at = np.arange(start, stop)
    block, inside = table[at // pool.block_size], at % pool.block_size
    k = pool.k.reshape(shape)[layer, block, :, :, inside]
    v = pool.v.reshape(*shape[:3], shape[4], shape[3])[layer, block, :, inside]
    return moderate_values("bf16")[np.stack([k, v])]
