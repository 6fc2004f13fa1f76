"""Scalars as tokens under a context and a centre (`kv_contexts`): the modelling half of the entropy coder.

A scalar is worked on as its *ordinal*: sign-magnitude bits as two's complement, which is monotone in the value. The
sign of the prediction is folded away: where it is negative, the ordinal is mirrored.

- **near**: the token says the sign and the value's place among octaves around the scale: 1 to 8 bins an octave,
  densest where a bell curve changes fastest.
- **far**: the token says the sign and size of ordinal(value) - centre: below 16 exactly, above as exponent and two bits
  (the hybrid integers of JPEG XL, ISO/IEC 18181-1, annex C).

What a token leaves open are raw bits. Token 127 is the escape, followed by all 16 bits of the ordinal.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import avx512, simd
from prolepsis.kernels.kv_contexts import CONTEXTS, NEAR_CONTEXTS
from prolepsis.kernels.rans import ALPHABET, JIT

ESCAPE = ALPHABET - 1
BINS = ALPHABET // 2
RAW_BITS = 5  # of an entry of `token_bins` that say how many raw bits follow

# Bins of the near layout, as log2 per octave, lowest octave (scale * 2**-10) first; the last is scale * 2**3.
_LOWEST_OCTAVE = -10
_OCTAVE_BITS = (0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 2, 1)
_OCTAVES = len(_OCTAVE_BITS)
_OCTAVE_TABLE = 32

_u16, _i64, _u32, _u64 = np.uint16, np.int64, np.uint32, np.uint64

_load8, _load16 = simd.loader(simd.I8x32), simd.loader(simd.I16x32)
_widen16, _widen32 = simd.converter(simd.I16x32, "zext"), simd.converter(simd.I32x16, "zext")
_upper = simd.shuffler(simd.I16x32, range(1, 64, 2))
_first_half, _second_half = simd.shuffler(simd.I16x32, range(16)), simd.shuffler(simd.I16x32, range(16, 32))
_as_halves = simd.converter(simd.I16x32, "bitcast")
_as_words, _as_longs = simd.converter(simd.I32x16, "bitcast"), simd.converter(simd.I64x8, "bitcast")
_zeros = simd.constant(simd.I16x32, [0] * 32)
_ones = simd.constant(simd.I16x32, [0xFFFF] * 32)
_low_bits = simd.constant(simd.I16x32, [(1 << min(n, 16)) - 1 for n in range(32)])
_lane0, _lane1, _lane2, _lane3, _lane4, _lane5, _lane6, _lane7 = (simd.lane(k) for k in range(8))


def octave_starts(mantissa_bits: int) -> NDArray[np.int16]:
    """Per octave of the near layout: first bin << 8 | raw bits. int16 [32], of which the first 14 count."""
    bits = [min(b, mantissa_bits) for b in _OCTAVE_BITS]
    starts = np.cumsum([0, *(1 << b for b in bits[:-1])])
    table = np.zeros(_OCTAVE_TABLE, np.int16)
    table[:_OCTAVES] = [s << 8 | mantissa_bits - b for s, b in zip(starts, bits, strict=True)]
    return table


def token_bins(mantissa_bits: int) -> NDArray[np.int16]:
    """What each bin stands for: the smallest size in it >> raw bits << 5 | raw bits. int16 [128], far bins, then near.

    No bin holds the escape, which is token 127 in both layouts.
    """
    far, near = np.zeros(BINS, np.int16), np.zeros(BINS, np.int16)
    far[:16] = np.arange(16) << RAW_BITS
    for size in range(16, BINS):
        far[size] = (4 + (size & 3)) << RAW_BITS | 2 + ((size - 16) >> 2)
    for octave, entry in enumerate(octave_starts(mantissa_bits)[:_OCTAVES].tolist()):
        first, raw = entry >> 8, entry & 255
        parts = 1 << (mantissa_bits - raw)
        near[first : first + parts] = ((octave + _LOWEST_OCTAVE) * parts + np.arange(parts)) << RAW_BITS | raw
    return np.concatenate([far, near])


def raw_bits(bins: NDArray[np.int16]) -> NDArray[np.int64]:
    """How many raw bits follow each token of each context: int64 [contexts, 128]. bins: `token_bins`."""
    counts = np.repeat(bins.astype(np.int64) & ((1 << RAW_BITS) - 1), 2).reshape(2, ALPHABET)
    counts[:, ESCAPE] = 16
    far, near = counts
    return np.concatenate([np.tile(near, (NEAR_CONTEXTS, 1)), np.tile(far, (CONTEXTS - NEAR_CONTEXTS, 1))])


@njit(**JIT)
def ordinal_of(scalar):
    """A scalar's 16 bits as an integer in the order of the values: ... -inf < -1.0 < -0.0 = -1 < 0 = 0.0 < ..."""
    return _i64(scalar) if scalar < _u16(0x8000) else ~_i64(scalar & _u16(0x7FFF))


