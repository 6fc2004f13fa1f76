"""Streams of a layer whose channels are predicted from each other (`kv_chain`).

The values of such a stream stand group after group of 16 channels, within a group token after token. All else is as in
`kv_streams`. A layer's streams are coded one after the other, since each builds on what was learned before.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import simd
from prolepsis.kernels.kv_chain import GROUP, learn_group, predict_group
from prolepsis.kernels.kv_contexts import SLACK, classify, scale_of
from prolepsis.kernels.kv_raw import raw_size, read_raw, write_raw
from prolepsis.kernels.kv_streams import RAW, pack, unpack, used_up
from prolepsis.kernels.kv_tokens import count_tokens, write
from prolepsis.kernels.kv_values import decode
from prolepsis.kernels.rans import FEW_LANES, JIT, MAX_LANES, SMALL_STREAM

_u8, _u16, _f32, _i16, _i32, _i64, _u64 = np.uint8, np.uint16, np.float32, np.int16, np.int32, np.int64, np.uint64


class _Room(NamedTuple):
    """Room for what is made of a group, all but the last [tokens * 16 + SLACK]; shifts [tokens]."""

    predictions: NDArray[np.float32]
    values: NDArray[np.float32]
    scales: NDArray[np.int16]
    contexts: NDArray[np.uint8]
    centres: NDArray[np.uint16]
    symbols: NDArray[np.uint8]
    scalars: NDArray[np.uint16]
    shifts: NDArray[np.int32]


@njit(**JIT)
def _new_room(tokens):
    n = tokens * GROUP + SLACK
    return _Room(
        np.zeros(n, _f32), np.zeros(n, _f32), np.zeros(n, _i16), np.zeros(n, _u8), np.zeros(n, _u16), np.zeros(n, _u8),
        np.zeros(n, _u16), np.zeros(tokens, _i32),
    )  # fmt: skip


@njit(**JIT)
def _begin_group(g, tables, work, form, room):
    """Contexts and centres of a group's values."""
    shifts, scales, codes = room.shifts, room.scales, tables.codes
    predict_group(g, tables, work, room.predictions, shifts)
    for t in range(len(shifts)):
        for j in range(GROUP):
            scales[t * GROUP + j] = scale_of(codes[GROUP * g + j], shifts[t])
    classify(room.predictions, scales, len(shifts) * GROUP, form, room.contexts, room.centres)


