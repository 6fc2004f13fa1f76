"""Predictors of KV: each is a point on the curve of size against cost, and all are used the same way."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """Consecutive positions: those of a segment."""

    start: int
    count: int


class Prediction(NamedTuple):
    """What a predictor says about some layers of a segment.

    means: float32 [layers, 2 (K, V), tokens, kv_heads, head_dim], finite. scales: int32 [layers, 2, kv_heads,
    head_dim], the expected error of each channel as a code of `profile.scale_codes`.
    """

    means: NDArray[np.float32]
    scales: NDArray[np.int32]


class Predictor(Protocol):
    """Predicts the layers of a segment from the lowest up.

    Encoder and decoder call it in the same order with the same arguments, and it must return the same bits on every
    machine.
    """

    @property
    def name(self) -> str:
        """Kind and version, as stored in the file: "static/1"."""
        ...

    @property
    def layers_at_once(self) -> int:
        """Into how large steps a segment is cut. A predictor that learns from the layer below asks for 1."""
        ...

    def predict(self, segment: Span, layers: range, known: NDArray[np.uint16]) -> Prediction:
        """Predict `layers` of `segment`.

        known: uint16 [layers.start, 2, tokens, kv_heads, head_dim], the true KV of all layers below.
        """
        ...