@njit(inline="always")
def _token(scalar, context, centre, octaves, mantissa_bits):
    """(token, raw bits, how many, ordinal) of a scalar; the token is ESCAPE when no bin holds it.

    Without branches: near and far scalars alternate at random.
    """
    ordinal = ordinal_of(scalar)
    folded = ordinal ^ -_i64(centre >> 15)
    middle, near = _i64(centre & 0x7FFF), context < NEAR_CONTEXTS
    difference = folded - (0 if near else middle)
    sign = difference >> 63
    size = (difference ^ sign) - (middle if near else 0)
    octave = (size >> mantissa_bits) - _LOWEST_OCTAVE
    inside = _u64(octave) < _u64(_OCTAVES)
    entry = octaves[_u64(octave) if inside else _u64(0)]
    near_raw = _i64(entry & 255)
    part = (size & ((1 << mantissa_bits) - 1)) >> near_raw
    near_bin = (entry >> 8) + part if inside else BINS
    length = _i64(simd.bit_length(_u64(size)))
    raw = length - 3 if length > 5 else 2
    far_bin = size if size < 16 else 4 * raw + (size >> raw) + 4
    token = 2 * (near_bin if near else far_bin) - sign
    count = near_raw if near else (raw if size >= 16 else 0)
    return min(token, ESCAPE), size & ((1 << count) - 1), count, ordinal


@njit(**JIT)
def count_tokens(values, contexts, centres, n, octaves, mantissa_bits, counts):
    """Add the n tokens to counts: int64 [contexts, ALPHABET]. values: uint16, the scalars."""
    for i in range(n):
        token, _, _, _ = _token(values[i], contexts[i], centres[i], octaves, mantissa_bits)
        counts[contexts[i], token] += 1


@njit(inline="always")
def _append(bits, p, held, filled, raw, count):
    """Write `count` <= 64 raw bits behind the `filled` < 8 ones of `held`, lowest first, from byte p on."""
    total = filled + count
    merged = held | (raw << filled)
    simd.store_u64(bits, p, merged)
    p += _i64(total >> _u64(3))
    over = (raw >> _u64(1)) >> (_u64(63) - filled)
    held = over if total >= _u64(64) else merged >> (total & _u64(0x38))
    return p, held, total & _u64(7)


@njit(**JIT)
def write_scalar(values, contexts, centres, n, octaves, mantissa_bits, table, entries, bits, p, held, filled):
    """Tokens of n scalars for `rans.encode`, and their raw bits from byte p of `bits` on, the lowest first.

    table: `rans.encode_table`. Writes entries: uint32 [n], the table's entry of each token; one that has no probability
    becomes the escape. `held` are the `filled` < 8 bits not yet written by the call before; returns (p, held, filled).
    Needs 2 n + 8 bytes from p.
    """
    for i in range(n):
        token, raw, count, ordinal = _token(values[i], contexts[i], centres[i], octaves, mantissa_bits)
        row = _u64(contexts[i]) << _u64(7)
        entry = table[row | _u64(token)]
        if token == ESCAPE or entry >> _u32(16) == 0:
            entry, raw, count = table[row | _u64(ESCAPE)], ordinal & 0xFFFF, 16
        entries[i] = entry
        p, held, filled = _append(bits, p, held, filled, _u64(raw), _u64(count))
    return p, held, filled


@njit(inline="always")
def _mask(condition):
    """16 ones where the condition holds."""
    return simd.select(condition, _ones(), 0)


@njit(inline="always")
def _near_tokens(size, octaves, mantissa_bits):
    """(bin, how many raw bits) of near scalars."""
    octave = simd.add(simd.shift_right_signed(size, mantissa_bits), -_LOWEST_OCTAVE)
    entry = avx512.look_up(octaves, octave)
    raw = simd.bit_and(entry, 255)
    part = simd.shift_right(simd.bit_and(size, (1 << mantissa_bits) - 1), raw)
    token_bin = simd.add(simd.shift_right(entry, 8), part)
    return simd.select(simd.less(octave, _OCTAVES), token_bin, BINS), raw


@njit(inline="always")
def _far_tokens(size):
    """(bin, how many raw bits) of far scalars."""
    raw = simd.maximum_signed(simd.sub(simd.broadcast(size, 13), simd.leading_zeros(size)), 2)
    large = simd.at_least(size, 16)
    token_bin = simd.add(simd.add(simd.shift_left(raw, 2), simd.shift_right(size, raw)), 4)
    return simd.select(large, token_bin, size), simd.select(large, raw, 0)


