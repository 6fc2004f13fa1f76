"""How many bits K and V would take under the residual model that was published with speculative KV coding.

It is a mixture of a tight and a wide bell curve about the prediction and of the values' own distribution.

Ours in detail: the curves' deviations are each channel's own, the weights each head's, fitted to calibration text by
expectation and maximisation; the own distribution is a histogram of the head's values there, in bins of an eighth of an
octave (8-bit floats: single values). A value's probability is that of the interval which is rounded to it, so that
those of all values sum to 1, and the bits are what no coder with this model can go below.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import FORMATS, DType, moderate_values, to_float
from prolepsis.coding.threads import for_each
from prolepsis.errors import InputError
from prolepsis.kernels.mixture import add_code_lengths, expect_maximise, narrow_curves

Scalars = NDArray[np.uint16]
Floats = NDArray[np.float32]

_STEPS = 8  # of expectation and maximisation: further ones gain less than 0.01 bits
_FIT_TOKENS = 512  # that a fit looks at, spread evenly
_FIRST_WEIGHTS = (0.9, 0.09, 0.01)
_WIDER = 4.0  # how many times the tight deviation the wide one starts with
_BULK = 0.68  # of the values are within the tight deviation that the fit starts with
_LEAST = 1e-6  # of the values' root mean square, for deviations
_TINY = 1e-30


class Mixture(NamedTuple):
    """The model of one layer, all float64.

    tight, wide: standard deviations [2 (K, V), kv_heads, head_dim]. weights: [2, kv_heads, 3], of the tight curve, the
    wide one and the histogram. histogram: [2, kv_heads, bins], as `kernels.mixture` has it.
    """

    dtype: DType
    tight: NDArray[np.float64]
    wide: NDArray[np.float64]
    weights: NDArray[np.float64]
    histogram: NDArray[np.float64]

    @classmethod
    def fitted(cls, scalars: Scalars, means: Floats, dtype: DType) -> "Mixture":
        """To one layer of a calibration text: uint16 and float32 [2, tokens, kv_heads, head_dim].

        Raises:
            InputError: a dtype of integers.
        """
        edges = interval_edges(dtype)
        values = moderate_values(dtype)[scalars]
        sparse = (slice(None), slice(None, None, -(-scalars.shape[1] // _FIT_TOKENS)))
        least = _LEAST * np.sqrt((values.astype(np.float64) ** 2).mean(axis=(1, 3))) + _TINY
        errors = np.abs(values[sparse] - means[sparse])
        tight = np.maximum(np.quantile(errors, _BULK, axis=1).astype(np.float64), least[..., None])
        weights = np.tile(_FIRST_WEIGHTS, (*tight.shape[:2], 1))
        mixture = cls(dtype, tight, _WIDER * tight, weights, _histograms(scalars, dtype))
        parts = np.ascontiguousarray(scalars[sparse]), np.ascontiguousarray(means[sparse])

        def fit(i: int) -> None:
            at = divmod(i, tight.shape[1])
            narrow_curves(*_of_head(parts, at), *mixture._head(at), _shift(dtype), edges, least[at])
            for _ in range(_STEPS):
                expect_maximise(*_of_head(parts, at), *mixture._head(at), _shift(dtype), edges, least[at])

        for_each(2 * tight.shape[1], fit)
        return mixture

    def code_lengths(self, scalars: Scalars, means: Floats) -> NDArray[np.float64]:
        """Bits of each token's K and V in this layer, float64 [2, tokens]. scalars, means: as `fitted` takes them."""
        heads = self.tight.shape[1]
        bits = np.zeros((2 * heads, scalars.shape[1]))
        edges, parts = interval_edges(self.dtype), (np.ascontiguousarray(scalars), np.ascontiguousarray(means))

        def add(i: int) -> None:
            at = divmod(i, heads)
            add_code_lengths(*_of_head(parts, at), *self._head(at), _shift(self.dtype), edges, bits[i])

        for_each(len(bits), add)
        return bits.reshape(2, heads, -1).sum(axis=1)

    def _head(self, at: tuple[int, int]) -> tuple[NDArray[np.float64], ...]:
        return self.tight[at], self.wide[at], self.weights[at], self.histogram[at]


@cache
def interval_edges(dtype: DType) -> NDArray[np.float64]:
    """Where each magnitude's rounding interval begins, and after the last where it ends: float64 [magnitudes + 1].

    NaN has none: it begins and ends at infinity.

    Raises:
        InputError: a dtype of integers, whose intervals are not the same for all tokens.
    """
    form = FORMATS[dtype]
    if form.limit:
        raise InputError(f"rates under the mixture are estimated for floats, not for {dtype}")
    with np.errstate(invalid="ignore"):  # signalling NaN
        sizes = to_float(np.arange(form.largest + 1, dtype=np.uint16), dtype).astype(np.float64)
    finite = sizes[np.isfinite(sizes)]
    edges = np.full(form.largest + 2, np.inf)
    edges[0] = 0
    edges[1 : len(finite)] = (finite[1:] + finite[:-1]) / 2
    if np.isinf(sizes[len(finite)]):  # what is larger than the largest number by half a step is infinity
        edges[len(finite)] = finite[-1] + (finite[-1] - finite[-2]) / 2
    return edges


def _shift(dtype: DType) -> int:
    """Log2 of the magnitudes in a bin of the histogram."""
    form = FORMATS[dtype]
    return form.mantissa_bits - 3 if form.bits == 16 else 0


def _histograms(scalars: Scalars, dtype: DType) -> NDArray[np.float64]:
    """The probability of one value in each bin, where each has been seen once more than it was."""
    shift, half = _shift(dtype), (FORMATS[dtype].largest + 1) >> _shift(dtype)
    bins = (scalars & 0x7FFF) >> shift
    bins += (scalars >> 15) * np.uint16(half)
    out = np.empty((scalars.shape[0], scalars.shape[2], 2 * half))
    for kind, head in np.ndindex(*out.shape[:2]):
        counts = 1 + np.bincount(bins[kind, :, head].reshape(-1), minlength=2 * half)
        out[kind, head] = counts / (counts.sum() << shift)
    return out


def _of_head(parts: tuple[Scalars, Floats], at: tuple[int, int]) -> tuple[Scalars, Floats]:
    kind, head = at
    return parts[0][kind, :, head], parts[1][kind, :, head]
