"""Token tables: how likely each token is in each context, in 4096ths."""

import lzma
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import FORMATS, DType
from prolepsis.kernels import kv_contexts, kv_tokens, rans

SHAPE = (kv_contexts.CONTEXTS, rans.ALPHABET)
_FEW = 256  # tokens seen in a context below which the universal table counts as well
UNIVERSAL_FILES: dict[DType, str] = {
    "bf16": "universal_tables.xz",
    "fp16": "universal_tables.xz",
    "fp8_e4m3": "universal_tables_fp8_e4m3.xz",
    "fp8_e5m2": "universal_tables_fp8_e5m2.xz",
    "int8": "universal_tables_int.xz",
    "int4": "universal_tables_int.xz",
    "kivi4": "universal_tables_int.xz",
}


class TokenTables:
    """Everything the kernels look up for one dtype and one set of frequencies (uint16 [contexts, 128])."""

    def __init__(self, dtype: DType, frequencies: NDArray[np.uint16]) -> None:
        form = FORMATS[dtype]
        self.frequencies = frequencies
        self.form = kv_contexts.form_of(form.mantissa_bits, form.exponent_bias, form.limit)
        mantissa_bits = int(self.form[0])
        self.octaves = kv_tokens.octave_starts(mantissa_bits)
        self.bins = kv_tokens.token_bins(mantissa_bits)

    @cached_property
    def decode(self) -> NDArray[np.uint32]:
        """See `rans.decode_table`."""
        return rans.decode_table(self.frequencies)

    @cached_property
    def encode(self) -> NDArray[np.uint32]:
        """See `rans.encode_table`."""
        return rans.encode_table(self.frequencies)

    def code_length(self, counts: NDArray[np.int64]) -> float:
        """Bits that the tokens counted in `counts` take, raw bits included, without any overhead.

        counts: int64 [contexts, 128].
        """
        possible = self.frequencies > 0
        coded = np.where(possible, counts, 0)
        coded[:, kv_tokens.ESCAPE] += np.where(possible, 0, counts).sum(axis=1)
        bits = rans.PROBABILITY_BITS - np.log2(np.maximum(self.frequencies, 1))
        return float((coded * (bits + kv_tokens.raw_bits(self.bins))).sum())


def is_valid(frequencies: NDArray[np.uint16]) -> bool:
    """Every context sums to one and can escape."""
    total = frequencies.sum(axis=1, dtype=np.int64)
    return bool((total == rans.PROBABILITY_ONE).all() and (frequencies[:, kv_tokens.ESCAPE] > 0).all())


def fit(counts: NDArray[np.int64], dtype: DType) -> NDArray[np.uint16]:
    """Frequencies for counted tokens; contexts hardly seen lean on the universal tables."""
    few = counts.sum(axis=1) < _FEW
    return normalise(np.where(few[:, None], counts + universal(dtype), counts))


def normalise(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Counts [contexts, 128] scaled to sum to 4096; what was seen, and the escape, keep at least 1."""
    counts = counts.copy()
    counts[:, kv_tokens.ESCAPE] += counts.sum(axis=1) == 0
    total = counts.sum(axis=1, keepdims=True)
    shares = (2 * counts * rans.PROBABILITY_ONE + total) // (2 * total)
    shares = np.maximum(shares, counts > 0)
    shares[:, kv_tokens.ESCAPE] = np.maximum(shares[:, kv_tokens.ESCAPE], 1)
    shares[np.arange(len(shares)), shares.argmax(axis=1)] += rans.PROBABILITY_ONE - shares.sum(axis=1)
    return shares.astype(np.uint16)


@cache
def universal_tables(dtype: DType) -> TokenTables:
    """The built-in tables, ready to code with; made once, since they take longer than a small file."""
    return TokenTables(dtype, universal(dtype))


def universal(dtype: DType) -> NDArray[np.uint16]:
    """The built-in tables: fitted to bell curves of varying width, for any model (benchmarks/universal_tables.py)."""
    return _read(UNIVERSAL_FILES[dtype])


@cache
def _read(name: str) -> NDArray[np.uint16]:
    packed = files(__package__).joinpath(name).read_bytes()
    return np.frombuffer(lzma.decompress(packed), "<u2").astype(np.uint16).reshape(SHAPE)
