"""`twin`: the target's own network, run with coarser activations on the target's true K and V.

Speculative KV coding in closed loop: attention reads the true K and V of earlier tokens and of this one, so errors do
not grow from token to token; and how far a layer's prediction was off corrects the hidden state that the layers above
are predicted from, so that they hardly grow from layer to layer.
"""

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, QuantisedKV, quantise, to_float, to_scalars
from prolepsis.coding.predictors import Past, Prediction, Segment
from prolepsis.coding.threads import thread_count
from prolepsis.coding.twin_network import Target
from prolepsis.coding.twin_run import Workspace
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import Network


class TwinPredictor:
    """Predicts with `network`, the corrected twin of `target`, KV of a cache of `dtype`.

    codes: the expected error of each channel, int32 [layers, 2, kv_heads, head_dim], as `profile.scale_codes`.
    open_loop: attend to what is predicted and not to what is true, as the published method does: for comparison, and
    only with pasts that nobody else fills.
    """

    layers_at_once = 1

    def __init__(
        self,
        name: str,
        target: Target,
        network: Network,
        codes: NDArray[np.int32],
        dtype: DType,
        *,
        open_loop: bool = False,
    ) -> None:
        self.name, self.target, self.network, self.codes, self.dtype = name, target, network, codes, dtype
        self.open_loop = open_loop
        self._free: dict[int, list[Workspace]] = defaultdict(list)

    @property
    def positions(self) -> int:
        """As many as the target has angles for."""
        return self.target.positions

    def begin(self, segment: Segment, past: Past | None = None) -> "_TwinSegment":
        """Raises InputError where the tokens, or what comes before them, are not known, or are too many."""
        if segment.ids is None:
            raise InputError("the twin needs token ids, and none are there")
        if segment.ids.max(initial=0) >= self.target.vocabulary:
            raise InputError(
                f"token id {segment.ids.max()} is beyond the {self.target.vocabulary} tokens of the twin's vocabulary"
            )
        if past is None or past.known < segment.start:
            known = 0 if past is None else past.known
            raise InputError(f"the twin needs all {segment.start} tokens before the segment, and knows {known}")
        return _TwinSegment(self, segment, past)

    def take(self) -> Workspace:
        """A workspace that nobody else uses, of as many threads as the caller may use."""
        try:
            return self._free[thread_count()].pop()
        except IndexError:
            return Workspace(self.target, thread_count())

    def give_back(self, workspace: Workspace) -> None:
        """For the next segment."""
        self._free[workspace.threads].append(workspace)


class _TwinSegment:
    def __init__(self, predictor: TwinPredictor, segment: Segment, past: Past) -> None:
        self._predictor, self._segment, self._past = predictor, segment, past
        self._layer = -1
        self._work = predictor.take()
        self._work.begin(predictor.network, segment, past)
        self._work.embed()

    def predict(self, layers: range) -> Prediction:
        """One layer: K and V projected from the hidden state."""
        self._layer = layers.start
        self._work.predict(self._layer)
        return Prediction(self._work.means[None], self._predictor.codes[self._layer : self._layer + 1])

    def learn(self, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Put the layer into the past, and go on to the next."""
        predictor, layer = self._predictor, self._layer
        if predictor.open_loop:
            scalars, steps = stored(self._work.means[None], predictor.dtype)
        known = scalars[0], None if steps is None else steps[0]
        self._put(*known)
        if layer + 1 < predictor.target.plan.layers:
            self._work.actual[...] = values_of(*known, predictor.dtype)
            self._work.finish(layer, layer)
            return
        self._past.known = max(self._past.known, self._segment.start + self._segment.count)
        predictor.give_back(self._work)

    def _put(self, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        segment, past = self._segment, self._past
        if past.known < segment.start + segment.count:
            past.put(self._layer, segment.start, scalars, steps)


def stored(values: NDArray[np.float32], dtype: DType) -> tuple[NDArray[np.uint16], NDArray[np.uint16] | None]:
    """Scalars and steps of what a cache stores for values [layers, 2, tokens, kv_heads, head_dim]."""
    kv = quantise(values, dtype)
    return to_scalars(kv, dtype), kv.steps if isinstance(kv, QuantisedKV) else None


def values_of(scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None, dtype: DType) -> NDArray[np.float32]:
    """The values of scalars [..., kv_heads, head_dim] with steps [..., kv_heads]."""
    values = to_float(scalars, dtype)
    return values if steps is None else values * to_float(steps, "fp16")[..., None]
