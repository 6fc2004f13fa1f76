"""Cosines and sines of rotary position embeddings, bit-identical on every machine.

The cache holds K after rotation, and the codec predicts it by rotating a mean, so encoder and decoder need the very
same tables wherever they run. Library `cos`, `sin` and `pow` differ between systems in the last bit; here everything
is made of IEEE +, -, *, / and rint in float64, one rounding each, and of Python's `decimal`.

Source: RoFormer (Su et al. 2021, arXiv:2104.09864), equation 15.
"""

from collections.abc import Sequence
from decimal import Context, Decimal
from math import factorial

import numpy as np
from numpy.typing import NDArray

# pi/2 in two parts (Cody and Waite): the first has 33 bits, so k * HIGH is exact for |k| < 2**20.
_HALF_PI_HIGH = float.fromhex("0x1.921fb544p+0")
_HALF_PI_LOW = float.fromhex("0x1.0b4611a626331p-34")
_TWO_OVER_PI = float.fromhex("0x1.45f306dc9c883p-1")

# Taylor coefficients for |r| <= pi/4: the first term left out is below 1e-16.
_SIN = [(-1) ** k / factorial(2 * k + 1) for k in range(8)]
_COS = [(-1) ** k / factorial(2 * k) for k in range(9)]

_BLOCK = 1 << 15  # elements worked on at a time: the temporaries stay in the L2 cache


def inv_freq(theta: float, dim: int, factors: Sequence[float] | None = None) -> NDArray[np.float64]:
    """Angle per position of each rotated pair: theta ** (-2 i / dim) / factors[i], float64 [dim / 2].

    `factors` divides single frequencies (Llama 3 scaling, the `rope_freqs` tensor of a GGUF; a constant is linear
    scaling). Each value is correctly rounded.
    """
    exact = Context(prec=50)
    base, width = Decimal(theta), Decimal(dim)
    divisors = [1.0] * (dim // 2) if factors is None else [float(f) for f in factors]
    if len(divisors) != dim // 2:
        raise ValueError(f"{len(divisors)} frequency factors for {dim // 2} rotated pairs")
    powers = [exact.power(base, exact.divide(Decimal(-2 * i), width)) for i in range(dim // 2)]
    return np.array([float(exact.divide(p, Decimal(d))) for p, d in zip(powers, divisors, strict=True)])


def rope_table(
    positions: NDArray[np.int64], inv_freq: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """(cos, sin) of positions[:, None] * inv_freq, each float32 [n, d / 2].

    Error below 1e-9 before the final rounding to float32, for positions up to 1,000,000 and inv_freq up to 1.
    """
    shape = (len(positions), len(inv_freq))
    cos, sin = np.empty(shape, np.float32), np.empty(shape, np.float32)
    rows = max(1, _BLOCK // max(1, shape[1]))
    for start in range(0, shape[0], rows):
        part = slice(start, start + rows)
        angle = positions[part, None].astype(np.float64) * inv_freq
        cos[part], sin[part] = _cos_sin(angle)
    return cos, sin


def _cos_sin(angle: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    turns = np.rint(angle * _TWO_OVER_PI)
    r = (angle - turns * _HALF_PI_HIGH) - turns * _HALF_PI_LOW
    square = r * r
    c, s = _horner(_COS, square), r * _horner(_SIN, square)
    quadrant = turns.astype(np.int64) & 3
    swap = (quadrant & 1).astype(bool)
    cos, sin = np.where(swap, s, c), np.where(swap, c, s)
    return np.where((quadrant == 1) | (quadrant == 2), -cos, cos), np.where(quadrant >= 2, -sin, sin)


def _horner(coefficients: list[float], x: NDArray[np.float64]) -> NDArray[np.float64]:
    total = np.full_like(x, coefficients[-1])
    for c in reversed(coefficients[:-1]):
        total = total * x + c
    return total
