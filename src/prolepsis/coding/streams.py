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
    """Where a stream's values are: in which matrix [tokens, kv_heads * head_dim], from which column on, how many."""

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
    matrices, guesses = _matrices(values), _guesses(prediction, values.shape[2])
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
    """How often each token occurs in each context: int64 [contexts, 128]."""
    matrices, guesses = _matrices(values), _guesses(prediction, values.shape[2])
    places = _places(values, group)
    counts = np.zeros((len(places), *tables.frequencies.shape), np.int64)

    def work(s: int) -> None:
        m, column, row = places[s]
        kv_streams.count_stream(matrices[m], column, row, guesses[m], tables.form, tables.octaves, counts[s])

    for_each(len(places), work)
    return counts.sum(axis=0)


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
    matrices, guesses = _matrices(out), _guesses(prediction, out.shape[2])
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
    matrices = _matrices(layers)
    for m, column, row in _places(layers, group):
        yield np.ascontiguousarray(matrices[m][:, column : column + row])


def _matrices(values: NDArray[np.uint16]) -> list[NDArray[np.uint16]]:
    """Each layer's K and V as [tokens, kv_heads * head_dim], not copied."""
    tokens = values.shape[2]
    return [matrix.reshape(tokens, -1) for layer in values for matrix in layer]


def _guesses(prediction: Prediction, tokens: int) -> list[Guess]:
    """What the kernels must know to predict each layer's K and V."""
    means, scales, shifts, turn = prediction
    heads, dim = means.shape[3:]
    width = heads * dim
    flat = np.ascontiguousarray(means).reshape(-1, means.shape[2], width)
    codes = np.ascontiguousarray(scales).reshape(-1, width)
    if shifts is None:
        moved = np.empty((len(flat), 0, heads), np.int32)
    else:
        moved = np.ascontiguousarray(shifts).reshape(-1, tokens, heads)
    still = np.empty((tokens, 0), np.float32)

    def guess(m: int) -> Guess:
        cos, sin = (turn.cos, turn.sin) if turn is not None and m % 2 == 0 else (still, still)
        return Guess(flat[m], cos, sin, turn is not None and turn.half, codes[m], moved[m], dim)

    return [guess(m) for m in range(len(flat))]
