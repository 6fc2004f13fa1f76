"""Steps of superblocks: whole numbers of each part times a float16 of all."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.rounding import ERROR, PRODUCTS, SQUARES, SUM
from prolepsis.quant.half import LEAST, Floats, through_half
from prolepsis.quant.rounding_steps import ROUNDS, Fit, Steps, ratio, solved

FACTORS = {
    "Q2_K": (0, 15), "Q3_K": (-32, 31), "Q4_K": (0, 63), "Q5_K": (0, 63), "Q6_K": (-128, 127), "IQ4_XS": (-32, 31),
}  # fmt: skip
"""The whole numbers that a part's step, and minimum, can be multiplied by."""

# Multiples of the smallest scale within whose reach all steps are; and neighbours of a part's two whole numbers.
_FIRST = tuple(np.float32(1 + 0.04 * i) for i in range(-2, 3))
_BESIDE = ((-1, 0), (1, 0))
_AROUND = tuple((more, less) for more in (-1, 0, 1) for less in (-1, 0, 1) if more or less)


class Factors(NamedTuple):
    """Steps of superblocks: float16 numbers of each, float32 [tiles, blocks, lanes], and the whole numbers of each part
    that they are multiplied by, [tiles, parts, lanes]."""

    scale: Floats
    minimum: Floats
    step: Floats
    offset: Floats


class Superblocks:
    """The search for scales that are a whole number times a float16 of the superblock."""

    def __init__(self, fit: Fit) -> None:
        self.fit = fit
        self.blocks = fit.x.shape[1] // KINDS[fit.kind].group
        self.minimums = KINDS[fit.kind].minimums
        self.least, self.most = FACTORS[fit.kind]
        none = np.zeros((len(fit.x), self.blocks, LANES), np.float32)
        self.best = Factors(none, none, np.zeros_like(fit.low), np.zeros_like(fit.low))
        self.error = np.full(none.shape, np.inf, np.float32)

    def search(self) -> None:
        """Leave the best factors in `best`."""
        for scale, minimum in self._first_scales():
            factors = self._nearest(_some(scale), _some(minimum))
            self._keep(factors, self.fit.measured(self.steps(factors)))
        factors = self.best
        for _ in range(ROUNDS):
            factors, sums = self._neighbouring(factors)
            self._keep(factors, sums)
            factors = self._refitted(factors, sums)

    def _keep(self, factors: Factors, sums: Floats) -> None:
        """Where they are better than the best so far."""
        error = self._totals(sums[:, ERROR])
        better = error < self.error
        self.error = np.where(better, error, self.error)
        self.best = Factors(*map(self._chosen(better), factors, self.best))

    def steps(self, factors: Factors) -> Steps:
        return Steps(self._spread(factors.scale) * factors.step, self._spread(factors.minimum) * factors.offset)

    def _spread(self, values: NDArray[Any]) -> NDArray[Any]:
        """[tiles, blocks, lanes] to [tiles, parts, lanes]."""
        return np.repeat(values, self.fit.low.shape[1] // self.blocks, axis=1)

    def _in_blocks(self, values: Floats) -> Floats:
        return values.reshape(len(values), self.blocks, -1, LANES)

    def _totals(self, values: NDArray[Any]) -> NDArray[Any]:
        return self._in_blocks(values).sum(axis=2)

    def _chosen(self, better: NDArray[np.bool_]) -> Callable[[Floats, Floats], Floats]:
        def choose(new: Floats, old: Floats) -> Floats:
            return np.where(better if new.shape == better.shape else self._spread(better), new, old)

        return choose

    def _first_scales(self) -> list[tuple[Floats, Floats]]:
        """Numbers of superblocks by which the largest steps of their parts are within reach."""
        step, offset = map(self._in_blocks, self.fit.steps)
        if self.minimums:
            scale, minimum = step.max(axis=2) / self.most, offset.max(axis=2) / self.most
            return [(scale * a, minimum * b) for a in _FIRST for b in _FIRST]
        low, high = step.min(axis=2), step.max(axis=2)
        extreme = np.where(-low > high, low, high)
        return [(extreme / end * a, np.zeros_like(extreme)) for end in (self.least, self.most) for a in _FIRST]

    def _nearest(self, scale: Floats, minimum: Floats) -> Factors:
        """The whole numbers that give about the steps of `fit`."""
        step, offset = self.fit.steps
        return Factors(
            scale, minimum, self._whole(ratio(step, self._spread(scale))),
            self._whole(ratio(offset, self._spread(minimum))),
        )  # fmt: skip

    def _whole(self, values: Floats) -> Floats:
        return np.clip(np.rint(values), self.least, self.most)

    def _neighbouring(self, factors: Factors) -> tuple[Factors, Floats]:
        """The best of the whole numbers and those beside them for each part, and its sums."""
        best = self.fit.measured(self.steps(factors))
        step, offset = factors.step, factors.offset
        for more, less in _AROUND if self.minimums else _BESIDE:
            tried = factors._replace(step=self._whole(factors.step + more), offset=self._whole(factors.offset + less))
            sums = self.fit.measured(self.steps(tried))
            better = sums[:, ERROR] < best[:, ERROR]
            best = np.where(better[:, None], sums, best)
            step, offset = np.where(better, tried.step, step), np.where(better, tried.offset, offset)
        return factors._replace(step=step, offset=offset), best

    def _refitted(self, factors: Factors, sums: Floats) -> Factors:
        """The float16 that fit best to the codes and whole numbers as they are."""
        step, offset = factors.step.astype(np.float64), factors.offset.astype(np.float64)
        squares, products = (self._totals(a) for a in (step * step * sums[:, SQUARES], step * sums[:, PRODUCTS]))
        if not self.minimums:
            return factors._replace(scale=through_half(ratio(products, squares)))
        scale, minimum = solved(
            squares,
            -self._totals(step * offset * sums[:, SUM]),
            self._totals(offset * offset * self.fit.weight_sums),
            products,
            -self._totals(offset * self.fit.value_sums),
        )
        return factors._replace(scale=through_half(np.maximum(scale, 0)), minimum=through_half(np.maximum(minimum, 0)))


def _some(values: Floats) -> Floats:
    """Rounded to float16, but to none that is 0 where the value is not."""
    return through_half(np.where(np.abs(values) < LEAST, np.sign(values) * LEAST, values))
