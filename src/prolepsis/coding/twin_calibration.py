"""Fitting a twin to KV: the corrections of its hidden state layer by layer, then errors and token tables.

At every layer the twin and the target itself, both reading the true K and V, stand side by side. The correction is
the ridge regression of how their hidden states differ on how far the twin's K and V are off: a Kalman update with a
fixed gain. It is in place before the next layer is looked at, so that each is fitted in closed loop.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import from_scalars, to_float
from prolepsis.coding.calibration_sample import CalibrationSample, temporary_file
from prolepsis.coding.past import OwnPast, follow
from prolepsis.coding.predictors import Segment
from prolepsis.coding.profile import measure_parts, scale_codes
from prolepsis.coding.segment_coder import SegmentCoder
from prolepsis.coding.tables import fit, universal_tables
from prolepsis.coding.twin_network import CORRECTION_TYPE, REFERENCE, VARIANTS, Target, TwinNetwork
from prolepsis.coding.twin_profile import TwinProfile
from prolepsis.coding.twin_run import Workspace
from prolepsis.errors import InputError
from prolepsis.kernels.twin_pass import Network
from prolepsis.quant.matrices import rounded

Progress = Callable[[int, int], None]
Floats = NDArray[np.float32]

_RIDGE = 1e-3  # of a channel's mean variance
_TINY = 1e-12
_NORMAL = 1.2533  # a normal distribution's standard deviation over its mean absolute deviation


def calibrate_twin(
    sample: CalibrationSample, target: Target, variant: str, on_progress: Progress | None = None
) -> TwinProfile:
    """The profile of a twin for KV like that of `sample`, which `target` made, or another engine with its weights.

    The sample's segments know their token ids, and begin at position 0 with each text. on_progress(layers, of layers).

    Raises:
        InputError: an empty sample, unknown ids, or positions that the model has no angles for.
    """
    if sample.tokens == 0:
        raise InputError("there are no tokens to calibrate on")
    if sample.ids is None:
        raise InputError("a twin is calibrated on tokens whose ids are known")
    geometry = sample.geometry
    network = TwinNetwork.of(target, VARIANTS[variant])
    with _Fit(sample, network) as fitting:
        for layer in range(geometry.layers):
            fitting.layer(layer)
            if on_progress is not None:
                on_progress(layer + 1, geometry.layers)
        corrections, codes = np.stack(fitting.corrections), np.stack(fitting.codes)
    static = measure_parts(sample.parts, geometry, sample.rope) if geometry.steps is not None else None
    universal = universal_tables(geometry.dtype).frequencies
    profile = TwinProfile(
        geometry, sample.rope, variant, corrections, codes, universal, network.fingerprint, static, network
    )  # fmt: skip
    return replace(profile, frequencies=_tables(profile, sample))


class _Fit:
    """The twin, and the target itself, between two layers."""

    def __init__(self, sample: CalibrationSample, network: TwinNetwork) -> None:
        self._sample, self._network, target = sample, network, network.target
        self._exact = TwinNetwork.of(target, REFERENCE).corrected([])
        self._work = Workspace(target)
        self._past = OwnPast(sample.geometry._replace(layers=1), target.positions)
        self.corrections: list[NDArray[np.uint8]] = []
        self.codes: list[NDArray[np.uint16]] = []
        shape = (2, sample.tokens, target.plan.hidden)
        self._file = temporary_file(4 * 2 * sample.tokens * target.plan.hidden)
        self._hidden = np.memmap(self._file, np.float32, "r+", shape=shape)  # of the twin, and of the target itself
        for part, segment, _ in self._segments(0):
            self._begin(self._exact, segment)
            self._work.embed()
            self._hidden[:, part] = self._work.hidden

    def __enter__(self) -> "_Fit":
        return self

    def __exit__(self, *exception: object) -> None:
        del self._hidden
        self._file.close()

    def layer(self, layer: int) -> None:
        """Fit the correction behind this layer, and go on."""
        moments = _Moments(self._network.target)
        uncorrected = self._network.corrected([])
        for part, segment, actual in self._segments(layer):
            errors, magnitudes = self._errors(uncorrected, layer, segment, part, actual)
            differences = (self._hidden[1, part] - self._hidden[0, part]) / magnitudes
            moments.add(segment, errors, differences, bool(self._sample.fitted[part.start]))
        self.codes.append(moments.codes)
        if layer + 1 == self._sample.geometry.layers:
            return
        self.corrections.append(rounded(moments.gain, CORRECTION_TYPE).data)
        corrected = self._network.corrected(self.corrections[-1:], layer)
        for part, segment, actual in self._segments(layer):
            for which, network in enumerate((corrected, self._exact)):
                self._begin(network, segment)
                self._work.hidden = self._hidden[which, part]
                self._work.predict(layer)
                self._work.actual[...] = actual
                self._work.finish(layer, 0)
                self._hidden[which, part] = self._work.hidden

    def _begin(self, network: Network, segment: Segment) -> None:
        self._work.begin(network, segment, self._past)

    def _segments(self, layer: int) -> Iterator[tuple[slice, Segment, Floats]]:
        """Of each segment: its tokens among all, itself, and the layer's values; those are in the past by then."""
        dtype = self._sample.geometry.dtype
        for part, segment, scalars, steps in self._sample.layer_parts(layer):
            self._past.known = segment.start
            self._past.append(from_scalars(scalars[None], None if steps is None else steps[None], dtype))
            values = to_float(scalars, dtype)
            yield part, segment, values if steps is None else values * to_float(steps, "fp16")[..., None]

    def _errors(
        self, network: Network, layer: int, segment: Segment, part: slice, actual: Floats
    ) -> tuple[Floats, Floats]:
        """How far predictions are off, K's turned: [2, tokens, kv_heads, head_dim]; rms of the hidden states."""
        self._begin(network, segment)
        self._work.hidden = hidden = self._hidden[0, part]
        self._work.predict(layer)
        errors = np.nan_to_num(actual - self._work.means, posinf=0, neginf=0)
        return errors, np.sqrt((hidden**2).mean(axis=1, keepdims=True)) + np.float32(_TINY)


class _Moments:
    """Sums over tokens: those of the regression over the fitted ones, and errors over those held out of it."""

    def __init__(self, target: Target) -> None:
        width = target.kv_width
        self._target = target
        self._squares, self._products = np.zeros((width, width)), np.zeros((width, target.plan.hidden))
        self._sizes = {held_out: np.zeros((2, target.kv_heads, target.head_dim)) for held_out in (False, True)}
        self._counts = dict.fromkeys((False, True), 0)

    def add(self, segment: Segment, errors: Floats, differences: Floats, fitted: bool) -> None:
        """errors: as `_Fit._errors` gives them. differences: float32 [tokens, hidden], what is to be corrected."""
        self._sizes[not fitted] += np.abs(errors).sum(axis=1, dtype=np.float64)
        self._counts[not fitted] += segment.count
        if fitted:
            rows = self._turned_back(segment, errors)
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
