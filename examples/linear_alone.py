"""Calibrate the `linear` predictor on KV of any engine, without this one, and code more of it with what was learned.

python examples/linear_alone.py
"""

import numpy as np

from prolepsis.coding import decode, encode
from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.calibration import CalibrationSample, calibrate_linear
from prolepsis.coding.predictors import Segment

LAYERS, KV_HEADS, HEAD_DIM, STATE = 4, 2, 32, 48


def main() -> None:
    """Two texts to learn from, one to code. In real life the arrays come out of an engine's cache."""
    with CalibrationSample(Geometry("fp16", LAYERS, KV_HEADS, HEAD_DIM), None, tokens=2048) as sample:
        for seed in (1, 2):
            bits = example_cache(1024, seed).view(np.uint16)
            for first in range(0, 1024, 256):
                sample.add(Segment(first, 256), bits[:, :, first : first + 256])
        profile = calibrate_linear(sample)
    kv = example_cache(600, seed=3)
    plain, predicted = encode(kv), encode(kv, profile=profile)
    print(f"raw {kv.nbytes} bytes, coded {len(plain)}, with the profile {len(predicted)}")
    same = bool(np.array_equal(decode(predicted, profile=profile), kv.view(np.uint16)))
    print(f"every bit restored: {same}")


def example_cache(tokens: int, seed: int) -> np.ndarray:
    """float16 values such as a model makes: each layer's K and V are measurements of a state that changes slowly."""
    maps, random = np.random.default_rng(0), np.random.default_rng(seed)
    state = random.normal(size=(tokens, STATE))
    layers = []
    for _ in range(LAYERS):
        measured = state @ maps.normal(size=(STATE, 2 * KV_HEADS * HEAD_DIM))
        layers.append(measured.reshape(tokens, 2, KV_HEADS, HEAD_DIM).transpose(1, 0, 2, 3))
        state = state + 0.3 * random.normal(size=state.shape)
    return np.stack(layers).astype(np.float16)


if __name__ == "__main__":
    main()
