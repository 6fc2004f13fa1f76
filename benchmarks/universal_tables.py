"""Make src/prolepsis/coding/universal_tables.xz: token frequencies for caches about which nothing was measured.

Values are bell curves around their prediction whose width differs from token to token (log-normal, a tenth to a
third), with predictions from far below to far above their scale. Run once; the result is part of the format.
"""

import lzma
from pathlib import Path

import numpy as np

from prolepsis.coding import tables
from prolepsis.coding.floats import FORMATS
from prolepsis.coding.tables import TokenTables
from prolepsis.kernels import kv_streams
from prolepsis.kernels.kv_tokens import CONTEXTS

CHANNELS = 256
TOKENS = 8192
ROUNDS = 24


def to_bits(values: np.ndarray, dtype: str) -> np.ndarray:
    """The nearest bf16 or fp16."""
    if dtype == "fp16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def main() -> None:
    """Count the tokens of simulated caches of both dtypes, and write the table."""
    random = np.random.default_rng(2026)
    counts = np.zeros((CONTEXTS, 128), np.int64)
    blank = np.full((CONTEXTS, 128), 32, np.uint16)
    for i in range(ROUNDS):
        dtype = ("bf16", "fp16")[i % 2]
        token_tables = TokenTables(dtype, blank)
        octave = random.uniform(-4, 4, CHANNELS)
        ratio = 2 ** random.uniform(-6, FORMATS[dtype].mantissa_bits + 6, CHANNELS)
        codes = ((2.0**octave).astype(np.float32).view(np.uint32) + (1 << 19) >> 20).astype(np.int32)
        predictions = (2.0**octave * ratio * random.choice([-1, 1], CHANNELS)).astype(np.float32)
        predictions = np.repeat(predictions[None], TOKENS, axis=0)
        width = np.exp(0.25 * random.normal(size=(TOKENS, 1)))
        values = to_bits(predictions + 2.0**octave * width * random.normal(size=predictions.shape), dtype)
        form, octaves = token_tables.form, token_tables.octaves
        kv_streams.count_stream(values, predictions.view(np.uint32), codes, form, octaves, counts)
    frequencies = tables.normalise(counts)
    target = Path(tables.__file__).with_name("universal_tables.xz")
    target.write_bytes(lzma.compress(frequencies.tobytes(), preset=9))
    print(f"{target}: {target.stat().st_size} bytes, {(counts.sum(axis=1) > 0).sum()} of {CONTEXTS} contexts seen")


if __name__ == "__main__":
    main()
