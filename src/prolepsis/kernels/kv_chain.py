"""A layer's channels predicted from each other: the modelling half of the `linear` predictor.

A layer's channels stand in *chain order*, K before V and head after head, in groups of 16. Where RoPE turns K, a group
is 8 pairs, first members before second ones. Everything linear happens before RoPE: a group is predicted from the
layers below and the groups before it, turned by each token's position, coded, turned back, and learned from.

Learning keeps two things of each token. Its *features*, (value - mean) * inverse rounded to int8, which later groups
and the layers above are predicted from; products with them are exact in int32. Its *energy*, the sum of squared errors
in eighths of their expected size, which says whether this token is harder to predict than most.

Float32 without fused or reordered operations, so a prediction is the same bits on every machine.
"""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import simd
from prolepsis.kernels.int8_product import tile_int8_product
from prolepsis.kernels.kv_chain_rows import PAIRS, add_rows, learner, turn_rows
from prolepsis.kernels.rans import JIT

GROUP = 2 * PAIRS
ENERGY_PRIOR = 4  # as if so many channels had erred as expected, before the first
_ERROR_STEPS, _LARGEST_ERROR = 8.0, 1023.0
LARGEST_FEATURE = 127
LARGEST_TOKEN_FEATURE = 127 * 256
_ONE = 127 << 3  # the scale code of 1
_LARGEST_SHIFT = 64
_FARTHEST = 512.0  # beyond every integer of a quantised cache
_ROUNDING = 12582912.0  # 1.5 * 2**23: adding it to a small float32 puts the nearest integer into the low bits
_ROUNDING_BITS = 0x4B400000

learn_rows = learner(LARGEST_FEATURE, _ERROR_STEPS, _LARGEST_ERROR)

_f32, _i8, _i32, _i64, _u32 = np.float32, np.int8, np.int32, np.int64, np.uint32


class ChainTables(NamedTuple):
    """What is known of one layer's channels, in chain order.

    order: int32, a channel's place in a token's row of K or V. pairs: int32 [groups], the first pair that RoPE turns,
    or -1. weights: uint8, for group g the tile (`int8_product.pack`) of its 16 g columns; steps: float32, what a
    product is multiplied by. means, inverses: float32, of the features. errors: float32, one over the expected error.
    codes: int32, the expected error as coded (`kv_tokens.classify`), of both channels of a turned pair alike.
    """

    order: NDArray[np.int32]
    pairs: NDArray[np.int32]
    weights: NDArray[np.uint8]
    steps: NDArray[np.float32]
    means: NDArray[np.float32]
    inverses: NDArray[np.float32]
    errors: NDArray[np.float32]
    codes: NDArray[np.int32]


class ChainWork(NamedTuple):
    """A layer of a segment while it is coded; rows are tokens.

    base: float32 [tokens, channels], the prediction from the layers below, before RoPE. cos, sin: float32 [tokens,
    pairs]. features: int8 [tokens, channels]; sums: int32 [tokens], of the features so far; energy: int64 [tokens].
    units: float32 [heads of K, then V, tokens], the quantisation step of each token's head, infinite where there is no
    sensible one; unit_shifts: int32 of the same shape, what to add to scale codes for it. No heads where values are
    floats. Of the group at hand: guesses float32 [tokens, 16], its prediction before RoPE; products int32 [tokens, 16].
    """

    base: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    features: NDArray[np.int8]
    sums: NDArray[np.int32]
    energy: NDArray[np.int64]
    units: NDArray[np.float32]
    unit_shifts: NDArray[np.int32]
    guesses: NDArray[np.float32]
    products: NDArray[np.int32]


@njit(**JIT)
def add_products(x, sums, weights, steps, products, out):
    """out[t, o] += steps[o] * (x @ weights^T)[t, o], rounded twice.

    x: int8 [tokens, columns]. sums: int32 [tokens]. weights: uint8 (`int8_product.pack`). steps: float32 [outputs].
    products: int32 [tokens, 16], overwritten. out: float32 [tokens, outputs].
    """
    tokens, columns = x.shape
    channels = out.shape[1]
    for first in range(0, channels, GROUP):
        tile_int8_product(weights, first * columns, columns, x, columns, sums, tokens, products)
        add_rows(out, first, channels, steps, products, out, first, channels, tokens)


