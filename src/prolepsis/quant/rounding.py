"""Quantisers of GGUF kinds: float weights to the codes with (about) the least weighted squared error.

An error counts by its column's importance, the mean square of what the column is multiplied by, as llama.cpp's i-matrix
has it; by default all count the same. For each part (16 or 32 columns) many steps are tried; the best is refined by
least squares: the step (and minimum) that fits best to the codes, the codes nearest to that, and so on. In superblocks
steps become whole numbers times a float16; these, too, are found by trying the neighbours of each whole number and by
least squares for the float16.

Same results on every machine: sums go by columns, one row a lane (`kernels.rounding`).
"""

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import LANES
from prolepsis.quant.half import Floats, through_half
from prolepsis.quant.matrix import Codes
from prolepsis.quant.rounding_steps import Fit, Steps, halves_around
from prolepsis.quant.rounding_superblocks import FACTORS, Superblocks

_CHUNK = 1 << 18  # weights at a time: what stays in a core's cache
_TOO_LARGE = 500_000  # about what codes of four bits times a float16 reach

ROUNDED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "IQ4_NL", *FACTORS)
"""Kinds that `rounded_codes` makes."""


def rounded_codes(kind: str, values: Floats, importance: Floats | None = None, name: str = "a matrix") -> Codes:
    """Codes of one of `ROUNDED` for `values`, float32 [rows, columns], whole blocks of the kind.

    importance: float32 [columns], not negative. name: what errors call the values. Raises InputError for numbers that
    are not finite or too large.
    """
    rows, columns = values.shape
    if columns % KINDS[kind].group:
        raise ValueError(f"{columns} columns are not whole blocks of {kind}")
    weights = _weights(name, columns, importance)
    step = max(1, _CHUNK // (columns * LANES)) * LANES
    return _joined([_chunk(name, kind, values[start : start + step], weights) for start in range(0, rows, step)])


def _weights(name: str, columns: int, importance: Floats | None) -> Floats:
    """What errors count, float32 [columns]: 1 on average, nowhere 0."""
    if importance is None:
        return np.ones(columns, np.float32)
    if importance.shape != (columns,) or not (np.isfinite(importance) & (importance >= 0)).all():
        raise InputError(f"{name}: importance must be {columns} finite numbers that are not negative")
    mean = importance.mean(dtype=np.float64)
    if not mean:
        return np.ones(columns, np.float32)
    return np.maximum(importance / mean, 1e-5).astype(np.float32)


def _joined(chunks: list[Codes]) -> Codes:
    return Codes(
        *(None if arrays[0] is None else np.concatenate(arrays) for arrays in zip(*chunks, strict=True))  # type: ignore[arg-type]
    )


def _chunk(name: str, kind: str, values: Floats, weights: Floats) -> Codes:
    if not (np.abs(values) < _TOO_LARGE).all():
        raise InputError(f"{name} holds numbers that are not finite or not below {_TOO_LARGE:,}, beyond {kind}")
    rows, columns = values.shape
    x = np.zeros((-(-rows // LANES) * LANES, columns), np.float32)
    x[:rows] = values
    x = np.ascontiguousarray(x.reshape(-1, LANES, columns).transpose(0, 2, 1))
    fit = Fit(kind, x, weights)
    codes = _in_superblocks(fit) if KINDS[kind].part else _alone(fit)
    return Codes(*(None if array is None else _by_rows(array)[:rows] for array in codes))  # type: ignore[arg-type]


def _by_rows(array: NDArray[np.generic]) -> NDArray[np.generic]:
    """[tiles, n, lanes] as [rows, n]."""
    return np.ascontiguousarray(array.transpose(0, 2, 1)).reshape(-1, array.shape[1])


def _alone(fit: Fit) -> Codes:
    """Kinds of one scale, and minimum, for 32 columns: both float16."""
    fit.search()
    step, offset = fit.steps
    fit.steps = Steps(through_half(step), through_half(offset))
    fit.sums = fit.measured(fit.steps)
    for each in halves_around(step):
        for least in halves_around(offset) if KINDS[fit.kind].minimums else [offset]:
            fit.try_steps(each, least)
    codes = fit.codes()
    minimums = -fit.steps.offset.astype(np.float16) if KINDS[fit.kind].minimums else None
    return Codes(codes, fit.steps.step.astype(np.float16), minimums)


def _in_superblocks(fit: Fit) -> Codes:
    """Kinds whose steps are a whole number of the part times a float16 of the superblock."""
    fit.search()
    search = Superblocks(fit)
    search.search()
    best = search.best
    fit.steps = search.steps(best)
    return Codes(
        fit.codes(),
        best.scale.astype(np.float16),
        best.minimum.astype(np.float16) if search.minimums else None,
        parts=best.step.astype(np.int8),
        part_minimums=best.offset.astype(np.uint8) if search.minimums else None,
    )
