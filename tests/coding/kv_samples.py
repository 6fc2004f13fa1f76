"""KV caches that look like a model's: channels with means (K's turned by position) and widths of their own."""

import numpy as np

from prolepsis.coding import RopeSpec
from prolepsis.coding.floats import to_float

ROPE = RopeSpec(theta=10_000.0, dim=16, style="interleaved")


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest bf16 or fp16, as uint16."""
    if dtype == "fp16":
        return values.astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


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
) -> np.ndarray:
    """uint16 [layers, 2, tokens, heads, dim]."""
    random = np.random.default_rng(seed)
    widths = np.exp(random.normal(size=(layers, 2, 1, heads, dim)))
    means = widths * random.normal(size=widths.shape) * np.array([3.0, 0.3]).reshape(1, 2, 1, 1, 1)
    x = means + widths * random.normal(size=(layers, 2, tokens, heads, dim))
    if rope is not None:
        for layer in range(layers):
            x[layer, 0] = turn(x[layer, 0], start, rope)
    return to_bits(x, dtype)


def values(bits: np.ndarray, dtype: str) -> np.ndarray:
    """float32 of the patterns."""
    return to_float(bits, dtype)  # type: ignore[arg-type]