@njit(**JIT)
def token_features(rows, means, inverses, epsilon, high, low):
    """16-bit features of embeddings, as the bytes of which high is rounded: feature = 256 high + low.

    A row is divided by the root of its mean square + epsilon, as RMSNorm does. rows: float32 [tokens, hidden]. high,
    low: int8 [tokens, columns], columns at least hidden.
    """
    tokens, hidden = rows.shape
    for t in range(tokens):
        square = 0.0
        for i in range(hidden):
            square += np.float64(rows[t, i]) * np.float64(rows[t, i])
        norm = math.sqrt(square / hidden + np.float64(epsilon))
        for i in range(hidden):
            x = _f32(np.float64(rows[t, i]) / norm)
            feature = _rounded((x - means[i]) * inverses[i], _f32(LARGEST_TOKEN_FEATURE))
            upper = (feature + _i32(128)) >> _i32(8)
            high[t, i], low[t, i] = _i8(upper), _i8(feature - (upper << _i32(8)))


@njit(inline="always")
def _rounded(x, limit):
    """The nearest integer within -limit ... limit, to even; -limit for NaN."""
    bounded = x if x > -limit else -limit
    bounded = bounded if bounded < limit else limit
    return _i32(_f32(bounded + _f32(_ROUNDING)).view(_i32) - _i32(_ROUNDING_BITS))


@njit(**JIT)
def predict_group(g, tables, work, predictions, shifts):
    """Predict group g from base, features and energy.

    Writes predictions: float32 [tokens * 16 or more], in steps where values are integers; and shifts: int32 [tokens],
    eighths of an octave to add to the scale codes.
    """
    first, tokens, channels = GROUP * g, len(work.base), work.features.shape[1]
    offset = GROUP * GROUP * g * (g - 1) // 2
    tile_int8_product(tables.weights, offset, first, work.features, channels, work.sums, tokens, work.products)
    add_rows(work.base, first, channels, tables.steps, work.products, work.guesses, 0, GROUP, tokens)
    pair = tables.pairs[g]
    if pair >= 0:
        turn_rows(work.guesses, work.cos, work.sin, pair, work.cos.shape[1], 0, predictions, tokens)
    else:
        simd.copy_bytes(predictions, 0, work.guesses, 0, 4 * GROUP * tokens)
    _judge(g, work, shifts)
    if len(work.units) > 0:
        head = g * len(work.units) // len(tables.pairs)
        _to_units(work.units[head], work.unit_shifts[head], predictions, shifts)


@njit(**JIT)
def _to_units(units, unit_shifts, predictions, shifts):
    for t in range(len(units)):
        shifts[t] += unit_shifts[t]
        for j in range(GROUP):
            unit = _f32(predictions[t * GROUP + j] / units[t])
            predictions[t * GROUP + j] = min(max(unit, _f32(-_FARTHEST)), _f32(_FARTHEST))


@njit(**JIT)
def _judge(g, work, shifts):
    """How much wider than expected a token's errors are, by those so far."""
    energy = work.energy
    expected = _f32(_ERROR_STEPS * _ERROR_STEPS * (GROUP * g + ENERGY_PRIOR))
    prior = _i64(_ERROR_STEPS * _ERROR_STEPS * ENERGY_PRIOR)
    for t in range(len(energy)):
        ratio = _f32(_f32(energy[t] + prior) / expected)
        code = (_i32(ratio.view(_i32)) + _i32(1 << 19)) >> _i32(20)
        shift = (code - _i32(_ONE) + _i32(1)) >> _i32(1)  # of a root: half as many octaves
        shifts[t] = min(max(shift, -_LARGEST_SHIFT), _LARGEST_SHIFT)


@njit(**JIT)
def learn_group(g, tables, work, values):
    """Take in group g's true values, float32 [tokens * 16 or more], which are turned back in place."""
    pair, tokens = tables.pairs[g], len(work.base)
    if pair >= 0:
        turn_rows(values, work.cos, work.sin, pair, work.cos.shape[1], 1, values, tokens)
    learn_rows(
        values, work.guesses, tables.means, tables.inverses, tables.errors, GROUP * g, work.features.shape[1],
        work.features, work.sums, work.energy, tokens,
    )  # fmt: skip
