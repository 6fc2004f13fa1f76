"""`linear`: every channel from what is known below it, by small integer matrices and without running a network.

A layer is first predicted from the two layers below (the lowest ones also from the token's embedding), then, group of
16 channels after group, from the layer's own channels before. Products are exact int32 (`kernels.kv_chain`).
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import Geometry
from prolepsis.coding.linear_matrices import LinearMatrices, Matrices, chain_order
from prolepsis.coding.predictors import Chain, Past, Segment
from prolepsis.coding.predictors.static import turn_at
from prolepsis.coding.rope import RopeSpec
from prolepsis.errors import InputError
from prolepsis.kernels.int8_product import LANES, pack
from prolepsis.kernels.kv_chain import ChainTables, ChainWork, add_products, token_features

EmbeddingRows = Callable[[NDArray[np.uint32]], NDArray[np.float32]]
"""Rows of a token embedding: uint32 [tokens] to float32 [tokens, hidden]."""


class _Features(NamedTuple):
    """int8 [tokens, columns], and their sums, int32 [tokens]."""

    values: NDArray[np.int8]
    sums: NDArray[np.int32]


class _Packed(NamedTuple):
    """A matrix as `add_products` takes it."""

    weights: NDArray[np.uint8]
    steps: NDArray[np.float32]


class LinearPredictor:
    """Predicts with `matrices`. embedding: rows of the token embedding, where the matrices look at tokens.

    Raises:
        InputError: heads of this size cannot be predicted (`chain_order`).
    """

    name = "linear/1"
    layers_at_once = 1
    positions = None

    def __init__(
        self,
        geometry: Geometry,
        rope: RopeSpec | None,
        matrices: LinearMatrices,
        embedding: EmbeddingRows | None,
    ) -> None:
        self.rope, self.matrices, self._embedding = rope, matrices, embedding
        order = chain_order(geometry, rope)
        self.tables = [_chain_tables(matrices, layer, *order) for layer in range(geometry.layers)]
        self.below, self.below2 = _packed(matrices.below), _packed(matrices.below2)
        token = matrices.token
        self.token_upper, self.token_rest = ([], []) if token is None else (_packed(token.upper), _packed(token.rest))

    def begin(self, segment: Segment, past: Past | None = None) -> "_LinearSegment":
        """Raises InputError where the matrices look at tokens and the segment does not know them."""
        return _LinearSegment(self, segment, self._token_features(segment))

    def _token_features(self, segment: Segment) -> tuple[_Features, _Features] | None:
        """Upper and lower bytes, where they are looked at."""
        token = self.matrices.token
        if token is None:
            return None
        if segment.ids is None:
            raise InputError("the predictor linear needs token ids, and none are there")
        assert self._embedding is not None
        columns = token.upper.weights.shape[2]
        high, low = (np.zeros((segment.count, columns), np.int8) for _ in range(2))
        token_features(self._embedding(segment.ids), token.means, token.inverses, token.epsilon[0], high, low)
        return _summed(high), _summed(low)


class _LinearSegment:
    def __init__(self, predictor: LinearPredictor, segment: Segment, token: tuple[_Features, _Features] | None) -> None:
        self._predictor, self._count, self._token = predictor, segment.count, token
        self._angles = turn_at(predictor.rope, segment)[:2]
        self._below: list[_Features] = []  # of the layers done, the nearest first

    def predict(self, layers: range) -> Chain:
        """The layer's part that comes from below. Its features are there once it is coded."""
        layer, matrices = layers.start, self._predictor.matrices
        base = np.repeat(matrices.base[layer][None], self._count, axis=0)
        products = np.empty((self._count, LANES), np.int32)
        for features, matrix in self._terms(layer):
            add_products(features.values, features.sums, matrix.weights, matrix.steps, products, base)
        own = _Features(np.zeros(base.shape, np.int8), np.zeros(self._count, np.int32))
        self._below = [own, *self._below[:1]]
        nothing = np.empty((0, self._count), np.float32)
        energy, guesses = np.zeros(self._count, np.int64), np.empty((self._count, LANES), np.float32)
        work = ChainWork(
            base, *self._angles, *own, energy, nothing, nothing.astype(np.int32), guesses, products
        )  # fmt: skip
        return Chain(self._predictor.tables[layer], work)

    def learn(self, scalars: NDArray[np.uint16], steps: NDArray[np.uint16] | None) -> None:
        """Coding the layer has left its features in the chain's work."""

    def _terms(self, layer: int) -> list[tuple[_Features, _Packed]]:
        predictor, terms = self._predictor, []
        if self._token is not None and layer < len(predictor.token_upper):
            high, low = self._token
            matrix = predictor.token_upper[layer]
            terms.append((high, matrix))
            if layer < len(predictor.token_rest):
                terms.append((low, _Packed(matrix.weights, matrix.steps / np.float32(256))))
                terms.append((high, predictor.token_rest[layer]))
        for features, first, matrices in zip(self._below, (1, 2), (predictor.below, predictor.below2), strict=False):
            terms.append((features, matrices[layer - first]))
        return terms


def _summed(values: NDArray[np.int8]) -> _Features:
    return _Features(values, values.sum(axis=1, dtype=np.int32))


def _packed(matrices: Matrices) -> list[_Packed]:
    return [_Packed(pack(weights), steps) for weights, steps in zip(*matrices, strict=True)]


def _chain_tables(
    matrices: LinearMatrices, layer: int, channels: NDArray[np.int32], pairs: NDArray[np.int32]
) -> ChainTables:
    tiles, at = [], 0
    for columns in range(0, matrices.base.shape[1], LANES):
        tiles.append(pack(matrices.chain[layer, at : at + LANES * columns].reshape(LANES, columns)))
        at += LANES * columns
    return ChainTables(
        channels,
        pairs,
        np.concatenate(tiles),
        matrices.chain_steps[layer],
        matrices.means[layer],
        matrices.inverses[layer],
        matrices.errors[layer],
        matrices.codes[layer].astype(np.int32),
    )
