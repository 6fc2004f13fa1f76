"""Floats rounded to the types of GGUF, each weight by itself."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prolepsis.quant.grid import BlockGrid
from prolepsis.quant.matrix import Form, HeldMatrix
from prolepsis.quant.rtn import rtn
from prolepsis.quantize.layer import STAGES, Layer

Floats = NDArray[np.float32]

_BRAIN_ROUNDING = np.uint32(0x7FFF)


def rounded(kind: str, values: Floats) -> HeldMatrix:
    """float32 [rows, columns] as `kind`. Raises InputError for numbers that are not finite."""
    if kind == "F16":
        return _words(kind, values.astype(np.float16).view(np.uint16))
    if kind == "BF16":
        bits = values.view(np.uint32)
        return _words(kind, (bits + _BRAIN_ROUNDING + (bits >> 16 & np.uint32(1)) >> 16).astype(np.uint16))
    return rtn(values, BlockGrid(kind))


@dataclass
class Rounding:
    """A method for `walk`: every matrix as `kind`. Needs no calibration."""

    kind: str

    def prepare(self, layer: Layer) -> None:
        """Nothing is known beforehand."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""
        return {part: rounded(self.kind, layer.weights[part]) for part in STAGES[stage]}


def _words(kind: str, words: NDArray[np.uint16]) -> HeldMatrix:
    rows, columns = words.shape
    return HeldMatrix((rows, columns), (Form(kind, columns),), (words,))