@njit(inline="always")
def _tokens(values, contexts, centres, i, octaves, mantissa_bits):
    """(token, size, how many raw bits, ordinal, context) of 32 scalars: `_token` in vectors."""
    scalar, centre, context = _load16(values, i), _load16(centres, i), _widen16(_load8(contexts, i))
    ordinal = simd.bit_xor(scalar, simd.bit_and(simd.shift_right_signed(scalar, 15), 0x7FFF))
    folded = simd.bit_xor(ordinal, simd.shift_right_signed(centre, 15))
    near, middle = simd.less(context, NEAR_CONTEXTS), simd.bit_and(centre, 0x7FFF)
    start = simd.select(near, _zeros(), middle)
    negative = simd.less_signed(folded, start)
    size = simd.bit_xor(simd.sub(folded, start), _mask(negative))
    size = simd.sub(size, simd.sub(middle, start))
    near_bin, near_raw = _near_tokens(size, octaves, mantissa_bits)
    far_bin, far_raw = _far_tokens(size)
    token_bin = simd.select(near, near_bin, far_bin)
    token = simd.add(simd.add(token_bin, token_bin), simd.select(negative, simd.broadcast(size, 1), 0))
    return simd.minimum(token, ESCAPE), size, simd.select(near, near_raw, far_raw), ordinal, context


@njit(inline="always")
def _entries(table, place):
    """(of the first 16, of the second 16, whether each has no probability)."""
    first = avx512.gather(table, _widen32(_first_half(place, place)))
    second = avx512.gather(table, _widen32(_second_half(place, place)))
    return first, second, simd.equal(_upper(_as_halves(first), _as_halves(second)), 0)


@njit(inline="always")
def _append_all(bits, p, held, filled, raw, count):
    """`_append` the raw bits of 32 scalars, `count` <= 16 of each, merged to eight times four first."""
    pairs, lengths = _as_words(raw), _as_words(count)
    length = simd.bit_and(lengths, 0xFFFF)
    pairs = simd.bit_or(simd.bit_and(pairs, 0xFFFF), simd.shift_left(simd.shift_right(pairs, 16), length))
    lengths = _as_longs(simd.add(length, simd.shift_right(lengths, 16)))
    fours, length = _as_longs(pairs), simd.bit_and(lengths, 0xFFFFFFFF)
    fours = simd.bit_or(simd.bit_and(fours, 0xFFFFFFFF), simd.shift_left(simd.shift_right(fours, 32), length))
    lengths = simd.add(length, simd.shift_right(lengths, 32))
    p, held, filled = _append(bits, p, held, filled, _lane0(fours), _lane0(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane1(fours), _lane1(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane2(fours), _lane2(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane3(fours), _lane3(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane4(fours), _lane4(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane5(fours), _lane5(lengths))
    p, held, filled = _append(bits, p, held, filled, _lane6(fours), _lane6(lengths))
    return _append(bits, p, held, filled, _lane7(fours), _lane7(lengths))


@njit(**JIT)
def write_avx512(values, contexts, centres, n, octaves, mantissa_bits, table, entries, bits, p, held, filled):
    """`write_scalar`, 32 scalars at a time; while the table is waited for, the next 32 are looked at."""
    if n < 32:
        return write_scalar(values, contexts, centres, n, octaves, mantissa_bits, table, entries, bits, p, held, filled)
    whole, starts = n - n % 32, _load16(octaves, 0)
    token, raw, count, ordinal, context = _tokens(values, contexts, centres, 0, starts, mantissa_bits)
    for i in range(0, whole, 32):
        row = simd.shift_left(context, 7)
        first, second, impossible = _entries(table, simd.bit_or(row, token))
        if simd.count(impossible) > 0:
            token = simd.select(impossible, simd.broadcast(token, ESCAPE), token)
            first, second, impossible = _entries(table, simd.bit_or(row, token))
        simd.store(entries, i, first)
        simd.store(entries, i + 16, second)
        escape = simd.equal(token, ESCAPE)
        length = simd.select(escape, simd.broadcast(count, 16), count)
        left_open = simd.bit_and(simd.select(escape, ordinal, raw), avx512.look_up(_low_bits(), length))
        after = min(i + 32, whole - 32)
        token, raw, count, ordinal, context = _tokens(values, contexts, centres, after, starts, mantissa_bits)
        p, held, filled = _append_all(bits, p, held, filled, left_open, length)
    if whole == n:
        return p, held, filled
    return write_scalar(
        values[whole:], contexts[whole:], centres[whole:], n - whole, octaves, mantissa_bits, table,
        entries[whole:], bits, p, held, filled,
    )  # fmt: skip


write = write_avx512 if simd.AVX512 else write_scalar
