"""A copy of the decoder in float32 and plain NumPy: the yardstick of the twin, and an oracle for it.

Its last bits depend on the machine and its libraries, so nothing can be coded with it; how many bits its predictions
would leave, `mixture` tells.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, quantise, to_float, to_scalars
from prolepsis.kernels.cells import CELL, CODES
from prolepsis.kernels.forward import DOWN, GATE_UP, QKV, Plan
from prolepsis.kernels.qmatmul import KIND, ROWS
from prolepsis.kernels.unpacking import unpack_rows
from prolepsis.quant.matrices import packed, rounded, unpacked

Floats = NDArray[np.float32]
Attended = Callable[[int, Floats], Floats]
"""(layer, its predicted K and V) to the K and V that attention reads; float32 [2, tokens, kv_heads, head_dim]."""

_QUERIES = 64  # tokens that attend at a time, so that the scores of a head's group stay in the caches
_LIMITS = {"int8": 127.0, "int16": 32639.0}  # the largest number of a cell; of 16 bits as the engine has it
_TINY = np.float32(1e-30)


class Precision(NamedTuple):
    """What is rounded.

    activations: those that enter the products of a layer, but for K and V; integers have a step for each cell of 32.
    rounds_to: a type that weights are rounded to, but for those of K and V and those of kinds that it `keeps`
    (`cells.CODES`).
    """

    activations: Literal["float32", "bf16", "int16", "int8"] = "float32"
    rounds_to: str = ""
    keeps: tuple[int, ...] = tuple(CODES.values())


EXACT = Precision()


def closed_loop(truth: Callable[[int], Floats]) -> Attended:
    """Attention reads the true K and V of a layer, float32 [2, tokens, kv_heads, head_dim]."""
    return lambda layer, _: truth(layer)


def open_loop(dtype: DType) -> Attended:
    """Attention reads the predicted K and V, as a cache of this dtype, one of floats, would hold them."""
    return lambda _, kv: to_float(to_scalars(quantise(kv[None], dtype), dtype), dtype)[0]


class _Layer(NamedTuple):
    """Norms [hidden] and matrices [out, in], float32; key_value has the rows of K, then those of V."""

    norm: Floats
    query: Floats
    key_value: Floats
    out: Floats
    mlp_norm: Floats
    gate: Floats
    up: Floats
    down: Floats


class FloatPredictor:
    """Predicts K and V of a whole window of tokens. Memory holds one layer of weights."""

    def __init__(self, plan: Plan, precision: Precision = EXACT) -> None:
        self._plan, self._precision = plan, precision
        query, key = (int(plan.weights.matrices[plan.groups[QKV, 0] + i, ROWS]) for i in range(2))
        self._dim = query // plan.heads
        self._kv_heads = key // self._dim
        self._kept: tuple[int, _Layer] | None = None

    def predict(
        self, ids: NDArray[np.uint32], attended: Attended, gains: Sequence[Floats] | None = None
    ) -> Iterator[Floats]:
        """Predicted K and V of each layer from position 0 on, float32 [2, tokens, kv_heads, head_dim].

        gains: of each layer, float32 [2 * kv_heads * head_dim, hidden]: the residuals of its K, turned back by RoPE,
        and V, times this, in units of the hidden state's root mean square, are added to that (depth correction).
        """
        x = np.empty((len(ids), self._plan.hidden), np.float32)
        unpack_rows(self._plan.weights, self._plan.embedding, np.asarray(ids, np.int64), x)
        for index in range(self._plan.layers):
            layer = self._layer(index)
            kv = self._project(layer, x)
            yield kv
            seen = attended(index, kv)
            if gains is not None:
                x = self._corrected(x, seen - kv, gains[index])
            x += self._attention(layer, x, seen)
            x += self._mlp(layer, x)

    def _project(self, layer: _Layer, x: Floats) -> Floats:
        normed = self._normed(x, layer.norm)
        kv = (normed @ layer.key_value.T).reshape(len(x), 2, self._kv_heads, self._dim).transpose(1, 0, 2, 3)
        return np.stack([self._turned(kv[0]), kv[1]])

    def _corrected(self, x: Floats, residual: Floats, gain: Floats) -> Floats:
        joined = np.stack([self._turned(residual[0], back=True), residual[1]], axis=1).reshape(len(x), -1)
        rms = np.sqrt((x * x).mean(axis=1, keepdims=True))
        return x + (joined @ gain) * rms

    def _attention(self, layer: _Layer, x: Floats, kv: Floats) -> Floats:
        normed = self._rounded(self._normed(x, layer.norm))
        query = self._turned((normed @ layer.query.T).reshape(len(x), -1, self._dim)) * self._plan.score_scale
        grouped = query.reshape(len(x), self._kv_heads, -1, self._dim)
        out = np.empty_like(grouped)
        for head in range(self._kv_heads):
            _attend(grouped[:, head], kv[0, :, head], kv[1, :, head], out[:, head])
        return self._rounded(out.reshape(len(x), -1)) @ layer.out.T

    def _mlp(self, layer: _Layer, x: Floats) -> Floats:
        normed = self._rounded(self._normed(x, layer.mlp_norm))
        gate = normed @ layer.gate.T
        with np.errstate(over="ignore"):
            gate /= 1 + np.exp(-gate)
        return self._rounded(gate * (normed @ layer.up.T)) @ layer.down.T

    def _normed(self, x: Floats, gain: Floats) -> Floats:
        return x / np.sqrt((x * x).mean(axis=1, keepdims=True) + self._plan.eps) * gain

    def _turned(self, heads: Floats, back: bool = False) -> Floats:
        """RoPE of [tokens, heads, head_dim], or what undoes it."""
        half = self._plan.rotary_dim // 2
        cos, sin = (table.reshape(-1, half)[: len(heads), None] for table in (self._plan.cos, self._plan.sin))
        sin = -sin if back else sin
        first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)

    def _rounded(self, x: Floats) -> Floats:
        """Activations on their way into a product."""
        kind = self._precision.activations
        if kind == "float32":
            return x
        if kind == "bf16":
            return to_float(to_scalars(quantise(x[None], "bf16"), "bf16"), "bf16")[0]
        return _nearest(x, _LIMITS[kind])

    def _layer(self, index: int) -> _Layer:
        """Kept until another is asked for, so that windows which go through the layers together share it."""
        if self._kept is None or self._kept[0] != index:
            self._kept = index, self._unpacked(index)
        return self._kept[1]

    def _unpacked(self, index: int) -> _Layer:
        plan = self._plan
        norms = plan.norms.reshape(-1, plan.hidden)
        first = [int(plan.groups[4 * index + group, 0]) for group in range(DOWN + 1)]
        query, key, value, out, gate, up, down = (
            self._matrix(first[group] + i, exact=group == QKV and i > 0)
            for group, count in ((QKV, 3), (1, 1), (GATE_UP, 2), (DOWN, 1))
            for i in range(count)
        )
        return _Layer(norms[2 * index], query, np.concatenate([key, value]), out, norms[2 * index + 1], gate, up, down)

    def _matrix(self, number: int, exact: bool) -> Floats:
        weights = self._plan.weights
        values = unpacked(weights, number)
        if exact or weights.matrices[number, KIND] in self._precision.keeps:
            return values
        return unpacked(packed([rounded(values, self._precision.rounds_to).placed()]), 0)


def _nearest(x: Floats, limit: float) -> Floats:
    """x, rounded to multiples of a step for each cell of 32, so that its largest is `limit` of them."""
    cells = x.reshape(-1, CELL)
    steps = np.maximum(np.abs(cells).max(axis=1, keepdims=True) / np.float32(limit), _TINY)
    return (np.rint(cells / steps) * steps).reshape(x.shape)


def _attend(query: Floats, key: Floats, value: Floats, out: Floats) -> None:
    """Causal attention of one group. query, out: [tokens, group, head_dim]; key, value: [tokens, head_dim]."""
    key, value = np.ascontiguousarray(key.T), np.ascontiguousarray(value)
    for first in range(0, len(query), _QUERIES):
        part = query[first : first + _QUERIES]
        count, group, dim = part.shape
        stop = first + count
        scores = (part.reshape(-1, dim) @ key[:, :stop]).reshape(count, group, stop)
        scores[:, :, first:] += np.triu(np.full((count, count), -np.inf, np.float32), 1)[:, None]
        scores -= scores.max(axis=2, keepdims=True)
        np.exp(scores, out=scores)
        weighted = (scores.reshape(-1, stop) @ value[:stop]).reshape(part.shape)
        out[first:stop] = weighted / scores.sum(axis=2, keepdims=True)
