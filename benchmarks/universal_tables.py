"""Make src/prolepsis/coding/universal_tables*.xz: token frequencies for caches about which nothing was measured.

Values are bell curves around their prediction whose width differs from token to token (log-normal), with predictions
from far below to far above their scale. Run once; the result is part of the format.
"""

import lzma
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from prolepsis.coding import tables
from prolepsis.coding.cache_dtypes import FORMATS, DType, quantise, to_scalars
from prolepsis.coding.tables import TokenTables
from prolepsis.kernels import kv_streams
from prolepsis.kernels.kv_contexts import CONTEXTS

CHANNELS = 256
TOKENS = 8192
ROUNDS = 24
SPREAD = (0.25, 0.15)  # of the width's logarithm; integers are in steps, which follow the width
SUBNORMAL_OCTAVES, NORMAL_OCTAVES = 6, 8  # of the scales of 8-bit floats, about the smallest normal number


def scales(dtype: DType, random: np.random.Generator) -> np.ndarray:
    """Scales of the channels, as octaves."""
    form = FORMATS[dtype]
    if form.limit:
        return random.uniform(-5, np.log2(form.limit) - 1, CHANNELS)  # a step is the largest value / limit
    if form.bits == 16:
        return random.uniform(-4, 4, CHANNELS)
    smallest = form.exponent_bias + 1 - 127
    return random.uniform(smallest - SUBNORMAL_OCTAVES, smallest + NORMAL_OCTAVES, CHANNELS)


def to_scalar_bits(values: np.ndarray, dtype: DType) -> np.ndarray:
    """The nearest scalars, as uint16."""
    form = FORMATS[dtype]
    if form.limit:
        integers = np.clip(np.rint(values), -form.limit, form.limit).astype(np.int16)
        return (integers ^ (integers >> 15 & 0x7FFF)).view(np.uint16)
    if dtype == "fp16":
        return np.clip(values, -65504, 65504).astype(np.float16).view(np.uint16)
    planes = values.astype(np.float32)[None, None, :, None]
    return to_scalars(quantise(planes, dtype), dtype)[0, 0, :, 0]


def samples(dtype: DType, random: np.random.Generator) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rounds of (scalars, predictions [TOKENS, CHANNELS], scale codes [CHANNELS])."""
    while True:
        octave = scales(dtype, random)
        ratio = 2 ** random.uniform(-6, FORMATS[dtype].mantissa_bits + 6, CHANNELS)
        codes = ((2.0**octave).astype(np.float32).view(np.uint32) + (1 << 19) >> 20).astype(np.int32)
        predictions = (2.0**octave * ratio * random.choice([-1, 1], CHANNELS)).astype(np.float32)
        if limit := FORMATS[dtype].limit:
            predictions = random.uniform(-limit / 2, limit / 2, CHANNELS).astype(np.float32)
        predictions = np.repeat(predictions[None], TOKENS, axis=0)
        width = np.exp(SPREAD[FORMATS[dtype].limit > 0] * random.normal(size=(TOKENS, 1)))
        values = predictions + 2.0**octave * width * random.normal(size=predictions.shape)
        yield to_scalar_bits(values, dtype), predictions, codes


def counted(dtypes: list[DType]) -> np.ndarray:
    """How often each token occurs in each context, in rounds that take turns with the dtypes."""
    random = np.random.default_rng(2026)
    counts = np.zeros((CONTEXTS, 128), np.int64)
    blank = np.full((CONTEXTS, 128), 32, np.uint16)
    rounds = [samples(dtype, random) for dtype in dtypes]
    still, shifts = np.empty(0, np.float32), np.empty(0, np.int32)
    for i in range(ROUNDS):
        turn = i % len(dtypes)
        values, predictions, codes = next(rounds[turn])
        guess = kv_streams.Guess(predictions.reshape(-1), still, still, 0, False, codes, shifts, CHANNELS)
        token_tables = TokenTables(dtypes[turn], blank)
        kv_streams.count_stream(values.reshape(-1), 0, CHANNELS, guess, token_tables.form, token_tables.octaves, counts)
    return counts


def filled(counts: np.ndarray) -> np.ndarray:
    """The same, where a context never seen takes over from the nearest one below it that was."""
    seen = np.maximum.accumulate(np.where(counts.any(axis=1), np.arange(len(counts)), 0))
    return counts[seen]


def main() -> None:
    """Count the tokens of simulated caches of all dtypes, and write the tables."""
    for name in sorted(set(tables.UNIVERSAL_FILES.values())):
        dtypes: list[DType] = [dtype for dtype, file in tables.UNIVERSAL_FILES.items() if file == name]
        counts = counted(dtypes)
        if FORMATS[dtypes[0]].bits < 16:  # the first table is older than this rule
            counts = filled(counts)
        target = Path(tables.__file__).with_name(name)
        target.write_bytes(lzma.compress(tables.normalise(counts).tobytes(), preset=9))
        print(f"{target}: {target.stat().st_size} bytes, {(counts.sum(axis=1) > 0).sum()} of {CONTEXTS} contexts seen")


if __name__ == "__main__":
    main()
