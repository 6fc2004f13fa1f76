"""The grid of EXL2 (ExLlamaV2): in a group, all rows share a float16, of which each has a share of 4 bits."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prolepsis.quant.exl2_layout import SCALE_UNIT
from prolepsis.quant.grid import IntegerGrid, Steps, searched
from prolepsis.quant.half import Floats

_EXPONENT = -8
"""Scales are held as what (code + 1) ** 2 times the shared float16 is: 256 times too large."""
_LEAST, _MOST = 2.0**-14, 255.0
"""Of the shared float16: the first has all its bits, and 256 times the second is a float16, too."""
_TOP = 15


@dataclass(frozen=True)
class ProductGrid:
    """Scales (code + 1) ** 2 / 256 * most, without zero points. In each group some row's code is 15, so that
    `scale_factors` finds codes and `most` again.
    """

    bits: int
    group: int = 128

    @property
    def kind(self) -> str:
        return f"INT{self.bits}"

    def fit(self, values: Floats, metric: Floats | None = None) -> Steps:
        """See `Grid.fit`. The best scale of each row by itself, then the best of the codes around it."""
        wanted = IntegerGrid(self.bits, self.group, search=True).fit(values, metric).scales.astype(np.float32)
        most = np.clip(wanted.max(), _LEAST, _MOST).astype(np.float16).astype(np.float32)
        around = np.rint(np.sqrt(wanted / most * SCALE_UNIT)) - 1
        choices = [self._steps(around + move, most) for move in (0, -1, 1)]
        found = searched(self.kind, values, metric, choices)
        largest = int(wanted.argmax())
        found.scales[largest] = self._steps(np.full(1, _TOP, np.float32), most).scales[0]
        return found

    def _steps(self, codes: Floats, most: np.float32) -> Steps:
        scales = ((np.clip(codes, 0, _TOP) + 1) ** 2 * most).astype(np.float16)
        return Steps(scales, np.full(len(scales), 1 << self.bits - 1, np.uint8), exponent=_EXPONENT)


def scale_factors(scales: NDArray[np.float16]) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """The 4-bit codes [rows, groups] and the shared float16 [groups] of a `ProductGrid`'s scales [rows, groups]."""
    most = scales.max(axis=0)
    shares = scales.astype(np.float32) / most.astype(np.float32)
    codes = np.rint(np.sqrt(shares * SCALE_UNIT)) - 1
    return codes.astype(np.uint8), (most.astype(np.float32) / SCALE_UNIT).astype(np.float16)
