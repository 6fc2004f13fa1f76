"""Streams back to scalars: tokens (`rans`) and what they leave open (`kv_tokens`), read side by side."""

import numpy as np
from numba import njit

from prolepsis.kernels import avx512, rans, simd
from prolepsis.kernels.kv_contexts import NEAR_CONTEXTS
from prolepsis.kernels.kv_tokens import BINS, ESCAPE, RAW_BITS
from prolepsis.kernels.rans import JIT, MAX_LANES, decode_step

_u16, _i64, _u32 = np.uint16, np.int64, np.uint32

_load8, _load16, _load32 = simd.loader(simd.I8x32), simd.loader(simd.I16x32), simd.loader(simd.I32x16)
_widen16 = simd.converter(simd.I16x32, "zext")
_as_halves = simd.converter(simd.I16x32, "bitcast")
_lower = simd.shuffler(simd.I16x32, range(0, 64, 2))
_zeros = simd.constant(simd.I16x32, [0] * 32)
_low_bits = simd.constant(simd.I16x32, [(1 << min(n, 16)) - 1 for n in range(32)])
_up1, _up2, _up4, _up8, _up16 = (simd.shuffler(simd.I16x32, [32] * k + list(range(32 - k))) for k in (1, 2, 4, 8, 16))
_last = simd.lane(-1)


@njit(**JIT)
def read_scalar(tokens, contexts, centres, n, bins, bits, start, position, end, values):
    """The n scalars of `tokens`: uint16 into values. Returns the next bit position, or -1 as soon as it passes `end`.

    bins: `kv_tokens.token_bins`. bits: uint8 with rans.READ_AHEAD readable bytes behind the stream; the stream begins
    at byte `start`, and `position`, `end` count bits from there.
    """
    for i in range(n):
        if position > end:
            return -1
        token, near = _i64(tokens[i]), -_i64(contexts[i] < NEAR_CONTEXTS)
        entry = _i64(bins[(near & BINS) + (token >> 1)])
        escape = token == ESCAPE
        count = 16 if escape else entry & ((1 << RAW_BITS) - 1)
        word = simd.load_u32(bits, start + (position >> 3)) >> _u32(position & 7)
        raw = _i64(word & _u32((1 << count) - 1))
        size = ((entry >> RAW_BITS) << count) + raw
        sign, middle = -(token & 1), _i64(centres[i] & _u16(0x7FFF))
        folded = (middle & ~near) + (((middle & near) + size) ^ sign)
        ordinal = raw if escape else folded ^ -_i64(centres[i] >> 15)
        values[i] = _u16(ordinal & 0xFFFF)
        position += count
    for i in range(n):  # apart from the loop above, where it would become a branch that cannot be foreseen
        values[i] ^= _u16(0x7FFF) if values[i] & _u16(0x8000) else _u16(0)
    return position


@njit(inline="always")
def _raw_bits(bits, start, position, count):
    """(the next `count` <= 16 bits of each of 32 lanes, how many these are altogether)."""
    total = simd.add(count, _up1(count, _zeros()))
    total = simd.add(total, _up2(total, _zeros()))
    total = simd.add(total, _up4(total, _zeros()))
    total = simd.add(total, _up8(total, _zeros()))
    total = simd.add(total, _up16(total, _zeros()))
    at = simd.add(simd.sub(total, count), _u16(position & 15))
    # All 32 lie within 33 words of 16 bits, the last of which only the second load holds.
    word, bit = simd.shift_right(at, 4), simd.bit_and(at, 15)
    byte = start + ((position >> 4) << 1)
    low, high = avx512.look_up(_load16(bits, byte), word), avx512.look_up(_load16(bits, byte + 2), word)
    upper = simd.shift_left(simd.add(high, high), simd.bit_xor(bit, 15))
    raw = simd.bit_or(simd.shift_right(low, bit), upper)
    return simd.bit_and(raw, avx512.look_up(_low_bits(), count)), _i64(_last(total))


