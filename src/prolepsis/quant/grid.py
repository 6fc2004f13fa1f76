"""Grids: which numbers a quantiser may choose from, found for one group of columns at a time.

Everything here is held by columns, float32 [columns, rows], as GPTQ goes through a matrix: a group is some whole
columns, and a `Steps` says what its codes are worth in each row.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.cells import CELL
from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.half import Floats as Floats
from prolepsis.quant.half import half, positive_half

SHRINKS = tuple(1 - 0.025 * i for i in range(1, 21))
"""Shares of a group's range that a search tries besides all of it."""


class Steps(NamedTuple):
    """What the codes of a group are worth: `scales * (code - zeros) + minimums`, where zeros may be a kind's bias.

    scales, minimums: float16 [rows], times 2 ** exponent; zeros: uint8 [rows]. Absent parts are None.
    """

    scales: NDArray[np.float16]
    zeros: NDArray[np.uint8] | None = None
    minimums: NDArray[np.float16] | None = None
    exponent: int = 0


class Grid(Protocol):
    """kind: a name of `KINDS`; group: columns that share a scale, 0 for all."""

    @property
    def kind(self) -> str: ...

    @property
    def group(self) -> int: ...

    def fit(self, values: Floats, metric: Floats | None = None) -> Steps:
        """Steps for the columns `values`. metric, for grids that search: what an error of each column weighs,
        float32 [columns], or of each pair of columns, [columns, columns]; by default all weigh the same.
        """
        ...


def nearest(kind: str, steps: Steps, values: Floats) -> tuple[NDArray[np.uint8], Floats]:
    """Codes of the numbers nearest to `values` [..., rows], and those numbers."""
    scales = np.ldexp(steps.scales.astype(np.float32), steps.exponent)
    if steps.minimums is not None:
        offset = steps.minimums.astype(np.float32)
    else:
        offset = -scales * (np.float32(KINDS[kind].bias) if steps.zeros is None else steps.zeros.astype(np.float32))
    exact = np.rint((values - offset) / scales)
    np.clip(exact, 0, 2 ** KINDS[kind].bits - 1, out=exact)
    return exact.astype(np.uint8), exact * scales + offset


def errors(kind: str, steps: Steps, values: Floats, metric: Floats | None) -> Floats:
    """Weighted squared error of rounding `values`, float32 [rows]."""
    missed = nearest(kind, steps, values)[1] - values
    if metric is None:
        return np.einsum("cr,cr->r", missed, missed)
    if metric.ndim == 1:
        return metric @ (missed * missed)
    return np.einsum("cr,cr->r", missed, metric @ missed)


@dataclass(frozen=True)
class IntegerGrid:
    """The grid of GPTQ and AWQ: a scale and a zero point for each group, 2 ** (bits - 1) where `symmetric`.

    bits: 2 to 8 with a kind; search: look for the range with the least error, not only the one that holds all values.
    """

    bits: int
    group: int = 128
    symmetric: bool = True
    search: bool = False

    @property
    def kind(self) -> str:
        return f"INT{self.bits}"

    def fit(self, values: Floats, metric: Floats | None = None) -> Steps:
        low = np.minimum(values.min(axis=0), 0)
        high = np.maximum(values.max(axis=0), 0)
        if self.symmetric:
            high = np.maximum(-low, high)
            low = -high
        if not self.search:
            return self._steps(low, high)
        return searched(self.kind, values, metric, [self._steps(low * p, high * p) for p in (1.0, *SHRINKS)])

    def _steps(self, low: Floats, high: Floats) -> Steps:
        top = np.float32(2**self.bits - 1)
        scales = positive_half((high - low) / top)
        if self.symmetric:
            return Steps(scales, np.full(len(low), 2 ** (self.bits - 1), np.uint8))
        zeros = np.clip(np.rint(-low / scales.astype(np.float32)), 0, top)
        return Steps(scales, zeros.astype(np.uint8))


@dataclass(frozen=True)
class BlockGrid:
    """The grid of a GGUF kind with one scale for 32 columns: Q4_0, Q4_1, Q5_0, Q5_1 or Q8_0."""

    kind: str
    search: bool = False
    group: int = CELL

    def fit(self, values: Floats, metric: Floats | None = None) -> Steps:
        shares = (1.0, *SHRINKS) if self.search else (1.0,)
        return searched(self.kind, values, metric, [self._steps(values, np.float32(share)) for share in shares])

    def _steps(self, values: Floats, share: np.float32) -> Steps:
        kind = KINDS[self.kind]
        if kind.minimums:
            low, high = values.min(axis=0) * share, values.max(axis=0) * share
            return Steps(positive_half((high - low) / np.float32(2**kind.bits - 1)), minimums=half(low))
        if kind.bits == 8:
            return Steps(positive_half(np.abs(values).max(axis=0) * share / np.float32(127)))
        # One more code lies below zero than above: the scale's sign puts it on the side of the largest value.
        largest = np.take_along_axis(values, np.abs(values).argmax(axis=0)[None], axis=0)[0]
        scales = positive_half(np.abs(largest) * share / np.float32(kind.bias))
        return Steps(np.where(largest > 0, -scales, scales))


def searched(kind: str, values: Floats, metric: Floats | None, choices: list[Steps]) -> Steps:
    """Of `choices`, the one with the least error in each row. Exponents are those of the first."""
    if len(choices) == 1:
        return choices[0]
    best = np.argmin([errors(kind, steps, values, metric) for steps in choices], axis=0)

    def picked(fields: list[NDArray[Any] | None]) -> NDArray[Any] | None:
        present = [field for field in fields if field is not None]
        return np.stack(present)[best, np.arange(len(best))] if present else None

    scales = picked([steps.scales for steps in choices])
    assert scales is not None
    zeros, minimums = picked([steps.zeros for steps in choices]), picked([steps.minimums for steps in choices])
    return Steps(scales, zeros, minimums, choices[0].exponent)
