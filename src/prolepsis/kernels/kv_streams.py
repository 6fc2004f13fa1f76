"""One stream of coded KV. No function here holds the interpreter's lock, so streams run side by side in threads.

Stream = the values of some KV heads of one layer's K or V over the tokens of a segment, row after row. Bytes of a
stream: uint32 number of 16-bit words, the words (`rans`), the raw bits (`kv_tokens`). A stream that would not be
smaller than its values is stored as they are, with RAW in place of the number.
"""

import numpy as np
from numba import njit

from prolepsis.kernels import simd
from prolepsis.kernels.kv_tokens import CHUNK_ROWS, classify, count_tokens, read, write_tokens
from prolepsis.kernels.rans import JIT, MAX_LANES, decode, encode, lane_count, read_states

RAW = 0xFFFFFFFF

_u8, _u16, _i32, _i64, _u32, _u64 = np.uint8, np.uint16, np.int32, np.int64, np.uint32, np.uint64


def capacity(symbols: int) -> int:
    """Bytes `encode_stream` may touch in its buffer."""
    return 4 * symbols + 4 * MAX_LANES + 128


@njit(**JIT)
def count_stream(values, predictions, scales, form, octaves, counts):
    """Add the stream's tokens to counts: int64 [contexts, alphabet]. Other arguments as `encode_stream`."""
    length, row = values.shape
    flat = values.reshape(length * row)
    contexts, centres = np.empty(CHUNK_ROWS * row, _u8), np.empty(CHUNK_ROWS * row, _i32)
    for first in range(0, length, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, length - first)
        classify(predictions, scales, first, rows, form[0], form[1], contexts, centres)
        count_tokens(flat[first * row :], centres, contexts, rows * row, octaves, form[0], counts)


@njit(**JIT)
def encode_stream(values, predictions, scales, form, octaves, layout, table, reciprocals, out):
    """Code one stream into `out`; returns the bytes used.

    values: uint16 [tokens, row]. predictions: uint32 (float32 bits) [tokens, row]. scales: int32 [row]. form: int32
    (mantissa bits, exponent bias). out: uint8 [capacity(tokens * row)].
    """
    length, row = values.shape
    n = length * row
    flat = values.reshape(n)
    contexts, tokens = np.empty(n, _u8), np.empty(n, _u8)
    centres = np.empty(CHUNK_ROWS * row, _i32)
    bits = np.empty(2 * n + 16, _u8)
    p, held, filled = _i64(0), _u64(0), _u64(0)
    for first in range(0, length, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, length - first)
        begin, count = first * row, rows * row
        classify(predictions, scales, first, rows, form[0], form[1], contexts[begin:], centres)
        p, held, filled = write_tokens(
            flat[begin:], centres, contexts[begin:], count, octaves, form[0],
            layout, table, tokens[begin:], bits, p, held, filled,
        )  # fmt: skip
    simd.store_u64(bits, p, held)
    p += _i64((filled + _u64(7)) >> _u64(3))
    top = out.size
    words = top - encode(tokens, contexts, n, lane_count(n), table, reciprocals, out, top)
    if 4 + words + p >= 2 * n:
        simd.store_u32(out, 0, _u32(RAW))
        for i in range(n):
            simd.store_u16(out, 4 + 2 * i, flat[i])
        return 4 + 2 * n
    simd.store_u32(out, 0, _u32(words >> 1))
    for i in range(words):  # downwards in memory, so an overlap is copied rightly
        out[4 + i] = out[top - words + i]
    for i in range(p):
        out[4 + words + i] = bits[i]
    return 4 + words + p


@njit(**JIT)
def decode_stream(data, begin, end, predictions, scales, form, layout, table, values):
    """Decode one stream into `values`; False when it is not well formed.

    data: uint8 with rans.READ_AHEAD bytes behind `end`, which is below 2**31. Whatever the bytes, nothing outside
    the arrays is read or written. Other arguments as `encode_stream`.
    """
    length, row = values.shape
    n = length * row
    if end - begin < 4:
        return False
    words = _i64(simd.load_u32(data, begin))
    flat = values.reshape(n)
    if words == RAW:
        if end - begin != 4 + 2 * n:
            return False
        for i in range(n):
            flat[i] = simd.load_u16(data, begin + 4 + 2 * i)
        return True
    lanes = lane_count(n)
    bits = begin + 4 + 2 * words
    if words < 2 * lanes or bits > end:
        return False
    states = np.empty(MAX_LANES, _u32)
    p = read_states(data, begin + 4, states, lanes)
    position, last = _i64(0), 8 * (end - bits)
    contexts, tokens = np.empty(CHUNK_ROWS * row, _u8), np.empty(CHUNK_ROWS * row, _u8)
    centres = np.empty(CHUNK_ROWS * row, _i32)
    for first in range(0, length, CHUNK_ROWS):
        rows = min(CHUNK_ROWS, length - first)
        count = rows * row
        classify(predictions, scales, first, rows, form[0], form[1], contexts, centres)
        p = decode(data, p, bits, states, lanes, contexts, count, table, tokens)
        if p < 0:
            return False
        position = read(tokens, centres, count, layout, data, bits, position, last, flat[first * row :])
        if position < 0:
            return False
    whole = p == bits and (position + 7) >> 3 == end - bits
    for j in range(lanes):
        whole = whole and states[j] == _u32(1 << 16)
    return whole
