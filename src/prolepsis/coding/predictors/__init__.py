"""Predictors of KV: each is a point on the curve of size against cost, and all are used the same way."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kv_chain import ChainTables, ChainWork
from prolepsis.kernels.kv_static import turn_rows


@dataclass(frozen=True)
class Segment:
    """Consecutive positions, and the token ids that stand there where they are known: uint32 [count] or None."""

    start: int
    count: int
    ids: NDArray[np.uint32] | None = None


class Turn(NamedTuple):
    """How RoPE turns K at the tokens of a segment: cos, sin float32 [tokens, pairs]. half: the style of `RopeSpec`."""

    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    half: bool


class Prediction(NamedTuple):
    """What a predictor says about some layers of a segment.

    means: float32 [layers, 2 (K, V), tokens or 1, kv_heads, head_dim], finite; one row holds for all tokens. scales:
    int32 [layers, 2, kv_heads, head_dim], the expected error of each channel as a code of `profile.scale_codes`.
    shifts: int32 [layers, 2, tokens, kv_heads], what to add to these codes for a token's head, in eighths of an octave,
    -1024 to 1024; None where nothing is added. turn: how the means of K are yet to be turned; None for not at all.
    """

    means: NDArray[np.float32]
    scales: NDArray[np.int32]
    shifts: NDArray[np.int32] | None = None
    turn: Turn | None = None

    def turned_means(self, tokens: int) -> NDArray[np.float32]:
        """The means of all tokens, K's turned: float32 [layers, 2, tokens, kv_heads, head_dim]."""
        layers, _, _, heads, dim = self.means.shape
        out = np.empty((layers, 2, tokens, heads, dim), np.float32)
        none = np.empty((tokens, 0), np.float32)
        still = Turn(none, none, False)
        for layer in range(layers):
            for kind, turn in enumerate((self.turn or still, still)):
                turn_rows(np.ascontiguousarray(self.means[layer, kind]), *turn, out[layer, kind])
        return out


class Chain(NamedTuple):
    """What a predictor says about one layer whose channels are predicted from each other (`kernels.kv_chain`).

    Coding the layer fills in what `work` has learned by then.
    """

    tables: ChainTables
    work: ChainWork


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

    def predict(self, layers: range) -> Prediction | Chain:
        """Predict `layers`, which follow those predicted, and by now coded, before."""
        ...
