"""One stream of coded KV. No function here holds the interpreter's lock, so streams run side by side in threads.

Stream = the values of some KV heads of one layer's K or V over the tokens of a segment, row after row: columns of a
matrix [tokens, width], which holds all heads. Bytes of a stream: uint32 number of 16-bit words and how many lanes they
have, the words (`rans`), the raw bits (`kv_tokens`). A stream that would not be smaller than its values is stored as
they are, with RAW in place of the number.
"""

from math import gcd
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import simd
from prolepsis.kernels.kv_contexts import SLACK, classify, move_scales, scale_of
from prolepsis.kernels.kv_raw import raw_size, read_raw, write_raw
from prolepsis.kernels.kv_static import turn_head
from prolepsis.kernels.kv_tokens import count_tokens, write
from prolepsis.kernels.kv_values import decode
from prolepsis.kernels.rans import FEW_LANES, JIT, MAX_LANES, SMALL_STREAM, encode, read_states

RAW = 0xFFFFFFFF
_FEW = 1 << 31  # set in the number of words: the stream has FEW_LANES, though it has many symbols
_WORTH = 100  # times what fewer lanes save: longer streams keep many lanes, since they are faster
_LANE_COST = 3  # bytes of a lane's state that say nothing
_MARGIN = 64  # bytes of a vector
_CHUNK = 4096  # values handled at a time, about: they stay in the nearest cache

_u8, _u16, _f32, _i16, _i32, _i64, _u32, _u64 = (
    np.uint8, np.uint16, np.float32, np.int16, np.int32, np.int64, np.uint32, np.uint64,
)  # fmt: skip
_load = simd.loader(simd.I32x16)


class Guess(NamedTuple):
    """What a predictor says of one layer's K or V over the tokens of a segment; all arrays of one dimension.

    means: float32 [width, or tokens * width], of all tokens or of each. cos, sin: float32 [tokens * pairs], by which
    means are turned (`kv_static.turn_head`); pairs: 0 where they are not. scales: int32 [width], scale codes. shifts:
    int32 [tokens * heads, or 0], what to add to them.
    """

    means: NDArray[np.float32]
    cos: NDArray[np.float32]
    sin: NDArray[np.float32]
    pairs: int
    half: bool
    scales: NDArray[np.int32]
    shifts: NDArray[np.int32]
    head_dim: int


class _Chunk(NamedTuple):
    """Room for some rows of a stream."""

    predictions: NDArray[np.float32]
    unmoved: NDArray[np.int16]
    scales: NDArray[np.int16]
    contexts: NDArray[np.uint8]
    centres: NDArray[np.uint16]
    tokens: NDArray[np.uint8]
    values: NDArray[np.uint16]


def encoding_room(symbols: int) -> tuple[NDArray[np.uint32], NDArray[np.uint8], NDArray[np.uint8]]:
    """`entries`, `bits` and `out` for `encode_stream`."""
    room = np.empty(2 * symbols + 2 * _MARGIN, np.uint8), np.empty(4 * symbols + 4 * MAX_LANES + 2 * _MARGIN, np.uint8)
    return np.empty(symbols + SLACK, np.uint32), *room


@njit(**JIT)
def _new_chunk(rows, row):
    n = rows * row + SLACK
    return _Chunk(
        np.empty(n, _f32),
        np.empty(row + SLACK, _i16),
        np.empty(n, _i16),
        np.empty(n, _u8),
        np.empty(n, _u16),
        np.empty(n, _u8),
        np.empty(n, _u16),
    )