@njit(inline="always")
def _scalars(token, contexts, centres, i, bins, bits, start, position, values):
    """`read_scalar` of 32 tokens; bins: four vectors of it."""
    centre, context = _load16(centres, i), _load8(contexts, i)
    near, escape = simd.less(context, NEAR_CONTEXTS), simd.equal(token, ESCAPE)
    token_bin = simd.shift_right(token, 1)
    far_low, far_high, near_low, near_high = bins
    far_entry = avx512.look_up_two(far_low, token_bin, far_high)
    entry = simd.select(near, avx512.look_up_two(near_low, token_bin, near_high), far_entry)
    count = simd.bit_and(entry, (1 << RAW_BITS) - 1)
    raw, total = _raw_bits(bits, start, position, simd.select(escape, simd.broadcast(count, 16), count))
    size = simd.add(simd.shift_left(simd.shift_right_signed(entry, RAW_BITS), count), raw)
    sign = simd.shift_right_signed(simd.shift_left(token, 15), 15)
    middle = simd.bit_and(centre, 0x7FFF)
    before = simd.select(near, middle, 0)
    folded = simd.add(simd.sub(middle, before), simd.bit_xor(simd.add(before, size), sign))
    ordinal = simd.select(escape, raw, simd.bit_xor(folded, simd.shift_right_signed(centre, 15)))
    flip = simd.bit_and(simd.shift_right_signed(ordinal, 15), 0x7FFF)
    simd.store(values, i, simd.bit_xor(ordinal, flip))
    return position + total


@njit(inline="always")
def _vectors(bins):
    return _load16(bins, 0), _load16(bins, 32), _load16(bins, 64), _load16(bins, 96)


@njit(**JIT)
def read_avx512(tokens, contexts, centres, n, bins, bits, start, position, end, values):
    """`read_scalar`, 32 scalars at a time."""
    whole, held = n - n % 32, _vectors(bins)
    for i in range(0, whole, 32):
        if position > end:
            return -1
        token = _widen16(_load8(tokens, i))
        position = _scalars(token, contexts, centres, i, held, bits, start, position, values)
    rest = n - whole
    return read_scalar(
        tokens[whole:], contexts[whole:], centres[whole:], rest, bins, bits, start, position, end, values[whole:]
    )


read = read_avx512 if simd.AVX512 else read_scalar


@njit(**JIT)
def decode_scalar(data, p, bits, position, end, states, lanes, contexts, centres, n, table, bins, tokens, values):
    """The next n scalars of a stream, uint16 into values, from what `kv_contexts.classify` says of them.

    data: uint8 with rans.READ_AHEAD readable bytes behind the stream. Its words are read from byte p up to `bits`, its
    raw bits from `position` to `end`, counted in bits from byte `bits`. states: uint32, of the lanes. table:
    `rans.decode_table`. tokens: uint8 [n], for what comes between. n is a multiple of `lanes` except in the last call
    of a stream. Returns the next (p, position); p is -1 where words or bits have run out.
    """
    p = rans.decode(data, p, bits, states, lanes, contexts, n, table, tokens)
    if p >= 0:
        position = read(tokens, contexts, centres, n, bins, data, bits, position, end, values)
    return p if position >= 0 else _i64(-1), position


@njit(**JIT)
def decode_avx512(data, p, bits, position, end, states, lanes, contexts, centres, n, table, bins, tokens, values):
    """`decode_scalar` for 32 lanes in two vectors; while the table is waited for, the 32 scalars before are made."""
    if lanes != MAX_LANES or n < MAX_LANES:
        return decode_scalar(
            data, p, bits, position, end, states, lanes, contexts, centres, n, table, bins, tokens, values
        )
    whole, held = n - n % 32, _vectors(bins)
    x, y = _load32(states, 0), _load32(states, 16)
    token = _zeros()
    for i in range(0, whole, 32):
        if p > bits or position > end:
            return _i64(-1), position
        x, p, first = decode_step(x, contexts, i, table, data, p)
        y, p, second = decode_step(y, contexts, i + 16, table, data, p)
        if i > 0:
            position = _scalars(token, contexts, centres, i - 32, held, data, bits, position, values)
        token = simd.bit_and(_lower(_as_halves(first), _as_halves(second)), ESCAPE)
    if position > end:
        return _i64(-1), position
    position = _scalars(token, contexts, centres, whole - 32, held, data, bits, position, values)
    simd.store(states, 0, x)
    simd.store(states, 16, y)
    if whole == n:
        return p, position
    return decode_scalar(
        data, p, bits, position, end, states, lanes, contexts[whole:], centres[whole:], n - whole, table, bins,
        tokens, values[whole:],
    )  # fmt: skip


decode = decode_avx512 if simd.AVX512 else decode_scalar
