"""Fitting a twin to KV: the corrections of its hidden state layer by layer, then errors and token tables.

At every layer the twin and the target itself, both reading the true K and V, stand side by side. The correction is
the ridge regression of how their hidden states differ on how far the twin's K and V are off: a Kalman update with a
fixed gain. It is in place before the next layer is looked at, so that each is fitted in closed loop.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, arrays_of, from_scalars
from prolepsis.coding.calibration_sample import CalibrationSample, temporary_file
from prolepsis.coding.past import OwnPast, follow
from prolepsis.coding.predictors import Segment
from prolepsis.coding.predictors.twin import stored, values_of
from prolepsis.coding.profile import measure_parts, scale_codes
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.tables import fit, universal_tables
from prolepsis.coding.target_cache import compute_kv
from prolepsis.coding.twin_network import CORRECTION_TYPE, REFERENCE, VARIANTS, Target, TwinNetwork, correction_bytes
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.coding.twin_run import Workspace
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import Network
from prolepsis.quant.matrices import rounded

Progress = Callable[[int, int], None]
Floats = NDArray[np.float32]
Scalars = NDArray[np.uint16]

_RIDGE = 1e-3  # of a channel's mean variance
_TINY = 1e-12
_SMALL = np.float32(_TINY)
_NORMAL = 1.2533  # a normal distribution's standard deviation over its mean absolute deviation


def calibrate_twin(
    sample: CalibrationSample,
    target: Target,
    variant: str,
    on_progress: Progress | None = None,
    *,
    open_loop: bool = False,
) -> TwinProfile:
    """The profile of a twin for KV like that of `sample`, which `target` made, or another engine with its weights.

    The sample's segments know their token ids, and begin at position 0 with each text. on_progress(layers, of layers).
    open_loop: as the published method has it (`TwinPredictor`), for comparison.

    Raises:
        InputError: an empty sample, unknown ids, or positions that the model has no angles for.
    """
    _require_usable(sample)
    kind = VARIANTS[variant]
    corrections = None
    if kind.fine and not open_loop and not _is_targets_own(sample, target):
        # Beside the target's own arithmetic this twin is hardly off. What another engine's roundings do to hidden
        # states looks like what coarser activations do to them.
        coarse = TwinNetwork.of(target, kind._replace(fine=False))
        corrections = fit_twin(sample, coarse, variant).corrections
    network = TwinNetwork.of(target, kind)
    return fit_twin(sample, network, variant, on_progress, corrections=corrections, open_loop=open_loop)


def fit_twin(
    sample: CalibrationSample,
    network: TwinNetwork,
    variant: str,
    on_progress: Progress | None = None,
    *,
    corrections: NDArray[np.uint8] | None = None,
    open_loop: bool = False,
) -> TwinProfile:
    """As `calibrate_twin`, for a network that may differ from what `variant` makes, and then is for measuring only.

    corrections: to be used instead of fitted ones, as in a profile; in open loop there are none.
    """
    _require_usable(sample)
    geometry, hidden = sample.geometry, network.target.plan.hidden
    with _Fit(sample, network, corrections, open_loop) as fitting:
        for layer in range(geometry.layers):
            fitting.layer(layer)
            if on_progress is not None:
                on_progress(layer + 1, geometry.layers)
        fitted = np.array(fitting.corrections, np.uint8).reshape(-1, hidden, correction_bytes(geometry))
        codes = np.stack(fitting.codes)
    static = measure_parts(sample.parts, geometry, sample.rope) if geometry.steps is not None else None
    universal = universal_tables(geometry.dtype).frequencies
    profile = TwinProfile(
        geometry, sample.rope, variant, fitted, codes, universal, network.fingerprint, static, network, open_loop,
        network.choice,
    )  # fmt: skip
    return replace(profile, frequencies=_tables(profile, sample))


def _require_usable(sample: CalibrationSample) -> None:
    if sample.tokens == 0:
        raise InputError("there are no tokens to calibrate on")
    if sample.ids is None:
        raise InputError("a twin is calibrated on tokens whose ids are known")


def _is_targets_own(sample: CalibrationSample, target: Target) -> bool:
    """Whether the sample's KV has the bits that the target's arithmetic gives, as far as its first segment tells."""
    segment, kv = next(sample.parts())
    assert segment.ids is not None
    again = compute_kv(target, segment.ids, sample.geometry.dtype)
    return all(map(np.array_equal, arrays_of(again), arrays_of(kv)))


class _Walk:
    """A network on its way through the sample, layer by layer; `hidden` is its state, float32 [tokens, hidden]."""

    def __init__(self, sample: CalibrationSample, target: Target, hidden: Floats) -> None:
        self._dtype, self._work, self.hidden = sample.geometry.dtype, Workspace(target), hidden
        self._past = OwnPast(sample.geometry._replace(layers=1), target.positions)

    def embed(self, network: Network, segment: Segment, tokens: slice) -> None:
        """The state before layer 0."""
        self._work.begin(network, segment, self._past)
        self._work.embed()
        self.hidden[tokens] = self._work.hidden

    def predict(self, network: Network, layer: int, segment: Segment, tokens: slice) -> Floats:
        """Means of a segment, float32 [2, tokens, kv_heads, head_dim]."""
        self._work.begin(network, segment, self._past)
        self._work.hidden = self.hidden[tokens]
        self._work.predict(layer)
        return self._work.means

    def go_on(self, segment: Segment, layer: int, tokens: slice, scalars: Scalars, steps: Scalars | None) -> None:
        """From what was just predicted to the next layer, with what it is to go on from."""
        self._past.known = segment.start
        self._past.append(from_scalars(scalars[None], None if steps is None else steps[None], self._dtype))
        self._work.actual[...] = values_of(scalars, steps, self._dtype)
        self._work.finish(layer, 0)
        self.hidden[tokens] = self._work.hidden


class _Fit:
    """The twin, and the target itself, side by side."""

    def __init__(
        self, sample: CalibrationSample, network: TwinNetwork, given: NDArray[np.uint8] | None, open_loop: bool
    ) -> None:
        self._sample, self._network, target = sample, network, network.target
        self._given, self._open_loop = given, open_loop
        self._exact = TwinNetwork.of(target, REFERENCE).corrected([])
        self.corrections: list[NDArray[np.uint8]] = []
        self.codes: list[NDArray[np.uint16]] = []
        shape = (2, sample.tokens, target.plan.hidden)
        self._file = temporary_file(4 * 2 * sample.tokens * target.plan.hidden)
        hidden = np.memmap(self._file, np.float32, "r+", shape=shape)
        self._twin, self._target = (_Walk(sample, target, state) for state in hidden)
        for tokens, segment, _, _ in sample.layer_parts(0):
            self._twin.embed(self._exact, segment, tokens)
            self._target.embed(self._exact, segment, tokens)

    def __enter__(self) -> "_Fit":
        return self

    def __exit__(self, *exception: object) -> None:
        del self._twin, self._target
        self._file.close()

    def layer(self, layer: int) -> None:
        """Fit the correction behind this layer, and go on."""
        moments, network = _Moments(self._network.target), self._network.corrected([])
        dtype = self._sample.geometry.dtype
        for tokens, segment, scalars, steps in self._sample.layer_parts(layer):
            own = _stored_values(self._target.predict(self._exact, layer, segment, tokens), dtype)
            means = self._twin.predict(network, layer, segment, tokens)
            fitted = bool(self._sample.fitted[tokens.start])
            moments.add_errors(values_of(scalars, steps, dtype) - means, fitted)
            if fitted:
                moments.add_misses(segment, own - means, self._differences(tokens))
        self.codes.append(moments.codes)
        if layer + 1 == self._sample.geometry.layers:
            return
        if not self._open_loop:
            gain = rounded(moments.gain, CORRECTION_TYPE).data if self._given is None else self._given[layer]
            self.corrections.append(gain)
            network = self._network.corrected(self.corrections[-1:], layer)
        for tokens, segment, scalars, steps in self._sample.layer_parts(layer):
            self._target.predict(self._exact, layer, segment, tokens)
            self._target.go_on(segment, layer, tokens, scalars, steps)
            means = self._twin.predict(network, layer, segment, tokens)
            if self._open_loop:
                (scalars,), predicted = stored(means[None], self._sample.geometry.dtype)
                steps = None if predicted is None else predicted[0]
            self._twin.go_on(segment, layer, tokens, scalars, steps)

    def _differences(self, tokens: slice) -> Floats:
        """How far the twin's state is off, as a part of its magnitude: float32 [tokens, hidden]."""
        hidden = self._twin.hidden[tokens]
        return (self._target.hidden[tokens] - hidden) / (np.sqrt((hidden**2).mean(axis=1, keepdims=True)) + _SMALL)


