"""Floats rounded to the types of GGUF, with the activations' statistics where there are any."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from prolepsis.quant.matrix import Form, HeldMatrix
from prolepsis.quant.rounding import rounded_codes
from prolepsis.quantize.layer import STAGES, Layer
from prolepsis.quantize.methods import statistics_of

Floats = NDArray[np.float32]

_BRAIN_ROUNDING = np.uint32(0x7FFF)


def rounded(kind: str, values: Floats, importance: Floats | None = None) -> HeldMatrix:
    """float32 [rows, columns] as `kind`. importance: of columns, see `rounded_codes`, where the kind has codes.

    Raises InputError for numbers that are not finite.
    """
    if kind == "F16":
        return _words(kind, values.astype(np.float16).view(np.uint16))
    if kind == "BF16":
        bits = values.view(np.uint32)
        return _words(kind, (bits + _BRAIN_ROUNDING + (bits >> 16 & np.uint32(1)) >> 16).astype(np.uint16))
    form = Form(kind, values.shape[1])
    return HeldMatrix((len(values), form.columns), (form,), (rounded_codes(kind, values, importance),))


@dataclass
class Rounding:
    """A method for `walk`: every matrix as `kind`. Calibrated, errors count by the mean square of their input."""

    kind: str

    def prepare(self, layer: Layer) -> None:
        """Statistics are taken stage by stage."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""
        importance = None
        if layer.hidden is not None:
            columns = layer.weights[STAGES[stage][0]].shape[1]
            importance = statistics_of(layer.inputs(stage), columns).mean_square
        return {part: rounded(self.kind, layer.weights[part], importance) for part in STAGES[stage]}


def _words(kind: str, words: NDArray[np.uint16]) -> HeldMatrix:
    rows, columns = words.shape
    return HeldMatrix((rows, columns), (Form(kind, columns),), (words,))
