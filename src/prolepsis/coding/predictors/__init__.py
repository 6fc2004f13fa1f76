"""Predictors of KV: each is a point on the curve of size against cost, and all are used the same way."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kv_chain import ChainTables, ChainWork
from prolepsis.kernels.kv_pool import KVPool
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


class Past(Protocol):
    """The K and V of one sequence, from position 0 on, in the blocks that attention reads.

    known: how many of its tokens are there already. pool: the blocks of every layer, as attention reads them.
    """

    known: int

    @property
    def pool(self) -> KVPool:
        """The blocks of every layer."""
        ...

    def blocks(self, stop: int) -> NDArray[np.int32]:
        """The block table, with room for the tokens before position `stop`; int32 [blocks].

        Raises:
            InputError: there is no room for so many.
        """
        ...

    def put(self, layer: int, start: int, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Put one layer of tokens that become known, at the positions from `start` on.

        scalars: uint16 [2, tokens, kv_heads, head_dim]. steps: those of an integer cache, [2, tokens, kv_heads].
        """
        ...


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

    @property
    def positions(self) -> int | None:
        """None where segments are predicted each by itself. Else predictions look at all earlier tokens: the segments
        of a sequence are coded in order from position 0, with one `Past`, which must have room for so many positions.
        """
        ...

    def begin(self, segment: Segment, past: Past | None = None) -> "SegmentPredictor":
        """Start on a segment. past: of its sequence, which knows all tokens before it, where `positions` says so.

        Where the past already knows the segment, it must be just what will be coded, and is left as it is; else it
        knows the segment once all layers have been coded.
        """
        ...


class SegmentPredictor(Protocol):
    """A predictor at work on one segment."""

    def predict(self, layers: range) -> Prediction | Chain:
        """Predict `layers`, which follow those predicted, and by now coded, before."""
        ...

    def learn(self, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Be told what the layers just predicted are.

        scalars: uint16 [layers, 2, tokens, kv_heads, head_dim]. steps: those of an integer cache, fp16 bits
        [layers, 2, tokens, kv_heads].
        """
        ...