@njit(**JIT)
def _chunk_rows(row):
    """Rows handled at a time: whole groups of MAX_LANES values."""
    least = MAX_LANES // gcd(row, MAX_LANES)
    return least * max(1, _CHUNK // (least * row))


@njit(**JIT)
def _fill_scales(guess, column, row, first, rows, chunk):
    """Scales of some rows: the same in each, or moved by the shifts of each token's heads."""
    dim, heads = guess.head_dim, guess.scales.size // guess.head_dim
    if first == 0:
        for c in range(row):
            chunk.unmoved[c] = scale_of(guess.scales[column + c], _i32(0))
    for r in range(rows):
        if guess.shifts.size > 0:
            shifts = (first + r) * heads + column // dim
            for h in range(row // dim):
                move_scales(chunk.unmoved, h * dim, dim, guess.shifts[shifts + h], chunk.scales, r * row + h * dim)
        elif first == 0:
            simd.copy_bytes(chunk.scales, r * row, chunk.unmoved, 0, 2 * row)


@njit(**JIT)
def _fill_predictions(guess, column, row, first, rows, predictions):
    """Predictions of some rows."""
    dim, width, pairs = guess.head_dim, guess.scales.size, guess.pairs
    for r in range(rows):
        t = first + r
        start = column + (t * width if guess.means.size > width else 0)
        for at in range(0, row, dim):
            turn_head(
                guess.means, start + at, dim, guess.cos, guess.sin, t * pairs, pairs, guess.half,
                predictions, r * row + at,
            )  # fmt: skip


@njit(**JIT)
def _classify_rows(guess, column, row, first, rows, form, chunk):
    """Contexts and centres of some rows."""
    shifted, same = guess.shifts.size > 0, guess.means.size == guess.scales.size and guess.pairs == 0
    if same and not shifted and first > 0:
        return
    _fill_scales(guess, column, row, first, rows, chunk)
    if not same or first == 0:
        _fill_predictions(guess, column, row, first, rows, chunk.predictions)
    classify(chunk.predictions, chunk.scales, rows * row, form, chunk.contexts, chunk.centres)


@njit(**JIT)
def _take(matrix, width, column, row, first, rows, out):
    """Copy some rows of a stream out of its matrix."""
    for r in range(rows):
        simd.copy_bytes(out, r * row, matrix, (first + r) * width + column, 2 * row)


@njit(**JIT)
def _put(values, matrix, width, column, row, first, rows):
    """Copy some rows of a stream into its matrix."""
    for r in range(rows):
        simd.copy_bytes(matrix, (first + r) * width + column, values, r * row, 2 * row)


@njit(**JIT)
def _move(source, begin, count, target, to):
    """Copy bytes, to lower addresses where both are in one array; fewer than _MARGIN more are read and overwritten."""
    for i in range(0, count, _MARGIN):
        simd.store(target, to + i, _load(source, begin + i))


@njit(**JIT)
def count_stream(matrix, column, row, guess, form, octaves, counts):
    """Add the stream's tokens to counts: int64 [contexts, alphabet]. Other arguments as `encode_stream`."""
    step, width = _chunk_rows(row), guess.scales.size
    chunk, tokens = _new_chunk(step, row), matrix.size // width
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        _classify_rows(guess, column, row, first, rows, form, chunk)
        _take(matrix, width, column, row, first, rows, chunk.values)
        count_tokens(chunk.values, chunk.contexts, chunk.centres, rows * row, octaves, form[0], counts)


@njit(**JIT)
def _write(matrix, column, row, guess, form, octaves, table, entries, bits):
    """Entries of all tokens for `rans.encode`, and the raw bits; returns how many bytes these are."""
    step, width = _chunk_rows(row), guess.scales.size
    chunk, tokens = _new_chunk(step, row), matrix.size // width
    p, held, filled = _i64(0), _u64(0), _u64(0)
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        _classify_rows(guess, column, row, first, rows, form, chunk)
        _take(matrix, width, column, row, first, rows, chunk.values)
        p, held, filled = write(
            chunk.values, chunk.contexts, chunk.centres, rows * row, octaves, form[0],
            table, entries[first * row :], bits, p, held, filled,
        )  # fmt: skip
    simd.store_u64(bits, p, held)
    return p + _i64((filled + _u64(7)) >> _u64(3))


@njit(**JIT)
def pack(entries, n, bits, raw_bytes, lanes, form, out):
    """Put a stream of n symbols together in `out`, with `lanes` or, where so many cost too much, with FEW_LANES.

    Returns the bytes used, or 0 where its values as they are would take no more. entries, bits, out: `encoding_room`,
    filled by `kv_tokens.write`; raw_bytes: the bytes of `bits` that count.
    """
    top = out.size - _MARGIN
    words = top - encode(entries, n, lanes, out, top)
    if lanes > FEW_LANES and words < _WORTH * _LANE_COST * (lanes - FEW_LANES):
        lanes = _i64(FEW_LANES)
        words = top - encode(entries, n, lanes, out, top)
    size = 4 + words + raw_bytes
    if size >= raw_size(n, form):
        return _i64(0)
    flag = _i64(_FEW) if lanes == FEW_LANES and n >= SMALL_STREAM else _i64(0)
    simd.store_u32(out, 0, _u32(flag | (words >> 1)))
    _move(out, top - words, words, out, 4)
    _move(bits, 0, raw_bytes, out, 4 + words)
    return size


@njit(**JIT)
def unpack(data, begin, end, n, form, states):
    """(lanes, byte behind the states, byte where the raw bits begin) of a stream of n symbols; fills `states`.

    No lanes: from the second place on, the values as they are. Lanes below 0: it is no stream. data: uint8 with
    rans.READ_AHEAD bytes behind `end`, which is below 2**31.
    """
    nothing = _i64(-1), begin, begin
    if end - begin < 4:
        return nothing
    words = _i64(simd.load_u32(data, begin))
    if words == RAW:
        return (_i64(0), begin + 4, end) if end - begin == 4 + raw_size(n, form) else nothing
    lanes = _i64(FEW_LANES if n < SMALL_STREAM or words & _FEW else MAX_LANES)
    words &= _FEW - 1
    bits = begin + 4 + 2 * words
    if words < 2 * lanes or bits > end:
        return nothing
    return lanes, read_states(data, begin + 4, states, lanes), bits


@njit(**JIT)
def used_up(states, lanes, p, bits, position, end):
    """Whether a decoded stream ends as its encoder began it: words up to `bits`, raw bits up to byte `end`."""
    whole = p == bits and (position + 7) >> 3 == end - bits
    for j in range(lanes):
        whole = whole and states[j] == _u32(1 << 16)
    return whole


@njit(**JIT)
def encode_stream(matrix, column, row, guess, form, octaves, table, entries, bits, out):
    """Code one stream into `out`; returns the bytes used.

    matrix: uint16 [tokens * width], of which columns column ... column + row - 1 are the stream's. form:
    `kv_contexts.form_of`. octaves: `kv_tokens.octave_starts`. table: `rans.encode_table`. entries, bits, out:
    `encoding_room`.
    """
    width = guess.scales.size
    tokens = matrix.size // width
    n = tokens * row
    raw_bytes = _write(matrix, column, row, guess, form, octaves, table, entries, bits)
    size = pack(entries, n, bits, raw_bytes, _i64(MAX_LANES if n >= SMALL_STREAM else FEW_LANES), form, out)
    if size > 0:
        return size
    simd.store_u32(out, 0, _u32(RAW))
    for t in range(tokens):
        write_raw(matrix, t * width + column, row, form, out, 4, t * row)
    return 4 + raw_size(n, form)


@njit(**JIT)
def decode_stream(data, begin, end, guess, form, bins, table, matrix, column, row):
    """Decode one stream into its columns of `matrix`; False when it is not well formed.

    data: uint8 with rans.READ_AHEAD bytes behind `end`, which is below 2**31. bins: `kv_tokens.token_bins`. table:
    `rans.decode_table`. Whatever the bytes, nothing outside the arrays is read or written. Other arguments as
    `encode_stream`.
    """
    width = guess.scales.size
    tokens = matrix.size // width
    states = np.empty(MAX_LANES, _u32)
    lanes, p, bits = unpack(data, begin, end, tokens * row, form, states)
    if lanes == 0:
        for t in range(tokens):
            read_raw(data, p, t * row, row, form, matrix, t * width + column)
    if lanes <= 0:
        return lanes == 0
    position, last, step = _i64(0), 8 * (end - bits), _chunk_rows(row)
    chunk = _new_chunk(step, row)
    for first in range(0, tokens, step):
        rows = min(step, tokens - first)
        _classify_rows(guess, column, row, first, rows, form, chunk)
        p, position = decode(
            data, p, bits, position, last, states, lanes, chunk.contexts, chunk.centres, rows * row, table, bins,
            chunk.tokens, chunk.values,
        )  # fmt: skip
        if p < 0:
            return False
        _put(chunk.values, matrix, width, column, row, first, rows)
    return used_up(states, lanes, p, bits, position, end)
