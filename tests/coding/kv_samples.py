"""KV caches that look like a model's: channels with means (K's turned by position) and widths of their own."""

import numpy as np

from prolepsis.coding import RopeSpec
from prolepsis.coding.cache_dtypes import KV, QuantisedKV, quantise, to_float, to_scalars

ROPE = RopeSpec(theta=10_000.0, dim=16, style="interleaved")


def to_bits(values: np.ndarray, dtype: str) -> KV:
    """What a cache of this dtype stores for them."""
    return quantise(values.astype(np.float32), dtype)  # type: ignore[arg-type]


def turn(x: np.ndarray, start: int, rope: RopeSpec) -> np.ndarray:
    """RoPE on the last axis of [tokens, heads, dim]."""
    cos, sin = (t.astype(np.float64)[:, None] for t in rope.table(start, len(x)))
    pairs, out = rope.dim // 2, x.copy()
    a, b = (
        (slice(0, pairs), slice(pairs, rope.dim))
        if rope.style == "half"
        else (slice(0, rope.dim, 2), slice(1, rope.dim, 2))
    )
    out[..., a] = x[..., a] * cos - x[..., b] * sin
    out[..., b] = x[..., a] * sin + x[..., b] * cos
    return out


def realistic_kv(
    layers: int = 2,
    tokens: int = 300,
    heads: int = 2,
    dim: int = 16,
    dtype: str = "bf16",
    rope: RopeSpec | None = ROPE,
    start: int = 0,
    seed: int = 0,
) -> KV:
    """As it is stored: [layers, 2, tokens, heads, dim]."""
    random = np.random.default_rng(seed)
    widths = np.exp(random.normal(size=(layers, 2, 1, heads, dim)))
    means = widths * random.normal(size=widths.shape) * np.array([3.0, 0.3]).reshape(1, 2, 1, 1, 1)
    x = means + widths * random.normal(size=(layers, 2, tokens, heads, dim))
    if rope is not None:
        for layer in range(layers):
            x[layer, 0] = turn(x[layer, 0], start, rope)
    return to_bits(x, dtype)


def values(kv: KV, dtype: str) -> np.ndarray:
    """What is stored, as float32 [layers, 2, tokens, heads, dim]."""
    floats = to_float(to_scalars(kv, dtype), dtype)  # type: ignore[arg-type]
    return floats * to_float(kv.steps, "fp16")[..., None] if isinstance(kv, QuantisedKV) else floats
