"""A kivi4 cache in plain NumPy, of KV that looks like a model's."""

import numpy as np
from kv_samples import ROPE, realistic_kv, values

from prolepsis.coding import RopeSpec
from prolepsis.coding.cache_dtypes import KIVI_RUN, KiviKV


def kivi_kv(
    layers: int = 2,
    tokens: int = 256,
    heads: int = 2,
    dim: int = 32,
    rope: RopeSpec | None = ROPE,
    start: int = 0,
    seed: int = 0,
) -> KiviKV:
    """Each run between its smallest and its largest value."""
    x = values(realistic_kv(layers, tokens, heads, dim, "bf16", rope, start, seed), "bf16")
    cut = x.reshape(layers, 2, tokens // KIVI_RUN, KIVI_RUN, heads, dim)
    k = cut[:, 0].transpose(0, 1, 3, 4, 2)
    v = cut[:, 1].swapaxes(2, 3).reshape(k.shape)
    runs = np.stack([k, v], axis=1)
    low = runs.min(axis=-1).astype(np.float16)
    steps = ((runs.max(axis=-1) - runs.min(axis=-1)) / np.float32(15)).astype(np.float16)
    divisors = np.where(steps > 0, steps, np.inf).astype(np.float32)[..., None]
    codes = np.clip(np.rint((runs - low.astype(np.float32)[..., None]) / divisors), 0, 15).astype(np.uint8)
    return KiviKV(codes[..., :16] | codes[..., 16:] << 4, steps.view(np.uint16), low.view(np.uint16))


def spoil(kv: KiviKV) -> None:
    """Codes that no statistics expect, and steps and minimums that are no numbers, negative or subnormal."""
    kv.codes[0, :, 1, 0, :3] = np.random.default_rng(0).integers(0, 256, (2, 3, 16))
    odd = (0, 0x8000, 0x7C00, 0xFE00, 0xBC00, 0x0001, 0x8001, 0x7BFF)
    kv.steps[0, :, -1, 0, :8] = kv.minimums[0, :, -2, 0, 8:16] = kv.minimums[0, :, -1, 0, :8] = odd