def _stored_values(means: Floats, dtype: DType) -> Floats:
    """What a cache stores of predicted K and V [2, tokens, kv_heads, head_dim], as float32."""
    scalars, steps = stored(means[None], dtype)
    return values_of(scalars[0], None if steps is None else steps[0], dtype)


class _Moments:
    """Sums over tokens: those of the regression over the fitted ones, and errors over those held out of it."""

    def __init__(self, target: Target) -> None:
        width = target.kv_width
        self._target = target
        self._squares, self._products = np.zeros((width, width)), np.zeros((width, target.plan.hidden))
        self._sizes = {held_out: np.zeros((2, target.kv_heads, target.head_dim)) for held_out in (False, True)}
        self._counts = dict.fromkeys((False, True), 0)

    def add_errors(self, errors: Floats, fitted: bool) -> None:
        """How far predictions are off what is coded: float32 [2, tokens, kv_heads, head_dim]."""
        sizes = np.abs(np.nan_to_num(errors, posinf=0, neginf=0))
        self._sizes[not fitted] += sizes.sum(axis=1, dtype=np.float64)
        self._counts[not fitted] += errors.shape[1]

    def add_misses(self, segment: Segment, misses: Floats, differences: Floats) -> None:
        """misses: how far predictions are off what the target's own arithmetic stores. differences: float32
        [tokens, hidden], how far the hidden state is off the target's own.

        What another engine stores has roundings of its own, which say nothing of this difference.
        """
        rows = self._turned_back(segment, np.nan_to_num(misses, posinf=0, neginf=0))
        self._squares += rows.T @ rows
        self._products += rows.T @ differences

    def _turned_back(self, segment: Segment, errors: Floats) -> Floats:
        plan, pairs = self._target.plan, self._target.plan.rotary_dim // 2
        turns = slice(segment.start * pairs, (segment.start + segment.count) * pairs)
        cos, sin = (table[turns].reshape(segment.count, 1, pairs) for table in (plan.cos, plan.sin))
        k = errors[0].copy()
        first, second = errors[0, ..., :pairs], errors[0, ..., pairs : 2 * pairs]
        k[..., :pairs], k[..., pairs : 2 * pairs] = first * cos + second * sin, second * cos - first * sin
        return np.concatenate([k.reshape(segment.count, -1), errors[1].reshape(segment.count, -1)], axis=1)

    @property
    def gain(self) -> Floats:
        """The correction, float32 [hidden, channels]."""
        ridge = _RIDGE * float(np.diagonal(self._squares).mean()) + _TINY
        solved = np.linalg.solve(self._squares + ridge * np.eye(len(self._squares)), self._products)
        return np.ascontiguousarray(solved.T, np.float32)

    @property
    def codes(self) -> NDArray[np.uint16]:
        """Scale codes of the expected errors, uint16 [2, kv_heads, head_dim]."""
        held_out = self._counts[True] > 0
        return scale_codes(_NORMAL * self._sizes[held_out] / max(1, self._counts[held_out]))


def _tables(profile: TwinProfile, sample: CalibrationSample) -> NDArray[np.uint16]:
    """Token tables for what the profile makes of the sample."""
    coder = SegmentCoder(sample.geometry, profile, sample.rope)
    counts = np.zeros(profile.frequencies.shape, np.int64)
    for segment, kv, past in follow(coder.new_past, sample.parts()):
        counts += coder.count(segment, kv, past)
    return fit(counts, sample.geometry.dtype)
