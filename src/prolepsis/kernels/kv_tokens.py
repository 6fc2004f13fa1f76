"""Floats as tokens under a prediction: the modelling half of the entropy coder.

A 16-bit float is worked on as its *ordinal*: sign-magnitude bits as two's complement, which is monotone in the value.
The sign of the prediction is folded away (both are mirrored when it is negative), so below it is never negative.

- **near**: the prediction is within about 2.8 scales of zero. The token says the sign and the value's place among
  octaves around the scale: 1 to 8 bins an octave, densest where a bell curve changes fastest.
- **far**: the token says the sign and size of ordinal(value) - ordinal(prediction): below 16 exactly, above as exponent
  and two bits (the hybrid integers of JPEG XL, ISO/IEC 18181-1, annex C).

What a token leaves open are raw bits. Token 127 is the escape, followed by all 16 bits of the ordinal. The context of
near tokens is (|prediction| / scale in half octaves, where the scale lies in its octave), that of far tokens is
scale / ulp(prediction) in half octaves. Logarithms are the leading bits of a float32: exponent and 3 mantissa bits.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import simd
from prolepsis.kernels.rans import ALPHABET, JIT

ESCAPE = ALPHABET - 1
CHUNK_ROWS = 32  # tokens of a stream handled at a time: any row length then keeps whole groups of 32 lanes
CONSTANT = 0  # scale code of a channel that never leaves its mean
_CONSTANT_SHIFT = 1 << 14  # far below every code, so that such a channel is always "far", in the narrowest context

# Bins of the near layout, as log2 per octave, lowest octave (scale * 2**-10) first; the last is scale * 2**3.
_LOWEST_OCTAVE = -10
_OCTAVE_BITS = (0, 0, 0, 0, 0, 0, 1, 1, 2, 3, 3, 3, 2, 1)

_NEAR_LIMIT = 12  # |prediction| / scale in eighths of an octave from which a scalar is "far"
_NEAR_CONTEXTS = 40
_FAR_CONTEXTS = 32
CONTEXTS = _NEAR_CONTEXTS + _FAR_CONTEXTS

_u8, _u16, _i32, _i64, _u32, _u64 = np.uint8, np.uint16, np.int32, np.int64, np.uint32, np.uint64

_load8, _load32 = simd.loader(simd.I8x16), simd.loader(simd.I32x16)
_widen, _narrow16 = simd.converter(simd.I32x16, "zext"), simd.converter(simd.I16x16, "trunc")
_ones = simd.constant([1] * 16)
_up1, _up2, _up4, _up8 = (simd.shuffler(simd.I32x16, [16] * k + list(range(16 - k))) for k in (1, 2, 4, 8))


def octave_starts(mantissa_bits: int) -> NDArray[np.int32]:
    """Per octave of the near layout: first bin << 8 | low bits of the mantissa left open. int32 [octaves]."""
    starts = np.cumsum([0, *(1 << bits for bits in _OCTAVE_BITS[:-1])])
    return np.array([s << 8 | mantissa_bits - b for s, b in zip(starts, _OCTAVE_BITS, strict=True)], np.int32)


def token_layout(mantissa_bits: int) -> NDArray[np.int32]:
    """What each token stands for: base << 6 | escape << 5 | raw bits. int32 [256], far tokens first, then near ones."""
    far, near = np.zeros(ALPHABET, np.int64), np.zeros(ALPHABET, np.int64)
    for token in range(ESCAPE):
        size = token >> 1
        if size < 16:
            far[token] = size << 6
        else:
            raw = 2 + ((size - 16) >> 2)
            far[token] = ((4 + ((size - 16) & 3)) << raw) << 6 | raw
    for octave, bits in enumerate(_OCTAVE_BITS):
        raw = mantissa_bits - bits
        first = int(octave_starts(mantissa_bits)[octave]) >> 8
        for part in range(1 << bits):
            base = ((octave + _LOWEST_OCTAVE) << mantissa_bits) + (part << raw)
            near[2 * (first + part) : 2 * (first + part) + 2] = base << 6 | raw
    far[ESCAPE] = near[ESCAPE] = 1 << 5 | 16
    return np.concatenate([far, near]).astype(np.int32)


@njit(**JIT)
def classify(prediction, scales, first, rows, mantissa_bits, exponent_bias, contexts, centres):
    """Context and centre of every scalar in `rows` rows, from its prediction and its channel's scale.

    prediction: uint32 [tokens, row], bits of finite float32. scales: int32 [row], scale codes (`scale_code`).
    mantissa_bits, exponent_bias: 7, 0 for bf16; 10, 112 for fp16. Writes contexts uint8 and centres int32
    (ordinal << 2 | sign of the prediction << 1 | near) [rows * row].
    """
    row = scales.size
    largest = _i32(((1 << (15 - mantissa_bits)) - 1) << mantissa_bits)
    for r in range(rows):
        for j in range(row):
            bits = prediction[first + r, j]
            size = _i32(bits & _u32(0x7FFFFFFF))
            height = size >> _i32(20)
            scale = scales[j] if scales[j] != CONSTANT else _i32(-_CONSTANT_SHIFT)
            apart = _i32(height - scale)
            near = apart < _NEAR_LIMIT
            ratio = _i32(max(_i32(apart + 28), _i32(0)) >> _i32(2))
            near_context = _i32(ratio * 4 + ((scale >> _i32(1)) & _i32(3)))
            width = _i32((scale >> _i32(2)) - ((height >> _i32(3)) << _i32(1)) + 2 * mantissa_bits + 8)
            far_context = _i32(_NEAR_CONTEXTS + min(max(width, _i32(0)), _i32(_FAR_CONTEXTS - 1)))
            octave = _i32(max((scale >> _i32(3)) - exponent_bias, 0) << mantissa_bits)
            centre = min(octave, largest) if near else _i32(_ordinal(_u32(size), mantissa_bits))
            contexts[r * row + j] = _u8(near_context if near else far_context)
            flags = _u32(2 if bits >> _u32(31) else 0) | _u32(1 if near else 0)
            centres[r * row + j] = _i32((_u32(centre) << _u32(2)) | flags)


@njit(inline="always")
def _ordinal(size, mantissa_bits):
    """float32 bits without sign, rounded to nearest even in the cache's dtype, as an ordinal."""
    if mantissa_bits == 7:
        return (size + _u32(0x7FFF) + ((size >> _u32(16)) & _u32(1))) >> _u32(16)
    return _half_ordinal(size)


