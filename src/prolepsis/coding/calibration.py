"""Fitting the matrices of the `linear` predictor to KV, one layer at a time.

Each group of 16 channels is regressed, with a ridge, on the features of the two layers below, those of the layer's own
groups before it and, low down, the token's. Memory holds a few layers of the sample, which itself lies in a file.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KV, Geometry, QuantisedKV, to_scalars
from prolepsis.coding.calibration_sample import CalibrationSample
from prolepsis.coding.chains import count_layer
from prolepsis.coding.linear_matrices import (
    LARGEST,
    TOKEN_LAYERS,
    LinearMatrices,
    Matrices,
    TokenMatrices,
    chain_order,
    to_tensors,
)
from prolepsis.coding.linear_profile import LinearProfile, embedding_check
from prolepsis.coding.predictors import Chain, Prediction, Segment
from prolepsis.coding.predictors.linear import EmbeddingRows, LinearPredictor
from prolepsis.coding.profile import measure_parts, scale_codes
from prolepsis.coding.tables import universal_tables
from prolepsis.coding.uniform_grid import on_grid
from prolepsis.errors import InputError
from prolepsis.kernels.kv_chain import GROUP, LARGEST_FEATURE, LARGEST_TOKEN_FEATURE, token_features
from prolepsis.kernels.kv_chain_rows import PAIRS

Progress = Callable[[int, int], None]
Floats = NDArray[np.float32]

_RIDGE = 1e-3  # of a feature's variance
_TOKEN_RIDGE = 1e-5  # of layer 0, which follows from the token alone
_FEATURE_DEVIATIONS = 5.0  # how many standard deviations a feature reaches
_TOKEN_DEVIATIONS = 6.0
_ROWS = 2048  # of a product at a time
_LARGEST_WEIGHT = 127.0
_UPPER = np.float32(256)  # what an upper byte is worth in lower ones
_TINY = 1e-30
_WIDEST = 16384  # columns of a regression: 2 GiB for each of its few matrices


class Embedding(NamedTuple):
    """A model's token embedding. rows: uint32 [tokens] to float32 [tokens, hidden]. epsilon: of its first RMSNorm."""

    rows: EmbeddingRows
    vocabulary: int
    epsilon: float


def calibrate_linear(
    sample: CalibrationSample, embedding: Embedding | None = None, on_progress: Progress | None = None
) -> LinearProfile:
    """The profile of `linear` for KV like that of `sample`, of any engine.

    embedding: the model's, where the sample knows its token ids; the lowest layers then follow from the tokens, and so
    coding needs the ids. on_progress(layers done, layers).

    Raises:
        InputError: heads that the predictor cannot take (`linear_matrices.chain_order`), or an empty sample.
    """
    if sample.tokens == 0:
        raise InputError("there are no tokens to calibrate on")
    geometry, rope = sample.geometry, sample.rope
    matrices = fit_linear(sample, embedding, on_progress)
    static = measure_parts(sample.parts, geometry, rope) if geometry.steps is not None else None
    if embedding is None:
        return LinearProfile(geometry, rope, matrices, static)
    rows, vocabulary, _ = embedding
    return LinearProfile(geometry, rope, matrices, static, vocabulary, embedding_check(rows, vocabulary), rows)


def fit_linear(
    sample: CalibrationSample, embedding: Embedding | None, on_progress: Progress | None = None
) -> LinearMatrices:
    """Fit to `sample`; with an embedding, to its tokens too. on_progress(layers done, layers).

    Raises:
        InputError: heads that the predictor cannot take (`chain_order`).
    """
    geometry = sample.geometry
    chain_order(geometry, sample.rope)
    token = None if embedding is None else _TokenSample(sample, embedding)
    layers: list[_Layer] = []
    below: list[Floats] = []
    for index in range(geometry.layers):
        values, fitted = sample.layer(index), sample.fitted
        means, inverses = _spread(values[fitted], LARGEST_FEATURE, _FEATURE_DEVIATIONS)
        features = np.clip(np.rint((values - means) * inverses), -LARGEST_FEATURE, LARGEST_FEATURE)
        terms = below if token is None else [*token.terms(index), *below]
        ridge = _TOKEN_RIDGE if token is not None and index == 0 else _RIDGE
        weights = _regress([t[fitted] for t in terms], features[fitted], values[fitted] - means, ridge)
        layers.append(_Layer(means, inverses, *_split(weights, [t.shape[1] for t in terms])))
        below = [features, *below[:1]]
        if on_progress is not None:
            on_progress(index + 1, geometry.layers)
    matrices = _moderate(_assemble(layers, token))
    return _moderate(_with_errors(matrices, sample, embedding))


