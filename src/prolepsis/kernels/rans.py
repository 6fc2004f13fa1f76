"""Interleaved range asymmetric numeral systems: tokens to 16-bit words and back.

Symbol i belongs to lane i mod `lanes`; every lane is a 32-bit state in [2**16, 2**32) renormalised by 16-bit words,
with 12-bit probabilities. Encoding runs backwards and fills the buffer from its end, so that decoding reads forwards:
first the states of all lanes, then the words in the order the symbols need them. With AVX-512 (`encode_avx512`, and
`kv_values` for decoding) the bytes are the same.

Source: Duda 2013 (arXiv:1311.2540); Giesen 2014 (arXiv:1402.3392) for interleaving.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import avx512, simd

PROBABILITY_BITS = 12
PROBABILITY_ONE = 1 << PROBABILITY_BITS
ALPHABET = 128
MAX_LANES, FEW_LANES = 32, 4
SMALL_STREAM = 8192  # symbols; below it the 3 bytes a lane costs weigh more than the speed of vectors
READ_AHEAD = 128  # bytes that must exist, with any content, behind what the decoders are given

JIT = {"cache": True, "nogil": True, "error_model": "numpy"}

_u8, _u32 = np.uint8, np.uint32
_LOW = _u32(1 << 16)

_load8, _load16 = simd.loader(simd.I8x16), simd.loader(simd.I16x16)
_load32 = simd.loader(simd.I32x16)
_widen = simd.converter(simd.I32x16, "zext")
_narrow16 = simd.converter(simd.I16x16, "trunc")
_to_float, _to_int = simd.converter(simd.F32x16, "uitofp"), simd.converter(simd.I32x16, "fptosi")
_iota = simd.constant(simd.I32x16, range(16))


def decode_table(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """uint32 [contexts * 4096], one entry per (context, slot): token | offset in token << 7 | frequency << 19.

    `frequencies`: uint16 [contexts, 128], every row summing to 4096.
    """
    flat = frequencies.astype(np.int64)
    token = np.repeat(np.tile(np.arange(ALPHABET), len(flat)), flat.ravel())
    first = np.repeat((np.cumsum(flat, axis=1) - flat).ravel(), flat.ravel())
    offset = np.arange(token.size) % PROBABILITY_ONE - first
    return (token | offset << 7 | np.repeat(flat.ravel(), flat.ravel()) << 19).astype(np.uint32)


def encode_table(frequencies: NDArray[np.uint16]) -> NDArray[np.uint32]:
    """uint32 [contexts * 128], per (context, token): cumulative frequency | frequency << 16."""
    flat = frequencies.astype(np.uint32)
    start = np.cumsum(flat, axis=1, dtype=np.uint32) - flat
    return (start | flat << np.uint32(16)).ravel()


@njit(**JIT)
def read_states(words, p, states, lanes):
    """Load the lanes' states from byte p of `words`; returns the byte behind them."""
    for j in range(lanes):
        states[j] = simd.load_u32(words, p + 4 * j)
    return p + 4 * lanes


@njit(**JIT)
def decode(words, p, end, states, lanes, contexts, n, table, tokens):
    """Decode n tokens; returns the next byte position, or -1 as soon as it has passed `end`.

    words: uint8 with READ_AHEAD readable bytes behind `end`. contexts, tokens: uint8 [>= n]. n is a multiple of
    `lanes` except in the last call of a stream. table: `decode_table`.
    """
    for first in range(0, n, lanes):
        if p > end:
            return -1
        for j in range(min(lanes, n - first)):
            x = states[j]
            e = table[(_u32(contexts[first + j]) << _u32(12)) | (x & _u32(4095))]
            tokens[first + j] = _u8(e & _u32(127))
            x = _u32((e >> _u32(19)) * (x >> _u32(12)) + ((e >> _u32(7)) & _u32(4095)))
            low = _u32(1 if x < _LOW else 0)  # arithmetic, not a branch: it could not be foreseen
            word = _u32(simd.load_u16(words, p)) & _u32(-low)
            states[j] = _u32(_u32(x << _u32(low << _u32(4))) | word)
            p += 2 * np.int64(low)
    return p


