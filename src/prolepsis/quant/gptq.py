"""GPTQ: columns are rounded one after the other, and the rest makes up for each one's error.

Frantar et al. 2022, arXiv:2210.17323, algorithm 1. The inverse Hessian's Cholesky factor comes from a factor of the
Hessian itself, taken from the other end: H = R R^T with R upper triangular, so H^-1 = U^T U with U = R^-1. That takes
one factorisation and no inverse of a full matrix.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.quant.grid import Steps, nearest
from prolepsis.quant.matrix import HeldMatrix
from prolepsis.quant.rtn import Span, check, held

_BLOCK = 128  # columns whose errors reach the columns behind them in one product
_SMALL = 256  # triangular matrices up to this size are inverted whole
_ATTEMPTS = 5  # each with ten times the dampening
_LEAST_DAMPING = 1e-4  # where the first attempt, which may have none, failed


class Factor(NamedTuple):
    """What rounding one column does to the columns behind it.

    upper: float32 [columns, columns], U above. order: int32 [columns], which column is the i-th; None: the i-th is.
    """

    upper: NDArray[np.float32]
    order: NDArray[np.int32] | None


def factorised(hessian: NDArray[np.float64], act_order: bool, damping: float, name: str) -> Factor:
    """Prepare the Hessian of a product's input, [columns, columns], for all matrices that have it.

    act_order: the columns that weigh most come first; damping: added to the diagonal, as a share of its mean, and more
    where that is not enough. Raises InputError with `name` where no dampening helps.
    """
    weighs = np.diagonal(hessian)
    order = np.argsort(-weighs, kind="stable").astype(np.int32) if act_order else None
    ordered = hessian if order is None else hessian[np.ix_(order, order)]
    # A column that no token used has no say in the others.
    unused = np.diagonal(ordered) == 0
    mean = weighs.mean() or 1.0
    shares = [damping, *(max(damping, _LEAST_DAMPING) * 10.0**i for i in range(1, _ATTEMPTS))]
    for share in shares:
        damped = ordered + np.diag(mean * share + unused * mean)
        try:
            upper = np.linalg.cholesky(damped[::-1, ::-1])[::-1, ::-1]
        except np.linalg.LinAlgError:
            continue
        inverse = _upper_inverse(upper)
        if np.isfinite(inverse).all():
            return Factor(inverse.astype(np.float32), order)
    raise InputError(
        f"{name}: the statistics of its input cannot be factorised, even with dampening "
        f"{shares[-1]:g}; calibrate with other or longer texts"
    )


def gptq(weight: NDArray[np.float32], factor: Factor, spans: Sequence[Span], name: str = "the matrix") -> HeldMatrix:
    """Round float32 [rows, columns] so that its products with the calibration's activations change least.

    spans: the grids of the columns in the order of `factor`. Groups are of columns in that order, and a group's scales
    are found when it is reached, on weights that make up for all before. Raises InputError as `rtn`.
    """
    check(weight, spans, name)
    order, columns = factor.order, weight.shape[1]
    values = np.ascontiguousarray((weight if order is None else weight[:, order]).T)
    codes, steps, begin = np.empty(values.shape, np.uint8), [], 0
    for span in spans:
        found: list[Steps] = []
        for group in range(begin, begin + span.columns, span.group):
            end = min(group + span.group, begin + span.columns)
            weighs = np.diagonal(factor.upper)[group:end] ** -2.0
            found.append(span.grid.fit(values[group:end], weighs))
            for block in range(group, end, _BLOCK):
                part = slice(block, min(block + _BLOCK, end))
                _round_block(values, codes, part, factor.upper, span.grid.kind, found[-1])
        steps.append(found)
        begin += span.columns
    assert begin == columns
    return held(codes, spans, steps, order)


def _round_block(
    values: NDArray[np.float32],
    codes: NDArray[np.uint8],
    part: slice,
    upper: NDArray[np.float32],
    kind: str,
    steps: Steps,
) -> None:
    """Round the columns `part` of `values` [columns, rows] and pass their errors on to all columns behind them."""
    block, within = values[part], upper[part, part]
    missed = np.empty_like(block)
    room = np.empty_like(block)
    for i, column in enumerate(block):
        codes[part.start + i], rounded = nearest(kind, steps, column)
        np.divide(column - rounded, within[i, i], out=missed[i])
        behind = np.multiply.outer(within[i, i + 1 :], missed[i], out=room[i + 1 :])
        block[i + 1 :] -= behind
    values[part.stop :] -= upper[part, part.stop :].T @ missed


def _upper_inverse(matrix: NDArray[np.floating]) -> NDArray[np.floating]:
    """The inverse of an upper triangular matrix, by halves."""
    size = len(matrix)
    if size <= _SMALL:
        return np.triu(np.linalg.inv(matrix))
    half = size // 2
    out = np.zeros_like(matrix)
    out[:half, :half] = first = _upper_inverse(matrix[:half, :half])
    out[half:, half:] = second = _upper_inverse(matrix[half:, half:])
    out[:half, half:] = -first @ matrix[:half, half:] @ second
    return out
