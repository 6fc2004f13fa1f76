"""KV that follows from its tokens and from the layers below, as a model's does, and a profile fitted to it."""

from functools import cache

import numpy as np
from kv_samples import turn

from prolepsis.coding import RopeSpec, kv_array
from prolepsis.coding.cache_dtypes import KV, DType, Geometry, quantise
from prolepsis.coding.calibration import Embedding, calibrate_linear
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.linear_profile import LinearProfile
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import grid_spans

VOCABULARY, HIDDEN, LAYERS, HEADS, DIM = 50, 24, 4, 2, 32
ROPE = RopeSpec(theta=10_000.0, dim=16, style="half")
EMBEDDING = np.random.default_rng(7).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)


def rows(ids: np.ndarray) -> np.ndarray:
    """Of the embedding."""
    return EMBEDDING[ids]


def linear_kv(tokens: int, dtype: DType = "bf16", rope: RopeSpec | None = ROPE, seed: int = 0) -> tuple[KV, np.ndarray]:
    """(KV of a text, its token ids). Maps are the same for every seed; tokens and noise are not."""
    maps, random = np.random.default_rng(1), np.random.default_rng(seed)
    ids = random.integers(0, VOCABULARY, tokens).astype(np.uint32)
    state = EMBEDDING[ids] / np.sqrt((EMBEDDING[ids] ** 2).mean(axis=1, keepdims=True))
    width = 2 * HEADS * DIM
    state = state @ maps.normal(size=(HIDDEN, width)) / np.sqrt(HIDDEN)
    kv = np.empty((LAYERS, 2, tokens, HEADS, DIM), np.float32)
    for layer in range(LAYERS):
        mixed = maps.normal(size=width) + state @ maps.normal(size=(width, width)) / np.sqrt(width)
        kv[layer] = mixed.reshape(tokens, 2, HEADS, DIM).transpose(1, 0, 2, 3)
        if rope is not None:
            kv[layer, 0] = turn(kv[layer, 0].astype(np.float64), 0, rope)
        state = state + 0.1 * random.normal(size=state.shape) * np.exp(random.normal(size=(tokens, 1)))
    return quantise(kv, dtype), ids


def segments_of(kv: KV, ids: np.ndarray | None, tokens: int) -> list[Segment]:
    """The segments of a text from position 0 on."""
    spans = grid_spans(0, tokens)
    return [Segment(s.start, s.count, None if ids is None else ids[s.start : s.start + s.count]) for s in spans]


@cache
def linear_profile(
    dtype: DType = "bf16", rope: RopeSpec | None = ROPE, with_tokens: bool = True, tokens: int = 1500
) -> LinearProfile:
    """Fitted to texts of other seeds than 0."""
    geometry = Geometry(dtype, LAYERS, HEADS, DIM)
    with CalibrationSample(geometry, rope, 2 * tokens) as sample:
        for seed in (1, 2):
            kv, ids = linear_kv(tokens, dtype, rope, seed)
            for segment in segments_of(kv, ids if with_tokens else None, tokens):
                sample.add(segment, kv_array.part(kv, segment.start, segment.start + segment.count))
        return calibrate_linear(sample, Embedding(rows, VOCABULARY, 0.0) if with_tokens else None)
