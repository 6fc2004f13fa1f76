"""Floats rounded to the types of GGUF, with the activations' statistics where there are any."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.quant.matrix import Form, HeldMatrix
from prolepsis.quant.rounding import rounded_codes
from prolepsis.quantize.layer import STAGES, Layer, tensor_name
from prolepsis.quantize.methods import statistics_of

Floats = NDArray[np.float32]

_LARGEST = {"F16": 65520.0, "BF16": (2 - 2.0**-8) * 2.0**127}
"""Kinds without codes: from there on numbers are rounded to infinity."""
_BRAIN_ROUNDING = np.uint32(0x7FFF)


def rounded_matrix(name: str, kind: str, values: Floats, importance: Floats | None = None) -> HeldMatrix:
    """float32 [rows, columns] as `kind`. importance: of columns, see `rounded_codes`, where the kind has codes.

    Raises InputError, which names the tensor, for numbers that are not finite or too large for the kind.
    """
    if kind in _LARGEST:
        return _words(name, kind, values)
    form = Form(kind, values.shape[1])
    return HeldMatrix((len(values), form.columns), (form,), (rounded_codes(kind, values, importance, name),))


@dataclass
class Rounding:
    """A method for `walk`: every matrix as `kind`. Errors count by the mean square of what a column is multiplied by:
    `importance`, float32 [columns] by canonical name, or else what the calibration has."""

    kind: str
    importance: Mapping[str, Floats] = field(default_factory=dict)

    def prepare(self, layer: Layer) -> None:
        """Statistics are taken stage by stage."""

    def quantise(self, layer: Layer, stage: int) -> dict[str, HeldMatrix]:
        """See `Method`."""
        known = None
        if layer.hidden is not None:
            columns = layer.weights[STAGES[stage][0]].shape[1]
            known = statistics_of(layer.inputs(stage), columns).mean_square
        names = {part: tensor_name(layer.index, part) for part in STAGES[stage]}
        return {
            part: rounded_matrix(name, self.kind, layer.weights[part], self.importance.get(name, known))
            for part, name in names.items()
        }


def _words(name: str, kind: str, values: Floats) -> HeldMatrix:
    rows, columns = values.shape
    if not (np.abs(values) < _LARGEST[kind]).all():
        raise InputError(
            f"{name} holds numbers that are not finite or beyond {kind}; choose another --type, if the model is sound"
        )
    if kind == "F16":
        words = values.astype(np.float16).view(np.uint16)
    else:
        bits = values.view(np.uint32)
        words = (bits + _BRAIN_ROUNDING + (bits >> 16 & np.uint32(1)) >> 16).astype(np.uint16)
    return HeldMatrix((rows, columns), (Form(kind, columns),), (words,))
