"""The static predictor: every channel at its mean, K's mean turned by the token's position; and measuring it.

All float32 or float64 without fused or reordered operations: a prediction is the same bits on every machine.
"""

import numpy as np
from numba import njit

from prolepsis.kernels import simd
from prolepsis.kernels.rans import JIT

_load = simd.loader(simd.F32x16)
_firsts, _seconds = simd.shuffler(simd.F32x16, range(0, 32, 2)), simd.shuffler(simd.F32x16, range(1, 32, 2))
_lower = simd.shuffler(simd.F32x16, [i // 2 + 16 * (i % 2) for i in range(16)])
_upper = simd.shuffler(simd.F32x16, [8 + i // 2 + 16 * (i % 2) for i in range(16)])


@njit(inline="always")
def _turned(a, b, cos, sin):
    first = simd.sub_float(simd.mul_float(a, cos), simd.mul_float(b, sin))
    return first, simd.add_float(simd.mul_float(a, sin), simd.mul_float(b, cos))


@njit(inline="always")
def turn_head(x, at, dim, cos, sin, angle, pairs, half, out, to):
    """Turn the head x[at : at + dim] by the angles of one position into out[to :]; all float32, of one dimension.

    The angles are cos[angle : angle + pairs], sin likewise. half: pairs are (i, i + pairs), else (2 i, 2 i + 1).
    Channels beyond the turned ones are copied. No more pairs are turned than the head has, so that nothing beyond it is
    touched.
    """
    pairs = min(pairs, dim // 2)
    whole = pairs - pairs % 16
    for i in range(0, whole, 16):
        c, s = _load(cos, angle + i), _load(sin, angle + i)
        if half:
            a, b = _turned(_load(x, at + i), _load(x, at + pairs + i), c, s)
            simd.store(out, to + i, a)
            simd.store(out, to + pairs + i, b)
        else:
            p, q = _load(x, at + 2 * i), _load(x, at + 2 * i + 16)
            a, b = _turned(_firsts(p, q), _seconds(p, q), c, s)
            simd.store(out, to + 2 * i, _lower(a, b))
            simd.store(out, to + 2 * i + 16, _upper(a, b))
    for i in range(whole, pairs):
        m = i if half else 2 * i
        n = i + pairs if half else 2 * i + 1
        c, s = cos[angle + i], sin[angle + i]
        out[to + m] = x[at + m] * c - x[at + n] * s
        out[to + n] = x[at + m] * s + x[at + n] * c
    if dim > 2 * pairs:
        simd.copy_bytes(out, to + 2 * pairs, x, at + 2 * pairs, 4 * (dim - 2 * pairs))


@njit(**JIT)
def turn_rows(means, cos, sin, half, out):
    """out[t] = means, each head turned by position t (`turn_head`).

    means: float32 [1 or tokens, heads, dim]; one row stands for all. cos, sin: float32 [tokens, pairs]. out: float32
    [tokens, heads, dim].
    """
    tokens, heads, dim = out.shape
    step = heads * dim if means.shape[0] > 1 else 0
    pairs, rows, flat = cos.shape[1], means.reshape(-1), out.reshape(-1)
    cosines, sines = cos.reshape(-1), sin.reshape(-1)
    for t in range(tokens):
        for at in range(0, heads * dim, dim):
            turn_head(rows, t * step + at, dim, cosines, sines, t * pairs, pairs, half, flat, t * heads * dim + at)


@njit(**JIT)
def add_unturned(values, floats, steps, cos, sin, half, sums):
    """Add each channel over the tokens, turned. sums: float64 [heads, dim].

    values: uint16 [tokens, heads, dim]. floats: float32 [65536], the value of every scalar. steps: float32 [tokens,
    heads], what it is multiplied by. cos, sin: float32 [tokens, pairs], of the angles to turn by; of no pairs where
    nothing is turned.
    """
    tokens, heads, dim = values.shape
    x, y = np.empty(dim, np.float32), np.empty(dim, np.float32)
    pairs, cosines, sines = cos.shape[1], cos.reshape(-1), sin.reshape(-1)
    for t in range(tokens):
        for h in range(heads):
            for c in range(dim):
                x[c] = floats[values[t, h, c]] * steps[t, h]
            turn_head(x, 0, dim, cosines, sines, t * pairs, pairs, half, y, 0)
            for c in range(dim):
                sums[h, c] += y[c]


@njit(**JIT)
def add_squared_residuals(values, floats, steps, means, cos, sin, half, sums):
    """Add (value - turned mean)**2 of each channel over the tokens. sums: float64 [heads, dim].

    means: float32 [heads, dim]. The rest as in `add_unturned`.
    """
    tokens, heads, dim = values.shape
    predicted = np.empty(dim, np.float32)
    pairs, flat, cosines, sines = cos.shape[1], means.reshape(-1), cos.reshape(-1), sin.reshape(-1)
    for t in range(tokens):
        for h in range(heads):
            turn_head(flat, h * dim, dim, cosines, sines, t * pairs, pairs, half, predicted, 0)
            for c in range(dim):
                residual = np.float64(floats[values[t, h, c]] * steps[t, h]) - predicted[c]
                sums[h, c] += residual * residual
