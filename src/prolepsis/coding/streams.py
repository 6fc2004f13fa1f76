"""Some layers of a segment as streams of bytes, coded side by side in threads."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.predictors import Prediction
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.threads import for_each
from prolepsis.kernels import kv_streams
from prolepsis.kernels.rans import READ_AHEAD

_WIDEST_ROW = 512  # values of one token in a stream: enough symbols for 32 lanes, few enough for the caches


def heads_per_stream(kv_heads: int, head_dim: int) -> int:
    """The most heads that divide `kv_heads` and keep a stream's row within 512 values; at least 1."""
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n * head_dim <= _WIDEST_ROW]
    return max(fitting, default=1)


def encode_layers(
    values: NDArray[np.uint16], prediction: Prediction, tables: TokenTables, group: int
) -> list[NDArray[np.uint8]]:
    """Bytes of each stream, in the order of `split`. values: uint16 [layers, 2, tokens, kv_heads, head_dim]."""
    streams, means, scales = _prepare(values, prediction, group)
    out: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)] * len(streams)

    def work(s: int) -> None:
        buffer = np.empty(kv_streams.capacity(streams[s].size), np.uint8)
        size = kv_streams.encode_stream(
            streams[s], means[s], scales[s], tables.form, tables.octaves, tables.layout, *tables.encode, buffer
        )
        out[s] = buffer[:size].copy()

    _ = tables.encode  # built once, before threads ask for it
    for_each(len(streams), work)
    return out


def count_layers(
    values: NDArray[np.uint16], prediction: Prediction, tables: TokenTables, group: int
) -> NDArray[np.int64]:
    """How often each token occurs in each context: int64 [contexts, 128]."""
    streams, means, scales = _prepare(values, prediction, group)
    counts = np.zeros((len(streams), *tables.frequencies.shape), np.int64)
    for_each(
        len(streams),
        lambda s: kv_streams.count_stream(streams[s], means[s], scales[s], tables.form, tables.octaves, counts[s]),
    )
    return counts.sum(axis=0)


def decode_layers(
    data: NDArray[np.uint8],
    ends: NDArray[np.int64],
    prediction: Prediction,
    tables: TokenTables,
    group: int,
) -> tuple[NDArray[np.uint16], NDArray[np.bool_]]:
    """(values of each stream: uint16 [streams, tokens, row], whether each was well formed).

    data: the streams one after the other, then READ_AHEAD bytes of anything. ends: where each ends.
    """
    layers, _, tokens, heads, dim = prediction.means.shape
    count = layers * 2 * (heads // group)
    values = np.zeros((count, tokens, group * dim), np.uint16)
    sound = np.zeros(count, np.bool_)
    means, scales = split(prediction.means.view(np.uint32), group), _split_scales(prediction.scales, group)
    begins = np.concatenate([[0], ends[:-1]])
    if len(data) < int(ends[-1]) + READ_AHEAD:
        raise ValueError("streams without room to read ahead")
    table = tables.decode

    def work(s: int) -> None:
        sound[s] = kv_streams.decode_stream(
            data, begins[s], ends[s], means[s], scales[s], tables.form, tables.layout, table, values[s]
        )

    for_each(count, work)
    return values, sound


def split(layers: NDArray, group: int) -> NDArray:
    """[layers, 2, tokens, heads, dim] -> [streams, tokens, group * dim]: streams by layer, K before V, heads."""
    count, _, tokens, heads, dim = layers.shape
    parts = layers.reshape(count, 2, tokens, heads // group, group * dim).transpose(0, 1, 3, 2, 4)
    return np.ascontiguousarray(parts).reshape(-1, tokens, group * dim)


def join(streams: NDArray, kv_heads: int, head_dim: int) -> NDArray:
    """The inverse of `split`."""
    _, tokens, row = streams.shape
    parts = streams.reshape(-1, 2, kv_heads * head_dim // row, tokens, row).transpose(0, 1, 3, 2, 4)
    return parts.reshape(-1, 2, tokens, kv_heads, head_dim)


def _split_scales(scales: NDArray[np.int32], group: int) -> NDArray[np.int32]:
    return np.ascontiguousarray(scales).reshape(-1, group * scales.shape[-1])


def _prepare(
    values: NDArray[np.uint16], prediction: Prediction, group: int
) -> tuple[NDArray[np.uint16], NDArray[np.uint32], NDArray[np.int32]]:
    means = split(prediction.means.view(np.uint32), group)
    return split(values, group), means, _split_scales(prediction.scales, group)
