"""A layer whose channels are predicted from each other, as streams of bytes: what `streams` is for other predictions.

The streams of a layer follow each other; threads work on other segments meanwhile.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.cache_dtypes import DType, moderate_values
from prolepsis.coding.predictors import Chain
from prolepsis.coding.tables import TokenTables
from prolepsis.coding.threads import pause
from prolepsis.kernels import kv_chain_streams, kv_streams
from prolepsis.kernels.kv_chain import GROUP
from prolepsis.kernels.rans import READ_AHEAD

Scalars = NDArray[np.uint16]


class ChainStream(NamedTuple):
    """A stream's bytes, uint8, and its scalars in the stream's order, uint16."""

    data: NDArray[np.uint8]
    scalars: Scalars


def _streams(layer: Scalars, group: int) -> list[tuple[Scalars, int, int]]:
    """Of each stream: its plane, uint16 [tokens, row], and its first group and the one behind its last."""
    _, tokens, heads, dim = layer.shape
    groups = group * dim // GROUP
    planes = layer.reshape(2, tokens, heads * dim)
    return [
        (planes[s * groups // (heads * dim // GROUP)], s * groups, (s + 1) * groups) for s in range(2 * heads // group)
    ]


def encode_layer(layer: Scalars, chain: Chain, dtype: DType, tables: TokenTables, group: int) -> list[ChainStream]:
    """The streams of a layer, uint16 [2, tokens, kv_heads, head_dim]."""
    floats, out = moderate_values(dtype), []
    for plane, begin, end in _streams(layer, group):
        n = len(plane) * GROUP * (end - begin)
        scalars, room = np.empty(n, np.uint16), kv_streams.encoding_room(n)
        size = kv_chain_streams.encode_chain_stream(
            plane, begin, end, *chain, floats, tables.form, tables.octaves, tables.encode, *room, scalars
        )
        out.append(ChainStream(room[-1][:size].copy(), scalars))
        pause()
    return out


def decode_layer(
    data: NDArray[np.uint8],
    begins: NDArray[np.int64],
    ends: NDArray[np.int64],
    layer: Scalars,
    chain: Chain,
    dtype: DType,
    tables: TokenTables,
    group: int,
) -> Iterator[tuple[Scalars, bool]]:
    """Fill `layer`, uint16 [2, tokens, kv_heads, head_dim], stream by stream.

    Yields each stream's scalars, in its order, and whether it was well formed; the next ones build on it. data: holds
    the streams, then READ_AHEAD bytes of anything. begins, ends: where each lies.
    """
    if len(data) < int(ends.max()) + READ_AHEAD:
        raise ValueError("streams without room to read ahead")
    floats = moderate_values(dtype)
    for (plane, begin, end), first, last in zip(_streams(layer, group), begins, ends, strict=True):
        n = len(plane) * GROUP * (end - begin)
        scalars = np.zeros(n, np.uint16)
        sound = kv_chain_streams.decode_chain_stream(
            data, first, last, plane, begin, end, *chain, floats, tables.form, tables.bins, tables.decode, scalars
        )
        yield scalars, sound


class ChainCount(NamedTuple):
    """How often each token occurs in each context, in K and in V, int64 [2, contexts, 128]; the squared errors before
    RoPE of each channel, in chain order, summed over the tokens: float64 [channels].
    """

    tokens: NDArray[np.int64]
    squared_errors: NDArray[np.float64]


def count_layer(layer: Scalars, chain: Chain, dtype: DType, tables: TokenTables, group: int) -> ChainCount:
    """What coding a layer, uint16 [2, tokens, kv_heads, head_dim], takes, without doing it."""
    places = _streams(layer, group)
    counts = np.zeros((2, *tables.frequencies.shape), np.int64)
    squares = np.zeros(chain.work.features.shape[1])
    for i, (plane, begin, end) in enumerate(places):
        kind = 2 * i // len(places)
        kv_chain_streams.count_chain_stream(
            plane, begin, end, *chain, moderate_values(dtype), tables.form, tables.octaves, counts[kind], squares
        )
    return ChainCount(counts, squares)