@njit(**JIT)
def encode_scalar(entries, n, lanes, words, p):
    """Encode n tokens into `words` (uint8), downwards from byte p; returns where the stream begins.

    entries: uint32, what `encode_table` says of each token, with a frequency above 0. Needs 2 n + 4 lanes + 32 bytes
    below p.
    """
    states = np.full(lanes, _LOW, _u32)
    j = n % lanes
    for i in range(n - 1, -1, -1):
        j = (j if j > 0 else lanes) - 1
        states[j], p = _push(states[j], entries[i], words, p)
    return write_states(words, p, states, lanes)


@njit(inline="always")
def _push(x, entry, words, p):
    frequency = entry >> _u32(16)
    full = (x >> _u32(20)) >= frequency
    simd.store_u16(words, p - 2, x & _u32(0xFFFF))  # overwritten by the next symbol's where the lane is not full
    p -= 2 if full else 0
    x = x >> _u32(16) if full else x
    rest = (_u32(PROBABILITY_ONE) - frequency) * (x // frequency)
    return _u32(x + rest + (entry & _u32(0xFFFF))), p


@njit(**JIT)
def write_states(words, p, states, lanes):
    """Store the lanes' states below byte p of `words`; returns where they begin."""
    p -= 4 * lanes
    for j in range(lanes):
        simd.store_u32(words, p + 4 * j, states[j])
    return p


@njit(inline="always")
def decode_step(x, contexts, i, table, words, p):
    """(states, byte position, table entries) after one token of each of 16 lanes, with contexts[i : i + 16].

    The lower 7 bits of an entry are the token. Reads up to 32 bytes from p.
    """
    slot = simd.bit_or(simd.shift_left(_widen(_load8(contexts, i)), 12), simd.bit_and(x, 4095))
    entry = avx512.gather(table, slot)
    offset = simd.bit_and(simd.shift_right(entry, 7), 4095)
    x = simd.add(simd.mul(simd.shift_right(entry, 19), simd.shift_right(x, 12)), offset)
    low = simd.less(x, 65536)
    x = simd.select(low, simd.bit_or(simd.shift_left(x, 16), avx512.expand(_widen(_load16(words, p)), low)), x)
    return x, p + 2 * simd.count(low), entry


@njit(inline="always")
def _encode_step(x, entries, i, words, p):
    entry = _load32(entries, i)
    frequency = simd.shift_right(entry, 16)
    full = simd.at_least(simd.shift_right(x, 20), frequency)
    n = simd.count(full)
    # The n words go to the top lanes: what the lower lanes spill below p - 2 n is overwritten by later steps.
    upper = simd.at_least(_iota(), 16 - n)
    simd.store(words, p - 32, _narrow16(avx512.expand(avx512.compress(x, full), upper)))
    x = simd.select(full, simd.shift_right(x, 16), x)
    # x < frequency << 20, so a float32 quotient is wrong by less than 1/5 either way: here it is right or 1 too small.
    quotient = simd.divide(_to_float(x), _to_float(frequency))
    quotient = _to_int(simd.sub_float(quotient, np.float32(0.2)))
    rest = simd.sub(x, simd.mul(quotient, frequency))
    quotient = simd.select(simd.at_least(rest, frequency), simd.add(quotient, 1), quotient)
    grown = simd.mul(quotient, simd.sub(simd.broadcast(x, PROBABILITY_ONE), frequency))
    return simd.add(simd.add(x, grown), simd.bit_and(entry, 0xFFFF)), p - 2 * n


@njit(**JIT)
def encode_avx512(entries, n, lanes, words, p):
    """`encode_scalar` for 32 lanes in two vectors."""
    if lanes != 32:
        return encode_scalar(entries, n, lanes, words, p)
    states = np.full(lanes, _LOW, _u32)
    whole = n - n % 32
    for i in range(n - 1, whole - 1, -1):
        states[i - whole], p = _push(states[i - whole], entries[i], words, p)
    x, y = _load32(states, 0), _load32(states, 16)
    for i in range(whole - 32, -1, -32):
        y, p = _encode_step(y, entries, i + 16, words, p)
        x, p = _encode_step(x, entries, i, words, p)
    simd.store(states, 0, x)
    simd.store(states, 16, y)
    return write_states(words, p, states, lanes)


encode = encode_avx512 if simd.AVX512 else encode_scalar
