"""Numbers as the float16 that kinds of weights have, none of them infinite by rounding."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

LEAST, LARGEST = np.float32(2.0**-24), np.float32(65504)
"""The smallest and the largest positive float16."""

_TOP = 14  # the largest scale becomes one in [2 ** 14, 2 ** 15), so that the small ones stay far from underflow
_LEAST_EXPONENT = -100  # float32 can still say 2 ** exponent


def half(values: Floats) -> NDArray[np.float16]:
    """The nearest float16."""
    return np.clip(values, -LARGEST, LARGEST).astype(np.float16)


def through_half(values: Floats) -> Floats:
    """The nearest float16, as float32."""
    return half(values).astype(np.float32)


def positive_half(values: Floats) -> NDArray[np.float16]:
    """The nearest positive float16."""
    return np.clip(values, LEAST, LARGEST).astype(np.float16)


def half_scales(scales: NDArray[np.floating[Any]]) -> tuple[NDArray[np.float16], int]:
    """float16 values and an exponent: the scales, which may be float16, bfloat16 or float32, are value * 2 ** exponent.

    Exact for all that float16 can say, with exponent 0, and for bfloat16 whose largest and smallest differ by less than
    2 ** 28. Others are rounded to the nearest of 11 bits; float32 scales that a tool did not round itself are. Scales
    that are not finite stay so, for the caller to find.
    """
    top = float(np.max(np.abs(scales), initial=0.0))
    if not np.isfinite(top):
        return np.full(scales.shape, np.nan, np.float16), 0
    with np.errstate(over="ignore"):
        halves = scales.astype(np.float16)
    if (halves == scales).all():
        return halves, 0
    exponent = max(int(np.frexp(top)[1]) - 1 - _TOP, _LEAST_EXPONENT)
    return (np.ldexp(scales.astype(np.float64), -exponent)).astype(np.float16), exponent
