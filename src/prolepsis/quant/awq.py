"""AWQ: columns that meet large activations are scaled up before they are rounded, and their inputs down.

Lin et al. 2023, arXiv:2306.00978, section 3.2. The error of a product is taken from X^T X, which is the same number as
the error over all activations.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from prolepsis.quant.grid import Grid
from prolepsis.quant.input_statistics import InputStatistics, output_error
from prolepsis.quant.matrix import whole
from prolepsis.quant.rtn import rtn

EXPONENTS = tuple(i / 20 for i in range(20))
_NOTHING = 1e-30


def channel_scales(
    weights: Sequence[NDArray[np.float32]],
    statistics: InputStatistics,
    grid: Grid,
    shared: NDArray[np.intp] | None = None,
) -> NDArray[np.float32]:
    """What to multiply the columns of `weights` by, which have one input: float32 [columns].

    The mean magnitudes of the input to the power of that one of `EXPONENTS` with the least error of the products,
    each in units of what plain rounding loses of it.
    The input is to be divided by the same. shared: int [columns], columns with the same number get the same scale, that
    of their mean magnitude.
    """
    magnitudes = statistics.mean_magnitude.astype(np.float64)
    if shared is not None:
        magnitudes = (np.bincount(shared, magnitudes) / np.bincount(shared))[shared]
    hessian = statistics.hessian
    candidates = [_normalised(magnitudes, exponent) for exponent in EXPONENTS]
    found = np.array([[_error(weight, scales, hessian, grid) for weight in weights] for scales in candidates])
    # The first exponent is plain rounding: what each product loses is counted in units of that.
    return candidates[int((found / np.maximum(found[0], _NOTHING)).sum(axis=1).argmin())]


def _normalised(magnitudes: NDArray[np.float64], exponent: float) -> NDArray[np.float32]:
    scales = np.maximum(magnitudes**exponent, 1e-4)
    return (scales / np.sqrt(scales.max() * scales.min())).astype(np.float32)


def _error(weight: NDArray[np.float32], scales: NDArray[np.float32], hessian: NDArray[np.float64], grid: Grid) -> float:
    return output_error(weight, whole(rtn(weight * scales, grid)) / scales, hessian)