class _Layer(NamedTuple):
    """terms: float weights of each term, [channels, columns]; chain: [channels, channels], what lies before a group."""

    means: Floats
    inverses: Floats
    terms: list[Floats]
    chain: Floats


class _TokenSample:
    """The sample's tokens as features."""

    def __init__(self, sample: CalibrationSample, embedding: Embedding) -> None:
        ids = sample.ids
        assert ids is not None, "a sample without token ids cannot be fitted to tokens"
        self.epsilon = np.array([embedding.epsilon], np.float32)
        distinct, where = np.unique(ids, return_inverse=True)
        rows = np.ascontiguousarray(embedding.rows(distinct.astype(np.uint32)), np.float32)
        self.hidden = rows.shape[1]
        normed = rows / np.sqrt((rows.astype(np.float64) ** 2).mean(axis=1, keepdims=True) + embedding.epsilon)
        normed = normed.astype(np.float32)[where]
        self.means, self.inverses = _spread(normed[sample.fitted], LARGEST_TOKEN_FEATURE, _TOKEN_DEVIATIONS)
        high, low = (np.zeros((len(rows), -(-self.hidden // GROUP) * GROUP), np.int8) for _ in range(2))
        token_features(rows, self.means, self.inverses, self.epsilon[0], high, low)
        self._high, self._low, self._where = high.astype(np.float32), low.astype(np.float32), where

    def terms(self, layer: int) -> list[Floats]:
        """What `layer` is regressed on: all 16 bits for the lowest, the upper bytes for those it is worth it."""
        if layer == 0:
            return [(self._high + self._low / _UPPER)[self._where]]
        return [self._high[self._where]] if layer < TOKEN_LAYERS else []


def _spread(values: Floats, largest: int, deviations: float) -> tuple[Floats, Floats]:
    """(means, inverses) that make features of the channels; a constant channel's feature is 0."""
    deviation = values.std(axis=0, dtype=np.float64)
    inverses = np.where(deviation > _TINY, largest / deviations / np.maximum(deviation, _TINY), 0)
    return values.mean(axis=0, dtype=np.float64).astype(np.float32), inverses.astype(np.float32)


def _regress(terms: list[Floats], features: Floats, targets: Floats, ridge: float) -> Floats:
    """Weights [channels, columns of the terms + channels]: of each group on the terms and the groups before it."""
    inputs = [*terms, features]
    size = sum(t.shape[1] for t in inputs)
    if size > _WIDEST:
        raise InputError(f"linear would regress on {size} numbers, more than the {_WIDEST} that memory is good for")
    moments, products = np.zeros((size, size)), np.zeros((size, targets.shape[1]))
    for first in range(0, len(targets), _ROWS):
        part = np.concatenate([t[first : first + _ROWS] for t in inputs], axis=1)
        moments += part.T @ part
        products += part.T @ targets[first : first + _ROWS]
    inverse = _inverse_factor(moments, ridge * float(np.diagonal(moments).mean()) + _TINY)
    weights = np.zeros((targets.shape[1], size), np.float32)
    for first in range(0, targets.shape[1], GROUP):
        known = size - targets.shape[1] + first
        lower, group = inverse[:known, :known], slice(first, first + GROUP)
        weights[group, :known] = (lower.T @ (lower @ products[:known, group])).T
    return weights


def _inverse_factor(moments: NDArray[np.float64], ridge: float) -> NDArray[np.float64]:
    """L^-1 of moments + ridge * 1 = L L^T. Its leading blocks are those of the smaller problems.

    Where few tokens, or ever the same ones, leave so many directions open that rounding hides the ridge, it is raised.
    """
    while True:
        try:
            return np.linalg.inv(np.linalg.cholesky(moments + ridge * np.eye(len(moments))))
        except np.linalg.LinAlgError:
            ridge *= 10


def _moderate(matrices: LinearMatrices) -> LinearMatrices:
    """The same with all numbers as small as a profile wants them; KV that needs larger ones is predicted badly."""
    for array in to_tensors(matrices).values():
        if array.dtype == np.float32:
            np.nan_to_num(array, copy=False)
            np.clip(array, -LARGEST, LARGEST, out=array)
    return matrices


def _split(weights: Floats, widths: list[int]) -> tuple[list[Floats], Floats]:
    parts = np.split(weights, np.cumsum(widths), axis=1)
    return parts[:-1], parts[-1]


def _assemble(layers: list[_Layer], token: _TokenSample | None) -> LinearMatrices:
    """All weights as integers."""
    count, channels = len(layers), len(layers[0].means)
    tokens = min(TOKEN_LAYERS, count) if token is not None else 0

    def of(place: int, first: int) -> Matrices:
        chosen = [layer.terms[place + (index < tokens)] for index, layer in enumerate(layers) if index >= first]
        return _integers(np.stack(chosen) if chosen else np.empty((0, channels, channels), np.float32))

    chains = [_chain(layer.chain) for layer in layers]
    ones = np.ones((count, channels), np.float32)
    return LinearMatrices(
        base=np.stack([layer.means for layer in layers]),
        below=of(0, 1),
        below2=of(1, 2),
        chain=np.stack([weights for weights, _ in chains]),
        chain_steps=np.stack([steps for _, steps in chains]),
        means=np.stack([layer.means for layer in layers]),
        inverses=np.stack([layer.inverses for layer in layers]),
        errors=ones,
        codes=ones.astype(np.uint16),
        token=None if token is None else _token_matrices(layers[:tokens], token),
    )


def _token_matrices(layers: list[_Layer], token: _TokenSample) -> TokenMatrices:
    upper = _integers(np.stack([layer.terms[0] for layer in layers]))
    rest = layers[0].terms[0] - upper.weights[0] * upper.steps[0][:, None]
    return TokenMatrices(token.means, token.inverses, token.epsilon, upper, _integers(rest[None]))


def _integers(weights: Floats) -> Matrices:
    """The nearest int8, of a step of its own in each row."""
    steps = np.maximum(np.abs(weights).max(axis=-1, initial=0) / _LARGEST_WEIGHT, _TINY).astype(np.float32)
    return Matrices(np.rint(weights / steps[..., None]).clip(-127, 127).astype(np.int8), steps)


def _chain(weights: Floats) -> tuple[NDArray[np.int8], Floats]:
    """(the part below the groups on the diagonal, group after group; steps)."""
    parts, steps = [np.empty(0, np.int8)], np.zeros(len(weights), np.float32)
    for first in range(0, len(weights), GROUP):
        group = _integers(weights[first : first + GROUP, :first])
        parts.append(group.weights.reshape(-1))
        steps[first : first + GROUP] = group.steps
    return np.concatenate(parts), steps


def _with_errors(matrices: LinearMatrices, sample: CalibrationSample, embedding: Embedding | None) -> LinearMatrices:
    """How far the predictions are from what was held out of the fit, or from all where nothing was."""
    predictor = LinearPredictor(sample.geometry, sample.rope, matrices, None if embedding is None else embedding.rows)
    squares, count = np.zeros(matrices.base.shape), 0
    held_out = not sample.fitted.all()
    for segment, kv in sample.parts(held_out=held_out):
        squares += _squared_errors(predictor, segment, kv, sample.geometry)
        count += segment.count
    deviations = np.sqrt(squares / max(1, count))
    errors = np.where(deviations > 0, 1 / np.maximum(deviations, _TINY), 0)
    return matrices._replace(errors=errors.astype(np.float32), codes=scale_codes(_turned(deviations, sample)))


def _squared_errors(predictor: LinearPredictor, segment: Segment, kv: KV, geometry: Geometry) -> NDArray[np.float64]:
    """Before RoPE, summed over the tokens: [layers, channels]."""
    scalars, work = to_scalars(kv, geometry.dtype), predictor.begin(segment)
    tables, group = universal_tables(geometry.dtype), geometry.kv_heads
    rows = []
    for layer in range(geometry.layers):
        chain: Prediction | Chain = work.predict(range(layer, layer + 1))
        if isinstance(kv, QuantisedKV):
            chain = on_grid(chain, kv.steps[layer : layer + 1])
        assert isinstance(chain, Chain)
        rows.append(count_layer(scalars[layer], chain, geometry.dtype, tables, group).squared_errors)
    return np.stack(rows)


def _turned(deviations: NDArray[np.float64], sample: CalibrationSample) -> NDArray[np.float64]:
    """The same after RoPE, at any angle: of both channels of a pair the mean."""
    out = deviations.copy()
    for group, pair in enumerate(chain_order(sample.geometry, sample.rope).pairs):
        if pair >= 0:
            first, second = (slice(GROUP * group + k * PAIRS, GROUP * group + (k + 1) * PAIRS) for k in range(2))
            mean = np.sqrt((deviations[:, first] ** 2 + deviations[:, second] ** 2) / 2)
            out[:, first] = out[:, second] = mean
    return out