@njit(**JIT)
def _end_group(g, tables, work, floats, room):
    """Learn from a group's scalars."""
    heads, tokens = len(work.units), len(room.shifts)
    scalars, values = room.scalars, room.values
    for i in range(tokens * GROUP):
        values[i] = floats[scalars[i]]
    if heads > 0:
        _from_units(work.units[g * heads // len(tables.pairs)], values)
    learn_group(g, tables, work, values)


@njit(**JIT)
def _from_units(units, values):
    for t in range(len(units)):
        unit = units[t] if units[t] < _f32(np.inf) else _f32(0)
        for j in range(GROUP):
            values[t * GROUP + j] *= unit


@njit(**JIT)
def _take(plane, order, g, scalars):
    flat, row = plane.reshape(-1), plane.shape[1]
    for t in range(len(plane)):
        for j in range(GROUP):
            scalars[t * GROUP + j] = flat[t * row + order[GROUP * g + j]]


@njit(**JIT)
def _put(scalars, order, g, plane):
    flat, row = plane.reshape(-1), plane.shape[1]
    for t in range(len(plane)):
        for j in range(GROUP):
            flat[t * row + order[GROUP * g + j]] = scalars[t * GROUP + j]


@njit(**JIT)
def count_chain_stream(plane, begin, end, tables, work, floats, form, octaves, counts, squares):
    """Add the tokens of groups begin ... end - 1 to counts: int64 [contexts, alphabet], and the squared errors before
    RoPE to squares: float64 [channels]. Other arguments as `encode_chain_stream`."""
    tokens, room, guesses = len(plane), _new_room(len(plane)), work.guesses
    for g in range(begin, end):
        _begin_group(g, tables, work, form, room)
        _take(plane, tables.order, g, room.scalars)
        count_tokens(room.scalars, room.contexts, room.centres, tokens * GROUP, octaves, form[0], counts)
        _end_group(g, tables, work, floats, room)
        for t in range(tokens):
            for j in range(GROUP):
                error = np.float64(room.values[t * GROUP + j]) - np.float64(guesses[t, j])
                squares[GROUP * g + j] += error * error


@njit(**JIT)
def _lanes(tokens, groups):
    """Every group must begin with the first lane."""
    whole = tokens * GROUP % MAX_LANES == 0 and tokens * GROUP * groups >= SMALL_STREAM
    return _i64(MAX_LANES if whole else FEW_LANES)


@njit(**JIT)
def encode_chain_stream(plane, begin, end, tables, work, floats, form, octaves, table, entries, bits, out, scalars):
    """Code groups begin ... end - 1 of a layer, which lie in `plane`, into `out`; returns the bytes used.

    plane: uint16 [tokens, row], scalars of the layer's K or V. floats: float32 [65536], the value of each scalar.
    scalars: uint16 [n], filled with the stream's, in its order. Other arguments as `kv_streams.encode_stream`.
    """
    tokens, room = len(plane), _new_room(len(plane))
    count, n = tokens * GROUP, tokens * GROUP * (end - begin)
    p, held, filled = _i64(0), _u64(0), _u64(0)
    for g in range(begin, end):
        at = (g - begin) * count
        _begin_group(g, tables, work, form, room)
        _take(plane, tables.order, g, room.scalars)
        scalars[at : at + count] = room.scalars[:count]
        p, held, filled = write(
            room.scalars, room.contexts, room.centres, count, octaves, form[0],
            table, entries[at:], bits, p, held, filled,
        )  # fmt: skip
        _end_group(g, tables, work, floats, room)
    simd.store_u64(bits, p, held)
    raw_bytes = p + _i64((filled + _u64(7)) >> _u64(3))
    size = pack(entries, n, bits, raw_bytes, _lanes(tokens, end - begin), form, out)
    if size > 0:
        return size
    simd.store_u32(out, 0, np.uint32(RAW))
    write_raw(scalars, 0, n, form, out, 4, 0)
    return 4 + raw_size(n, form)


@njit(**JIT)
def decode_chain_stream(data, first, last, plane, begin, end, tables, work, floats, form, bins, table, scalars):
    """Decode groups begin ... end - 1 of a layer from bytes first ... last - 1; False where they are not well formed.

    scalars: uint16 [n], filled in the stream's order; plane: uint16 [tokens, row], filled where they belong. Whatever
    the bytes, nothing outside the arrays is read or written. Other arguments as `kv_streams.decode_stream`.
    """
    tokens, room = len(plane), _new_room(len(plane))
    count, n = tokens * GROUP, tokens * GROUP * (end - begin)
    states = np.zeros(MAX_LANES, np.uint32)
    lanes, p, raw = unpack(data, first, last, n, form, states)
    if lanes < 0 or count % max(1, lanes) != 0:
        return False
    if lanes == 0:
        read_raw(data, p, 0, n, form, scalars, 0)
    position, bound = _i64(0), 8 * (last - raw)
    for g in range(begin, end):
        at = (g - begin) * count
        _begin_group(g, tables, work, form, room)
        if lanes == 0:
            room.scalars[:count] = scalars[at : at + count]
        else:
            p, position = decode(
                data, p, raw, position, bound, states, lanes, room.contexts, room.centres, count, table, bins,
                room.symbols, room.scalars,
            )  # fmt: skip
            if p < 0:
                return False
            scalars[at : at + count] = room.scalars[:count]
        _put(room.scalars, tables.order, g, plane)
        _end_group(g, tables, work, floats, room)
    return lanes == 0 or used_up(states, lanes, p, raw, position, last)
