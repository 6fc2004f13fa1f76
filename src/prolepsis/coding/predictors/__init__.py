"""Predictors of KV: each is a point on the curve of size against cost, and all are used the same way."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Segment:
    """Consecutive positions, and the token ids that stand there where they are known: uint32 [count] or None."""

    start: int
    count: int
    ids: NDArray[np.uint32] | None = None


class Prediction(NamedTuple):
    """What a predictor says about some layers of a segment.

    means: float32 [layers, 2 (K, V), tokens, kv_heads, head_dim], finite. scales: int32 [layers, 2, kv_heads,
    head_dim], the expected error of each channel as a code of `profile.scale_codes`. shifts: int32 [layers, 2, tokens,
    kv_heads], what to add to these codes for a token's head, in eighths of an octave, -1024 to 1024; None where
    nothing is added.
    """

    means: NDArray[np.float32]
    scales: NDArray[np.int32]
    shifts: NDArray[np.int32] | None = None


class Predictor(Protocol):
    """Predicts a segment layer by layer, from the lowest up.

    Encoder and decoder ask the same questions in the same order, and the answers must be the same bits on every
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

    def begin(self, segment: Segment) -> "SegmentPredictor":
        """Start on a segment. What is learned from one segment is never used for another."""
        ...


class SegmentPredictor(Protocol):
    """A predictor at work on one segment."""

    def predict(self, layers: range, below: NDArray[np.float32] | None) -> Prediction:
        """Predict `layers`, which follow those predicted before.

        below: float32 [2, tokens, kv_heads, head_dim], the true values of the layer just below `layers`; None for the
        lowest layer, and for a predictor that takes several layers at once.
        """
        ...
