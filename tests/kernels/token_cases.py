"""What is said of scalars, without a prediction behind it."""

import numpy as np

from prolepsis.kernels import kv_values, simd
from prolepsis.kernels.kv_contexts import SLACK

READERS = [kv_values.read_scalar] + [kv_values.read_avx512] * simd.AVX512


def scene(random: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(contexts, centres, scalars): residuals from nothing to everything."""
    contexts = random.integers(0, 72, n + SLACK).astype(np.uint8)
    centres = random.integers(0, 1 << 16, n + SLACK).astype(np.uint16)
    near_by = (centres + random.integers(-300, 300, n + SLACK)) ^ random.choice([0, 0x8000], n + SLACK)
    wild = random.integers(0, 1 << 16, n + SLACK)
    scalars = np.where(random.random(n + SLACK) < 0.5, near_by, wild) & 0xFFFF
    kept = random.random(n + SLACK) < 0.2
    return contexts, centres, np.where(kept, centres, scalars).astype(np.uint16)
