"""Some layers of a segment as streams of bytes, coded side by side in threads.

Streams stand in the order of layers, K before V, then groups of heads.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.predictors import Prediction
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.threads import for_each
from prolepsis.kernels import kv_streams
from prolepsis.kernels.kv_streams import Guess
from prolepsis.kernels.rans import READ_AHEAD

_WIDEST_ROW = 512  # values of one token in a stream: enough symbols for 32 lanes, few enough for the caches


def heads_per_stream(kv_heads: int, head_dim: int) -> int:
    """The most heads that divide `kv_heads` and keep a stream's row within 512 values; at least 1."""
    fitting = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n * head_dim <= _WIDEST_ROW]
    return max(fitting, default=1)


class _Place(NamedTuple):
    """Where a stream's values are: in which matrix, from which column on, and how many columns."""

    matrix: int
    column: int
    row: int


def _places(values: NDArray[np.uint16], group: int) -> list[_Place]:
    layers, _, _, heads, dim = values.shape
    return [_Place(m, c, group * dim) for m in range(2 * layers) for c in range(0, heads * dim, group * dim)]


def encode_layers(
    values: NDArray[np.uint16], prediction: Prediction, tables: TokenTables, group: int
) -> list[NDArray[np.uint8]]:
    """Bytes of each stream. values: uint16 [layers, 2, tokens, kv_heads, head_dim]."""
    matrices, guesses = _matrices(values), _guesses(prediction)
    places = _places(values, group)
    out: list[NDArray[np.uint8]] = [np.empty(0, np.uint8)] * len(places)
    rooms: list[tuple[NDArray, NDArray, NDArray]] = []  # that no thread is using
    symbols = values.shape[2] * group * values.shape[4]
    table = tables.encode

    def work(s: int) -> None:
        m, column, row = places[s]
        try:
            room = rooms.pop()
        except IndexError:
            room = kv_streams.encoding_room(symbols)
        size = kv_streams.encode_stream(matrices[m], column, row, guesses[m], tables.form, tables.octaves, table, *room)
        out[s] = room[-1][:size].copy()
        rooms.append(room)

    for_each(len(places), work)
    return out


def count_layers(
    values: NDArray[np.uint16], prediction: Prediction, tables: TokenTables, group: int
) -> NDArray[np.int64]:
    """How often each token occurs in each context, in each layer's K and V: int64 [layers * 2, contexts, 128]."""
    matrices, guesses = _matrices(values), _guesses(prediction)
    places = _places(values, group)
    counts = np.zeros((len(places), *tables.frequencies.shape), np.int64)

    def work(s: int) -> None:
        m, column, row = places[s]
        kv_streams.count_stream(matrices[m], column, row, guesses[m], tables.form, tables.octaves, counts[s])

    for_each(len(places), work)
    return counts.reshape(len(matrices), -1, *tables.frequencies.shape).sum(axis=1)


def decode_layers(
    data: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    prediction: Prediction,
    tables: TokenTables,
    group: int,
    out: NDArray[np.uint16],
) -> NDArray[np.bool_]:
    """Decode into `out`: uint16 [layers, 2, tokens, kv_heads, head_dim], contiguous but for the first two dimensions.

    data: holds the streams, then READ_AHEAD bytes of anything. begins, ends: where each lies. Returns whether each
    stream was well formed; what is in `out` of one that was not means nothing.
    """
    if len(data) < int(ends.max()) + READ_AHEAD:
        raise ValueError("streams without room to read ahead")
    if not out[0, 0].flags.c_contiguous:
        raise ValueError("values that are not contiguous cannot be decoded in place")
    matrices, guesses = _matrices(out), _guesses(prediction)
    places = _places(out, group)
    sound = np.zeros(len(places), np.bool_)
    table = tables.decode

    def work(s: int) -> None:
        m, column, row = places[s]
        sound[s] = kv_streams.decode_stream(
            data, begins[s], ends[s], guesses[m], tables.form, tables.bins, table, matrices[m], column, row
        )

    for_each(len(places), work)
    return sound


def values_of(layers: NDArray[np.uint16], group: int) -> Iterator[NDArray[np.uint16]]:
    """The values of each stream, contiguous: uint16 [tokens, group * head_dim]. layers: as `out` of `decode_layers`."""
    matrices, tokens = _matrices(layers), layers.shape[2]
    for m, column, row in _places(layers, group):
        yield np.ascontiguousarray(matrices[m].reshape(tokens, -1)[:, column : column + row])


def _matrices(values: NDArray[np.uint16]) -> list[NDArray[np.uint16]]:
    """Each layer's K and V, uint16 [tokens * kv_heads * head_dim], not copied."""
    return [matrix.reshape(-1) for layer in values for matrix in layer]


def _guesses(prediction: Prediction) -> list[Guess]:
    """What the kernels must know to predict each layer's K and V."""
    means, scales, shifts, turn = prediction
    count, dim = 2 * len(means), means.shape[-1]
    flat = np.ascontiguousarray(means).reshape(count, -1)
    codes = np.ascontiguousarray(scales).reshape(count, -1)
    moved = np.empty((count, 0), np.int32) if shifts is None else np.ascontiguousarray(shifts).reshape(count, -1)
    nothing = np.empty(0, np.float32)
    still = Guess(flat[0], nothing, nothing, 0, False, codes[0], moved[0], dim)
    turned = still
    if turn is not None:
        cos, sin = np.ascontiguousarray(turn.cos), np.ascontiguousarray(turn.sin)
        turned = still._replace(cos=cos.reshape(-1), sin=sin.reshape(-1), pairs=cos.shape[1], half=turn.half)
    return [
        (still if m % 2 else turned)._replace(means=flat[m], scales=codes[m], shifts=moved[m]) for m in range(count)
    ]
