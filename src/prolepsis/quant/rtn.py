"""Round to nearest: each weight by itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.kernels.cells import CELL
from prolepsis.kernels.kinds import FREE, KINDS
from prolepsis.quant.grid import Grid, Steps, nearest
from prolepsis.quant.matrix import Codes, Form, HeldMatrix


class Span(NamedTuple):
    """Some columns of a matrix, side by side, that are rounded to one grid. columns: a multiple of 32."""

    columns: int
    grid: Grid

    @property
    def group(self) -> int:
        """Columns that share a scale; the last group may have fewer."""
        return min(self.grid.group or self.columns, self.columns)


def rtn(weight: NDArray[np.float32], grid: Grid, metric: NDArray[np.float32] | None = None) -> HeldMatrix:
    """Round float32 [rows, columns] to the nearest numbers of `grid`.

    metric: float32 [columns, columns] for a grid that searches, what errors of two columns weigh together: X^T X of the
    activations. Raises InputError for numbers that are not finite and for columns that are not a multiple of 32.
    """
    rows, columns = weight.shape
    span = Span(columns, grid)
    check(weight, [span], "the matrix")
    codes, steps = np.empty((columns, rows), np.uint8), []
    values = np.ascontiguousarray(weight.T)
    for begin in range(0, columns, span.group):
        part = slice(begin, begin + span.group)
        steps.append(grid.fit(values[part], None if metric is None else metric[part, part]))
        codes[part] = nearest(grid.kind, steps[-1], values[part])[0]
    return held(codes, [span], [steps])


def check(weight: NDArray[np.float32], spans: Sequence[Span], name: str) -> None:
    """Raises InputError for a matrix that cannot be rounded to `spans`, by `name`."""
    if weight.shape[1] != sum(span.columns for span in spans) or any(span.columns % CELL for span in spans):
        raise InputError(f"{name} has {weight.shape[1]} columns; only multiples of {CELL} can be quantised")
    if any(span.group % CELL for span in spans):
        raise InputError(f"{name}: the group size must be a multiple of {CELL}, or 0 for whole rows")
    if not np.isfinite(weight).all():
        raise InputError(f"{name} holds numbers that are not finite; the model is damaged")


def held(
    codes: NDArray[np.uint8],
    spans: Sequence[Span],
    steps: Sequence[Sequence[Steps]],
    order: NDArray[np.int32] | None = None,
) -> HeldMatrix:
    """The matrix of `codes` uint8 [columns, rows], whose groups in each span have `steps`."""
    forms, parts, begin = [], [], 0
    for span, found in zip(spans, steps, strict=True):
        scales = np.stack([each.scales for each in found], axis=1)
        zeros = _side_by_side([each.zeros for each in found])
        minimums = _side_by_side([each.minimums for each in found])
        group = span.group if KINDS[span.grid.kind].group == FREE else 0
        forms.append(Form(span.grid.kind, span.columns, group, found[0].exponent))
        block = np.ascontiguousarray(codes[begin : begin + span.columns].T)
        parts.append(Codes(block, scales, minimums, zeros))
        begin += span.columns
    return HeldMatrix((codes.shape[1], begin), tuple(forms), tuple(parts), order)


def _side_by_side(fields: list[NDArray[Any] | None]) -> NDArray[Any] | None:
    present = [field for field in fields if field is not None]
    return np.stack(present, axis=1) if present else None
