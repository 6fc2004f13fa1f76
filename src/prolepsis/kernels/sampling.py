"""Passes over one row of logits, for the sampler: penalties, exponentials, selection, drawing.

Every result is the same bits on every machine: IEEE additions and multiplications in a fixed order, `exp` by a fixed
polynomial, no contraction to FMA, no fast-math, no library call. Vocabulary sizes are below 2^31.
"""

import numpy as np
from numba import njit

NUM_BINS = 2048
"""Bins of `bin_weights`: 32 to an octave, down to 2^-64 (all but one of them); the last takes the rest."""

_BLOCK = 64  # Tokens per partial sum in `draw`.

_LOG2_E = 1.4426950408889634
# ln 2 in two parts (Cody and Waite): the first has 21 trailing zero bits, so n * _LN2_HIGH is exact for |n| <= 1100.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Adding and subtracting 1.5 * 2^52 rounds to an integer, and leaves that integer in the low bits of the sum.
_ROUNDER = 6755399441055744.0
_SMALLEST_EXPONENT = -708.0  # exp of anything lower would be subnormal; it counts as 0.


@njit(inline="always")
def _exp(x):
    """exp(x) of a float64 x <= 0 within 1 ulp (2 near the bottom); exactly 1 at 0, and 0 below -708."""
    shifted = max(x, _SMALLEST_EXPONENT) * _LOG2_E + _ROUNDER
    n = shifted - _ROUNDER
    r = (max(x, _SMALLEST_EXPONENT) - n * _LN2_HIGH) - n * _LN2_LOW
    # Taylor to degree 13: the remainder at |r| <= ln(2) / 2 is below 2^-58.
    p = 1.0 / 6227020800.0
    p = p * r + 1.0 / 479001600.0
    p = p * r + 1.0 / 39916800.0
    p = p * r + 1.0 / 3628800.0
    p = p * r + 1.0 / 362880.0
    p = p * r + 1.0 / 40320.0
    p = p * r + 1.0 / 5040.0
    p = p * r + 1.0 / 720.0
    p = p * r + 1.0 / 120.0
    p = p * r + 1.0 / 24.0
    p = p * r + 1.0 / 6.0
    p = p * r + 0.5
    p = (p * r) * r + r + 1.0
    power = np.int64((np.float64(shifted).view(np.int64) + 1023) << 52).view(np.float64)
    return p * power if x >= _SMALLEST_EXPONENT else 0.0


@njit(cache=True, nogil=True)
def exp_weights(logits, largest, inverse_temperature, weights):
    """weights[i] = exp((logits[i] - largest) * inverse_temperature), so that the largest is exactly 1.

    logits float32 [vocab], finite or -inf; weights float64 [vocab], written.
    """
    for i in range(logits.shape[0]):
        weights[i] = _exp((np.float64(logits[i]) - largest) * inverse_temperature)


@njit(cache=True, nogil=True)
def penalise(logits, seen, output_counts, repetition, presence, frequency, out):
    """Repetition penalty on tokens seen (CTRL, Keskar et al. 2019, section 4.1), then presence and frequency.

    logits, out float32 [vocab] (out is written); seen bool [vocab]; output_counts int32 [vocab]; the others float32.
    """
    for i in range(logits.shape[0]):
        value = logits[i]
        scaled = value / repetition if value > 0 else value * repetition
        value = scaled if seen[i] else value
        count = output_counts[i]
        value -= np.float32(count) * frequency
        out[i] = value - presence if count > 0 else value


@njit(cache=True, nogil=True)
def bin_weights(weights, bins, counts, masses):
    """Sort weights in (0, 1] roughly: a higher weight never lies in a higher bin.

    The bin is the distance of the float's bits from those of 1.0, in units of 1/32 octave. Writes bins uint16 [vocab]
    and, for all but the last bin, adds to counts int64 [NUM_BINS] (tokens) and masses float64 [NUM_BINS] (sum of
    weights), both zeroed by the caller.
    """
    one = np.float64(1.0).view(np.int64)
    for i in range(weights.shape[0]):
        bins[i] = min((one - np.float64(weights[i]).view(np.int64)) >> 47, NUM_BINS - 1)
    for i in range(weights.shape[0]):
        if bins[i] < NUM_BINS - 1:
            counts[bins[i]] += 1
            masses[bins[i]] += weights[i]


@njit(inline="always")
def _sum_range(weights, start, stop):
    """Sum of weights[start:stop] in four interleaved partial sums, so that the additions overlap in the pipeline."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = start + (stop - start) // 4 * 4
    for i in range(start, whole, 4):
        a += weights[i]
        b += weights[i + 1]
        c += weights[i + 2]
        d += weights[i + 3]
    for i in range(whole, stop):
        a += weights[i]
    return (a + b) + (c + d)


@njit(cache=True, nogil=True)
def sum_weights(weights):
    """Sum of float64 weights [vocab], always added in the same order."""
    return _sum_range(weights, 0, weights.shape[0])


@njit(cache=True, nogil=True)
def keep_prefix(weights, lowest, last):
    """Zero, in place, every weight below `lowest`, and those equal to it at an index above `last`."""
    for i in range(weights.shape[0]):
        kept = weights[i] > lowest or (weights[i] == lowest and i <= last)
        weights[i] = weights[i] if kept else 0.0


@njit(inline="always")
def _locate(values, start, stop, running, target):
    """The first i in start .. stop - 1 at which `running` plus the values so far exceeds target, and the sum before i.

    Where rounding lets none exceed it, the last positive value stands in, so a value of 0 is never chosen.
    """
    chosen, before = start, running
    for i in range(start, stop):
        if values[i] > 0.0:
            chosen, before = i, running
            running += values[i]
            if running > target:
                break
    return chosen, before


@njit(cache=True, nogil=True)
def draw(weights, uniform):
    """Inverse-transform sampling: the first index at which the running sum exceeds uniform * (sum of all).

    weights float64 [vocab], not negative, at least one positive; uniform in [0, 1). Never an index of weight 0.
    """
    size = weights.shape[0]
    sums = np.empty((size + _BLOCK - 1) // _BLOCK)
    for block in range(sums.shape[0]):
        sums[block] = _sum_range(weights, block * _BLOCK, min((block + 1) * _BLOCK, size))
    target = uniform * _sum_range(sums, 0, sums.shape[0])
    block, before = _locate(sums, 0, sums.shape[0], 0.0, target)
    token, _ = _locate(weights, block * _BLOCK, min((block + 1) * _BLOCK, size), before, target)
    return token
