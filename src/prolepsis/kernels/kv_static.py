"""The static predictor: every channel at its mean, K's mean turned by the token's position; and measuring it.

All float32 or float64 without fused or reordered operations: a prediction is the same bits on every machine.
"""

import numpy as np
from numba import njit

from prolepsis.kernels.rans import JIT


@njit(**JIT)
def _rotate(x, cos, sin, half, out):
    """Turn one head's vector x by the angles of one position; channels beyond the turned ones are copied."""
    pairs = cos.size
    for i in range(pairs):
        a = i if half else 2 * i
        b = i + pairs if half else 2 * i + 1
        out[a] = x[a] * cos[i] - x[b] * sin[i]
        out[b] = x[a] * sin[i] + x[b] * cos[i]
    for c in range(2 * pairs, x.size):
        out[c] = x[c]


@njit(**JIT)
def predict_static(means, turned, cos, sin, half, out):
    """out[t, h] = means[h], turned by position t where `turned`.

    means: float32 [heads, dim]. cos, sin: float32 [tokens, pairs]. half: pairs are (i, i + pairs) instead of
    (2 i, 2 i + 1). out: float32 [tokens, heads, dim].
    """
    tokens, heads, dim = out.shape
    for t in range(tokens):
        for h in range(heads):
            if turned:
                _rotate(means[h], cos[t], sin[t], half, out[t, h])
            else:
                for c in range(dim):
                    out[t, h, c] = means[h, c]


@njit(**JIT)
def add_unturned(values, floats, turned, cos, sin, half, sums):
    """Add each channel over the tokens, K turned back to position 0. sums: float64 [heads, dim].

    values: uint16 [tokens, heads, dim]. floats: float32 [65536], the value of every bit pattern. sin: the sines of
    the angles to turn back by, that is negated.
    """
    tokens, heads, dim = values.shape
    x, y = np.empty(dim, np.float32), np.empty(dim, np.float32)
    for t in range(tokens):
        for h in range(heads):
            for c in range(dim):
                x[c] = y[c] = floats[values[t, h, c]]
            if turned:
                _rotate(x, cos[t], sin[t], half, y)
            for c in range(dim):
                sums[h, c] += y[c]


@njit(**JIT)
def add_squared_residuals(values, floats, predictions, sums):
    """Add (value - prediction)**2 of each channel over the tokens. sums: float64 [heads, dim]."""
    tokens, heads, dim = values.shape
    for t in range(tokens):
        for h in range(heads):
            for c in range(dim):
                residual = np.float64(floats[values[t, h, c]]) - predictions[t, h, c]
                sums[h, c] += residual * residual