@njit(**JIT)
def _half_ordinal(size):
    if size >= _u32(113 << 23):  # normal in fp16
        rounded = (size - _u32(112 << 23) + _u32(0xFFF) + ((size >> _u32(13)) & _u32(1))) >> _u32(13)
        return _u32(min(rounded, _u32(0x7C00)))
    shift = _u32(126) - (size >> _u32(23))  # subnormal: the mantissa in units of 2**-24
    if shift > _u32(24):
        return _u32(0)
    mantissa = (size & _u32(0x7FFFFF)) | _u32(0x800000)
    half = (_u32(1) << (shift - _u32(1))) - _u32(1) + ((mantissa >> shift) & _u32(1))
    return _u32((mantissa + half) >> shift)


@njit(**JIT)
def ordinal_of(bits):
    """Bits of a 16-bit float as an integer in the order of the values: ... -inf < -1.0 < -0.0 = -1 < 0 = 0.0 < ..."""
    return _i64(bits) if bits < _u16(0x8000) else ~_i64(bits & _u16(0x7FFF))


@njit(inline="always")
def _token(bits, centre, octaves, mantissa_bits):
    """(token, size, ordinal) of a 16-bit float under a centre; the token is ESCAPE when no bin holds the size.

    Without branches: near and far scalars alternate at random.
    """
    ordinal = ordinal_of(bits)
    folded = ordinal ^ -_i64((centre >> 1) & 1)
    middle, near = _i64(centre >> 2), (centre & 1) == 1
    difference = folded - (0 if near else middle)
    sign = difference >> 63
    size = (difference ^ sign) - (middle if near else 0)
    octave = (size >> mantissa_bits) - _LOWEST_OCTAVE
    inside = _u64(octave) < _u64(octaves.size)
    entry = octaves[_u64(octave) if inside else _u64(0)]
    part = (size & ((1 << mantissa_bits) - 1)) >> (entry & 255)
    near_bin = (entry >> 8) + part if inside else 64
    length = _i64(simd.bit_length(_u64(size)))
    raw = length - 3 if length > 5 else 2
    far_bin = size if size < 16 else 4 * raw + (size >> raw) + 4
    token = 2 * (near_bin if near else far_bin) - sign
    return min(token, ESCAPE), size, ordinal


@njit(**JIT)
def count_tokens(values, centres, contexts, n, octaves, mantissa_bits, counts):
    """Add the n tokens to counts: int64 [CONTEXTS, ALPHABET]. values: uint16 bits of the floats."""
    for i in range(n):
        token, _, _ = _token(values[i], centres[i], octaves, mantissa_bits)
        counts[contexts[i], token] += 1


