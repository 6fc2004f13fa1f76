"""Token tables: how likely each token is in each context, in 4096ths."""

import lzma
from functools import cache, cached_property
from importlib.resources import files

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.floats import FORMATS, DType
from prolepsis.kernels import kv_tokens, rans

SHAPE = (kv_tokens.CONTEXTS, rans.ALPHABET)
_FEW = 256  # tokens seen in a context below which the universal table counts as well


class TokenTables:
    """Everything the kernels look up for one dtype and one set of frequencies (uint16 [contexts, 128])."""

    def __init__(self, dtype: DType, frequencies: NDArray[np.uint16]) -> None:
        form = FORMATS[dtype]
        self.frequencies = frequencies
        self.form = np.array([form.mantissa_bits, form.exponent_bias], np.int32)
        self.octaves = kv_tokens.octave_starts(form.mantissa_bits)
        self.layout = kv_tokens.token_layout(form.mantissa_bits)

    @cached_property
    def decode(self) -> NDArray[np.uint32]:
        """See `rans.decode_table`."""
        return rans.decode_table(self.frequencies)

    @cached_property
    def encode(self) -> tuple[NDArray[np.uint32], NDArray[np.uint64]]:
        """See `rans.encode_table`."""
        return rans.encode_table(self.frequencies)


def is_valid(frequencies: NDArray[np.uint16]) -> bool:
    """Every context sums to one and can escape."""
    total = frequencies.sum(axis=1, dtype=np.int64)
    return bool((total == rans.PROBABILITY_ONE).all() and (frequencies[:, kv_tokens.ESCAPE] > 0).all())


def fit(counts: NDArray[np.int64]) -> NDArray[np.uint16]:
    """Frequencies for counted tokens; contexts hardly seen lean on the universal tables."""
    few = counts.sum(axis=1) < _FEW
    return normalise(np.where(few[:, None], counts + universal(), counts))


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
def universal() -> NDArray[np.uint16]:
    """The built-in tables: fitted to bell curves of varying width, for any model (benchmarks/universal_tables.py)."""
    packed = files(__package__).joinpath("universal_tables.xz").read_bytes()
    return np.frombuffer(lzma.decompress(packed), np.uint16).reshape(SHAPE).copy()
