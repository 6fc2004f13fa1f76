"""kivi4 for the codec: its runs as heads of KIVI_RUN values, and what is predicted of values as predictions of codes.

Runs are in the order of `KiviKV`: a row is KIVI_RUN tokens, in which a head has head_dim runs.
"""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import KIVI_RUN, KiviKV, quantise, to_float
from prolepsis.coding.predictors import Prediction, Segment
from prolepsis.coding.uniform_grid import FARTHEST, units_of

_ZERO = 8  # what a code is less as a scalar


def rows_of(segment: Segment) -> Segment:
    """The rows of a segment, as tokens."""
    return Segment(segment.start // KIVI_RUN, segment.count // KIVI_RUN)


def to_scalars(kv: KiviKV) -> NDArray[np.uint16]:
    """uint16 [layers, 2, rows, kv_heads * head_dim, KIVI_RUN]: of each code less 8, the scalar of an int4."""
    layers, _, rows, heads, dim, _ = kv.codes.shape
    numbers = _codes(kv).astype(np.int16) - _ZERO
    scalars = (numbers ^ (numbers >> 15 & 0x7FFF)).view(np.uint16)
    return scalars.reshape(layers, 2, rows, heads * dim, KIVI_RUN)


def from_scalars(scalars: NDArray[np.uint16], steps: NDArray[np.uint16], minimums: NDArray[np.uint16]) -> KiviKV:
    """The inverse of `to_scalars`, with steps and minimums [layers, 2, rows, kv_heads, head_dim]."""
    numbers = scalars.view(np.int16)
    codes = ((numbers ^ (numbers >> 15 & 0x7FFF)) + _ZERO).astype(np.uint8)
    low, high = np.split(codes.reshape(*steps.shape, KIVI_RUN), 2, axis=-1)
    return KiviKV((low | high << 4).astype(np.uint8), steps, minimums)


def _codes(kv: KiviKV) -> NDArray[np.uint8]:
    """[..., KIVI_RUN]."""
    return np.concatenate([kv.codes & 15, kv.codes >> 4], axis=-1)


def to_bf16(kv: KiviKV) -> NDArray[np.uint16]:
    """What attention reads: bf16 bits [layers, 2, tokens, kv_heads, head_dim]."""
    steps, minimums = (_finite(array)[..., None] for array in (kv.steps, kv.minimums))
    values = np.stack([_of_layer(*layer) for layer in zip(_codes(kv), steps, minimums, strict=True)])
    layers, _, rows, heads, dim, _ = values.shape
    out = np.empty((layers, 2, rows, KIVI_RUN, heads, dim), np.uint16)
    out[:, 0] = values[:, 0].transpose(0, 1, 4, 2, 3)
    out[:, 1] = values[:, 1].reshape(layers, rows, heads, KIVI_RUN, dim).swapaxes(2, 3)
    return out.reshape(layers, 2, rows * KIVI_RUN, heads, dim)


def _of_layer(
    codes: NDArray[np.uint8], steps: NDArray[np.float32], minimums: NDArray[np.float32]
) -> NDArray[np.uint16]:
    values = quantise(codes.astype(np.float32) * steps + minimums, "bf16")
    assert isinstance(values, np.ndarray)
    return values.astype(np.uint16)


def _finite(halfs: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Values of fp16 bits, 0 for what is no finite number."""
    values = to_float(halfs, "fp16")
    return np.where(np.isfinite(values), values, np.float32(0))


def _in_runs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[layers, 2, tokens, kv_heads, head_dim] in the order of runs: [layers, 2, rows, kv_heads, head_dim, KIVI_RUN]."""
    layers, _, tokens, heads, dim = values.shape
    rows = tokens // KIVI_RUN
    cut = values.reshape(layers, 2, rows, KIVI_RUN, heads, dim)
    out = np.empty((layers, 2, rows, heads, dim, KIVI_RUN), values.dtype)
    out[:, 0] = cut[:, 0].transpose(0, 1, 3, 4, 2)
    out[:, 1] = cut[:, 1].swapaxes(2, 3).reshape(layers, rows, heads, dim, KIVI_RUN)
    return out


def on_runs(prediction: Prediction, steps: NDArray[np.uint16], minimums: NDArray[np.uint16]) -> Prediction:
    """A prediction of values as one of scalars: what `uniform_grid.on_grid` is for integers that lie around 0.

    steps, minimums: fp16 bits [layers, 2, rows, kv_heads, head_dim]. The shifts of the prediction are None.
    """
    layers, _, rows, heads, dim = steps.shape
    divisors, shifts = units_of(steps)
    means = _in_runs(prediction.turned_means(rows * KIVI_RUN))
    means -= _finite(minimums)[..., None]
    with np.errstate(over="ignore"):
        means /= divisors[..., None]
    means -= np.float32(_ZERO)
    np.clip(means, -FARTHEST, FARTHEST, out=means)
    # The channels of a head beside each other, for each of the tokens.
    scales = np.empty((layers, 2, heads, dim, KIVI_RUN), np.int32)
    scales[:, 0] = prediction.scales[:, 0, ..., None]
    by_token = scales[:, 1].reshape(layers, heads, KIVI_RUN, dim)
    by_token[...] = prediction.scales[:, 1, :, None]
    scales[:, 1] = by_token.reshape(layers, heads, dim, KIVI_RUN)
    whole = heads * dim
    return Prediction(
        means.reshape(layers, 2, rows, whole, KIVI_RUN),
        scales.reshape(layers, 2, whole, KIVI_RUN),
        shifts.reshape(layers, 2, rows, whole),
    )


def alike_for_tokens(statistics: NDArray[np.float64]) -> NDArray[np.float64]:
    """Statistics of steps or minimums [layers, 2, kv_heads, head_dim], V's averaged over the tokens of a row, which
    differ by chance alone. So many equal numbers take few bytes."""
    layers, _, heads, dim = statistics.shape
    out = statistics.copy()
    by_token = statistics[:, 1].reshape(layers, heads, KIVI_RUN, dim // KIVI_RUN)
    out[:, 1] = np.broadcast_to(by_token.mean(axis=2, keepdims=True), by_token.shape).reshape(layers, heads, dim)
    return out