@njit(**JIT)
def write_tokens(values, centres, contexts, n, octaves, mantissa_bits, layout, table, tokens, bits, p, held, filled):
    """Tokens of n values, and their raw bits from byte p of `bits` on, the lowest first.

    A token that `table` (`rans.encode_table`) gives no probability becomes the escape. `held` are the `filled` < 8
    bits not yet written by the call before; returns (p, held, filled). Needs 2 n + 8 bytes from p.
    """
    for i in range(n):
        token, size, ordinal = _token(values[i], centres[i], octaves, mantissa_bits)
        if table[(_u64(contexts[i]) << _u64(7)) | _u64(token)] >> _u32(16) == 0:
            token = ESCAPE
        entry = layout[((_u64(centres[i]) & _u64(1)) << _u64(7)) | _u64(token)]
        raw = _u64(ordinal & 0xFFFF if token == ESCAPE else size - _i64(entry >> 6))
        tokens[i] = _u8(token)
        held |= raw << filled
        filled += _u64(entry & 31)
        simd.store_u64(bits, p, held)
        p += _i64(filled >> _u64(3))
        held >>= filled & _u64(0x38)
        filled &= _u64(7)
    return p, held, filled


@njit(**JIT)
def read_scalar(tokens, centres, n, layout, bits, start, position, end, values):
    """The n floats of `tokens`: uint16 into values. Returns the next bit position, or -1 as soon as it passes `end`.

    bits: uint8 with rans.READ_AHEAD readable bytes behind the stream; the stream begins at byte `start`, and
    `position`, `end` count bits from there.
    """
    for i in range(n):
        if position > end:
            return -1
        centre = centres[i]
        entry = layout[((centre & 1) << 7) | _i32(tokens[i])]
        word = simd.load_u32(bits, start + (position >> 3)) >> _u32(position & 7)
        count = entry & 31
        size = (entry >> 6) + _i64(word & _u32((1 << count) - 1))
        sign = -_i64(tokens[i] & 1)
        middle, near = _i64(centre >> 2), -_i64(centre & 1)
        folded = (middle & ~near) + (((middle & near) + size) ^ sign)
        ordinal = size if entry & 32 else folded ^ -_i64((centre >> 1) & 1)
        values[i] = _u16(ordinal & 0xFFFF)
        position += count
    for i in range(n):  # apart from the loop above, where it would become a branch that cannot be foreseen
        values[i] ^= _u16(0x7FFF) if values[i] & _u16(0x8000) else _u16(0)
    return position


@njit(**JIT)
def read_avx512(tokens, centres, n, layout, bits, start, position, end, values):
    """`read_scalar`, 16 floats at a time."""
    whole = n - n % 16
    for i in range(0, whole, 16):
        if position > end:
            return -1
        token, centre = _widen(_load8(tokens, i)), _load32(centres, i)
        near = simd.bit_and(centre, 1)
        entry = simd.gather(layout, simd.bit_or(simd.shift_left(near, 7), token))
        count = simd.bit_and(entry, 31)
        total = simd.add(count, _up1(count, simd.zeros()))
        total = simd.add(total, _up2(total, simd.zeros()))
        total = simd.add(total, _up4(total, simd.zeros()))
        total = simd.add(total, _up8(total, simd.zeros()))
        at = simd.add(simd.sub(total, count), position)
        word = simd.gather_bytes(bits, simd.add(simd.shift_right(at, 3), start))
        word = simd.shift_right(word, simd.bit_and(at, 7))
        raw = simd.bit_and(word, simd.sub(simd.shift_left(_ones(), count), 1))
        size = simd.add(simd.shift_right_signed(entry, 6), raw)
        sign = simd.sub(simd.zeros(), simd.bit_and(token, 1))
        middle, is_near = simd.shift_right(centre, 2), simd.not_equal(near, 0)
        before = simd.select(is_near, middle, 0)
        folded = simd.add(simd.sub(middle, before), simd.bit_xor(simd.add(before, size), sign))
        flip = simd.sub(simd.zeros(), simd.bit_and(simd.shift_right(centre, 1), 1))
        ordinal = simd.select(simd.not_equal(simd.bit_and(entry, 32), 0), size, simd.bit_xor(folded, flip))
        negative = simd.shift_right_signed(simd.shift_left(ordinal, 16), 31)
        simd.store(values, i, _narrow16(simd.bit_xor(ordinal, simd.bit_and(negative, 0x7FFF))))
        position += _i64(simd.last(total))
    return read_scalar(tokens[whole:], centres[whole:], n - whole, layout, bits, start, position, end, values[whole:])


read = read_avx512 if simd.AVX512 else read_scalar
