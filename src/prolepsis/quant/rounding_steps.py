"""Steps for parts of 16 or 32 columns by which rounding costs least: tried by the range of each, then refined."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.rounding import ERROR, PRODUCTS, SQUARES, SUM, measure
from prolepsis.quant.half import LARGEST, Floats, half

ROUNDS = 4
"""How often steps are fitted to codes and codes to steps."""

_NO_VALUES = np.empty(0, np.int8)

# Shares of a part's range below and above 0 that are tried; and what its largest value may be, of the last code.
_SHRINKS = tuple(np.float32(share) for share in (1, 0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5))
_REACHES = tuple(np.float32(0.7 + 0.02 * i) for i in range(21)) + tuple(np.float32(1.2 + 0.1 * i) for i in range(8))


class Steps(NamedTuple):
    """What codes of each part are worth: step * v - offset. float32 [tiles, parts, lanes]."""

    step: Floats
    offset: Floats


class Fit:
    """The best steps found so far for each part of a chunk, and their sums, [tiles, 4, parts, lanes]."""

    def __init__(self, kind: str, x: Floats, weights: Floats) -> None:
        self.kind, self.x, self.weights = kind, x, weights
        spec = KINDS[kind]
        top = 2**spec.bits - 1
        self.levels = np.array(spec.book or (-spec.bias, top - spec.bias), np.float32)
        self.thresholds = (self.levels[1:] + self.levels[:-1]) / 2 if spec.book else np.empty(0, np.float32)
        parts = x.shape[1] // (spec.part or spec.group)
        split = x.reshape(len(x), parts, -1, LANES)
        self.low, self.high = split.min(axis=2), split.max(axis=2)
        of_columns = weights.reshape(1, parts, -1, 1)
        self.weight_sums = np.broadcast_to(of_columns.sum(axis=2), self.low.shape)
        self.value_sums = (split * of_columns).sum(axis=2)
        none = np.zeros_like(self.low)
        self.steps = Steps(none, none)
        self.sums = self.measured(self.steps)

    def measured(self, steps: Steps) -> Floats:
        """Sums of all parts with these steps."""
        sums = np.empty((len(self.x), 4, *steps.step.shape[1:]), np.float32)
        self._measure(steps, sums, _NO_VALUES)
        return sums

    def _measure(self, steps: Steps, sums: Floats, values: NDArray[np.int8]) -> None:
        step, offset = (np.ascontiguousarray(field, np.float32).reshape(-1) for field in steps)
        flat = (array.reshape(-1) for array in (sums, values))
        measure(sums.shape[2], self.x.reshape(-1), self.weights, step, offset, self.levels, self.thresholds, *flat)

    def codes(self) -> NDArray[np.uint8]:
        """Of the best steps: uint8 [tiles, columns, lanes]."""
        values = np.empty(self.x.shape, np.int8)
        self._measure(self.steps, np.empty_like(self.sums), values)
        if self.thresholds.size:
            return np.searchsorted(self.levels, values).astype(np.uint8)
        return (values - np.int16(self.levels[0])).astype(np.uint8)

    def try_steps(self, step: Floats, offset: Floats) -> None:
        """Keep these where they are better."""
        steps = Steps(step, offset)
        sums = self.measured(steps)
        better = sums[:, ERROR] < self.sums[:, ERROR]
        self.steps = Steps(*(np.where(better, new, old) for new, old in zip(steps, self.steps, strict=True)))
        self.sums = np.where(better[:, None], sums, self.sums)

    def search(self) -> None:
        """Try steps by the parts' ranges, then refine the best. Weights that were quantised before lie on a grid: it is
        found where that many whole steps of ours are a step of theirs."""
        if KINDS[self.kind].minimums:
            for below in _SHRINKS:
                for above in _SHRINKS:
                    self.try_steps(*self._spanning(below * self.low, above * self.high))
            step, offset = self._spanning(self.low, self.high)
            top = int(self.levels[-1])
            for intervals in range(top // 2, top):
                self.try_steps(step * np.float32(top / intervals), offset)
        else:
            extreme = np.where(-self.low > self.high, self.low, self.high)
            for end in self._ends():
                self.try_steps(extreme / end, np.zeros_like(extreme))
        for _ in range(ROUNDS):
            self.try_steps(*self._least_squares())

    def _ends(self) -> list[np.float32]:
        """What the largest value of a part may be in steps."""
        ends = [reach * end for reach in _REACHES for end in (self.levels[0], self.levels[-1])]
        if not self.thresholds.size:
            largest = int(-self.levels[0])
            ends += [np.float32(sign * n) for n in range(largest // 2, largest + 1) for sign in (-1, 1)]
        return ends

    def _spanning(self, low: Floats, high: Floats) -> Steps:
        if KINDS[self.kind].part:
            low = np.minimum(low, 0)
        return Steps(np.maximum(high - low, 0) / self.levels[-1], -low)

    def _least_squares(self) -> Steps:
        """Steps that fit best to the codes as they are."""
        sums = self.sums.astype(np.float64)
        if not KINDS[self.kind].minimums:
            return Steps(ratio(sums[:, PRODUCTS], sums[:, SQUARES]), self.steps.offset)
        step, offset = solved(sums[:, SQUARES], -sums[:, SUM], self.weight_sums, sums[:, PRODUCTS], -self.value_sums)
        if KINDS[self.kind].part:
            alone = ratio(sums[:, PRODUCTS], sums[:, SQUARES])
            step, offset = np.where(offset < 0, alone, step), np.maximum(offset, 0)
        return Steps(step, offset)


def ratio(dividend: NDArray[np.floating], divisor: NDArray[np.floating]) -> Floats:
    return np.divide(dividend, divisor, out=np.zeros_like(dividend), where=divisor != 0).astype(np.float32)


def solved(
    aa: NDArray[np.float64], ab: NDArray[np.float64], bb: NDArray[np.float64], ax: NDArray[np.float64],
    bx: NDArray[np.float64],
) -> tuple[Floats, Floats]:  # fmt: skip
    """The s and t with the least error of s * a + t * b against x, from the sums of products of a, b and x."""
    determinant = aa * bb - ab * ab
    sound = determinant > 1e-9 * aa * bb
    determinant = np.where(sound, determinant, 1)
    s, t = (ax * bb - bx * ab) / determinant, (bx * aa - ax * ab) / determinant
    return np.where(sound, s, ratio(ax, aa)).astype(np.float32), np.where(sound, t, 0).astype(np.float32)


def halves_around(values: Floats) -> list[Floats]:
    """The nearest float16 and those beside it, as float32."""
    nearest = half(values)
    beside = [np.nextafter(nearest, np.float16(to)) for to in (-LARGEST, LARGEST)]
    return [each.astype(np.float32) for each in (nearest, *beside)]
