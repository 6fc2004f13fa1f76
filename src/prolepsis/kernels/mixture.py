"""How likely a cached value is under two bell curves about its prediction and a histogram.

Each is taken over the interval that is rounded to the value. For estimates of ideal rates: the last bits depend on the
machine's `erfc` and `exp`.

All kernels take the values of one head, uint16 scalars [tokens, channels], and their predictions, float32 likewise.
tight, wide: float64 [channels], standard deviations. weights: float64 [3], of the two curves and of the histogram.
histogram: float64 [2 * bins], the probability of one value in each bin of `1 << shift` magnitudes, positive ones first.
edges: float64 [magnitudes + 1], where the interval of each magnitude begins; that of the next is where it ends.
"""

import math

import numpy as np
from numba import njit

from prolepsis.kernels.rans import JIT

_NARROW = 1e-4  # deviations: a narrower interval's probability is its width times the density in its middle
_ROOT_HALF = math.sqrt(0.5)
_DENSITY = 1 / math.sqrt(2 * math.pi)
_CERTAIN = 1e-300  # of probability: what is less likely teaches nothing about a curve


@njit(**JIT)
def between(a, b, width):
    """The standard normal curve's probability between a and b, which are `width` apart; exact in both tails."""
    if width < _NARROW:
        middle = 0.5 * (a + b)
        return width * _DENSITY * math.exp(-0.5 * middle * middle)
    if a > 0:
        a, b = -b, -a
    if b > 0:
        return 1 - 0.5 * (math.erfc(-a * _ROOT_HALF) + math.erfc(b * _ROOT_HALF))
    return 0.5 * (math.erfc(-b * _ROOT_HALF) - math.erfc(-a * _ROOT_HALF))


@njit(inline="always")
def _interval(value, edges):
    """What is rounded to a scalar; of NaN, nothing at infinity."""
    magnitude = value & 0x7FFF
    if value & 0x8000:
        return -edges[magnitude + 1], -edges[magnitude]
    return edges[magnitude], edges[magnitude + 1]


@njit(inline="always")
def _bin(value, shift, bins):
    return (bins if value & 0x8000 else 0) + ((value & 0x7FFF) >> shift)


@njit(inline="always")
def _curve(low, high, mean, deviation):
    """The probability of an interval; of an empty one at infinity, 0."""
    if not low < high:
        return 0.0
    return between((low - mean) / deviation, (high - mean) / deviation, (high - low) / deviation)


@njit(inline="always")
def _code_length(value, mean, tight, wide, weights, rest, edges):
    low, high = _interval(value, edges)
    middle = np.float64(mean)
    curves = weights[0] * _curve(low, high, middle, tight) + weights[1] * _curve(low, high, middle, wide)
    return -math.log2(curves + rest)


@njit(**JIT)
def add_code_lengths(values, means, tight, wide, weights, histogram, shift, edges, bits):
    """Add to bits, float64 [tokens], what the values of each token cost."""
    tokens, channels = values.shape
    bins = histogram.size // 2
    for t in range(tokens):
        total = 0.0
        for c in range(channels):
            rest = weights[2] * histogram[_bin(values[t, c], shift, bins)]
            total += _code_length(values[t, c], means[t, c], tight[c], wide[c], weights, rest, edges)
        bits[t] += total


@njit(**JIT)
def narrow_curves(values, means, tight, wide, weights, histogram, shift, edges, least):
    """Divide both deviations of each channel by 4 for as long as its values cost less then, and tight >= least.

    Where errors are small against the intervals, `expect_maximise` would take many steps to find that out.
    """
    tokens, channels = values.shape
    bins = histogram.size // 2
    for c in range(channels):
        factor, best = 1.0, np.inf
        while tight[c] * factor >= least:
            cost = 0.0
            for t in range(tokens):
                rest = weights[2] * histogram[_bin(values[t, c], shift, bins)]
                cost += _code_length(
                    values[t, c], means[t, c], tight[c] * factor, wide[c] * factor, weights, rest, edges
                )
            if cost >= best:
                break
            best = cost
            factor *= 0.25
        factor = min(1.0, 4 * factor)
        tight[c] *= factor
        wide[c] *= factor


@njit(inline="always")
def _edge_term(x):
    return 0.0 if math.isinf(x) else x * _DENSITY * math.exp(-0.5 * x * x)


@njit(inline="always")
def _second_moment(low, high, mean, deviation, probability):
    """Mean of (x - mean)**2 over the part of a curve within an interval that has this probability."""
    a, b = (low - mean) / deviation, (high - mean) / deviation
    if b - a < _NARROW:
        return (0.5 * (low + high) - mean) ** 2
    return deviation * deviation * max(0.0, 1 + (_edge_term(a) - _edge_term(b)) / probability)


@njit(**JIT)
def expect_maximise(values, means, tight, wide, weights, histogram, shift, edges, least):
    """One step of expectation and maximisation: better tight, wide and weights, in place; deviations at least `least`.

    The likelihood is that of the rounded values (Dempster, Laird and Rubin 1977, with interval data).
    """
    tokens, channels = values.shape
    bins, shares = histogram.size // 2, np.zeros(3)
    for c in range(channels):
        seen, squares = np.zeros(2), np.zeros(2)
        for t in range(tokens):
            value, mean = values[t, c], np.float64(means[t, c])
            low, high = _interval(value, edges)
            first, second = _curve(low, high, mean, tight[c]), _curve(low, high, mean, wide[c])
            rest = weights[2] * histogram[_bin(value, shift, bins)]
            likely = weights[0] * first + weights[1] * second + rest
            shares[2] += rest / likely
            if first > _CERTAIN:
                share = weights[0] * first / likely
                seen[0] += share
                squares[0] += share * _second_moment(low, high, mean, tight[c], first)
            if second > _CERTAIN:
                share = weights[1] * second / likely
                seen[1] += share
                squares[1] += share * _second_moment(low, high, mean, wide[c], second)
        if seen[0] > 0:
            tight[c] = max(math.sqrt(squares[0] / seen[0]), least)
        if seen[1] > 0:
            wide[c] = max(math.sqrt(squares[1] / seen[1]), least)
        shares[:2] += seen
    weights[:] = shares / shares.sum()
