"""What a prediction says of a scalar before it is coded: its *context* and its *centre*.

Logarithms are the leading bits of a float32, exponent and 3 mantissa bits: eighths of an octave.

- **near**: the prediction is within about 2.8 scales of zero. The context is |prediction| / scale in half octaves, and
  where the scale lies in its octave; the centre is the octave of the scale.
- **far**: the context is scale / ulp(prediction) in half octaves; the centre is |prediction|, rounded.

Floats of 8 bits whose scale is so small that most values are subnormal lie on an even grid, and are far. So are
integers. Where an integer's scale is below 1, its context also says in which quarter about its centre the prediction
lies, since that shifts so narrow a curve noticeably.

The vectors here are generic and compile on every CPU.
"""

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels import simd
from prolepsis.kernels.rans import JIT

SLACK = 32
"""Elements behind what an array is to hold that the vectors may read, or overwrite with anything."""

CONSTANT = 0  # scale code of a channel that never leaves its mean
LARGEST_CODE = 2039  # of a finite float32
NEVER_NEAR = -(1 << 14)
"""Stands for a constant channel's scale: far below every code, so that it is always far, in the narrowest context."""

_NEAR_LIMIT = 12  # |prediction| / scale in eighths of an octave from which a scalar is "far"
NEAR_CONTEXTS = 40
_FAR_CONTEXTS = 32
_FAR_OFFSET = 8  # of the context, in half octaves, where scale and ulp are the same
CONTEXTS = NEAR_CONTEXTS + _FAR_CONTEXTS

_MANTISSA, _BIAS, _LARGEST, _FIRST_NEAR, _LOWEST, _OFFSET, _WHOLE = range(7)
_NARROW = 5  # half octaves of an integer's scale, up to 1, in each of which the prediction's quarter counts
_BEYOND = 137 << 23  # the bits of 1024, which no integer of a cache reaches
_ONE_WIDTH = 127 << 1  # the scale 1 in half octaves
_EVEN_OCTAVES = 2  # of scales, above the subnormals of an 8-bit float, in which it is coded as an even grid

_i16, _i32, _i64 = np.int16, np.int32, np.int64

_load16 = simd.loader(simd.I16x32)
_as_halves = simd.converter(simd.I16x32, "bitcast")
_as_words, _as_floats = simd.converter(simd.I32x16, "bitcast"), simd.converter(simd.F32x16, "bitcast")
_as_integers = simd.converter(simd.I32x16, "fptosi")
_narrow8 = simd.converter(simd.I8x32, "trunc")
_lower, _upper = simd.shuffler(simd.I16x32, range(0, 64, 2)), simd.shuffler(simd.I16x32, range(1, 64, 2))


def form_of(mantissa_bits: int, exponent_bias: int, limit: int) -> NDArray[np.int32]:
    """What `classify` and the tokens must know of a dtype.

    A float has its mantissa bits, and its exponent bias subtracted from float32's. An integer has its largest value
    as `limit`, which is 0 for floats.

    int32: mantissa bits M; exponent bias E; the ordinal of the largest centre; the smallest scale code that may be
    near; the exponent code of float32 below which ulps grow no smaller; what is added to a far context; 1 for
    integers, 0 for floats.
    """
    if limit:
        return np.array([limit.bit_length(), 0, limit, 0, 0, 0, 1], np.int32)
    largest, first_near, lowest = (2 * (128 - exponent_bias) - 1) << mantissa_bits, NEVER_NEAR, 0
    if mantissa_bits <= 3:
        lowest = exponent_bias + 1
        first_near = 8 * (lowest + _EVEN_OCTAVES)
    if mantissa_bits == 3:
        largest |= 6  # e4m3 has no infinity, but numbers up to its only NaN
    offset = 2 * mantissa_bits + _FAR_OFFSET
    return np.array([mantissa_bits, exponent_bias, largest, first_near, lowest, offset, 0], np.int32)


@njit(**JIT)
def bits_of(form):
    """Bits of a value of the dtype: 16, 8, or 4 for integers up to 7."""
    if form[_WHOLE]:
        return _i64(4 if form[_LARGEST] < 8 else 8)
    return _i64(16 if form[_MANTISSA] > 3 else 8)


@njit(inline="always")
def scale_of(code, shift):
    """A channel's scale as `classify` takes it: its code, moved by a token's shift unless it is CONSTANT. int16."""
    moved = min(max(_i32(code + shift), _i32(1)), _i32(LARGEST_CODE))
    return _i16(NEVER_NEAR) if code == CONSTANT else _i16(moved)


@njit(**JIT)
def move_scales(scales, at, n, shift, out, to):
    """Move n scales, int16 from `scale_of`, by a token's shift, as that function does. out has room for SLACK more."""
    for i in range(0, n, 32):
        scale = _load16(scales, at + i)
        moved = simd.add(scale, _i16(min(max(shift, -LARGEST_CODE), LARGEST_CODE)))
        moved = simd.minimum_signed(simd.maximum_signed(moved, 1), LARGEST_CODE)
        simd.store(out, to + i, simd.select(simd.equal(scale, NEVER_NEAR), scale, moved))


@njit(inline="always")
def _brain_centre(size, lower):
    """The upper halves of floats, rounded to nearest even by their lower halves."""
    half = simd.sub(simd.broadcast(size, 0x8000), simd.bit_and(size, 1))
    return simd.select(simd.less(half, lower), simd.add(size, 1), size)


@njit(inline="always")
def _rounded(words, mantissa_bits, exponent_bias, largest):
    """Floats without their sign, rounded to nearest even in a narrower format, as ordinals; sixteen int32."""
    size = simd.bit_and(words, 0x7FFFFFFF)
    dropped = _i32(23 - mantissa_bits)
    smallest = _i32((exponent_bias + 1) << 23)
    odd = simd.bit_and(simd.shift_right(size, dropped), 1)
    moved = simd.add(size, _i32((1 << (dropped - 1)) - 1) - _i32(exponent_bias << 23))
    normal = simd.shift_right(simd.add(moved, odd), dropped)
    # Adding a float aligns the last bit of the sum with the step of the subnormals, and rounds.
    aligner = simd.broadcast(size, _i32((exponent_bias + 24 - mantissa_bits) << 23))
    subnormal = simd.sub(_as_words(simd.add_float(_as_floats(size), _as_floats(aligner))), aligner)
    return simd.minimum(simd.select(simd.less(size, smallest), subnormal, normal), largest)


@njit(inline="always")
def _far_centre(first, second, lower, size, form):
    """|prediction| of far scalars in the dtype."""
    if form[_BIAS] == 0:
        return _brain_centre(size, lower)
    low = _rounded(_as_words(first), form[_MANTISSA], form[_BIAS], form[_LARGEST])
    high = _rounded(_as_words(second), form[_MANTISSA], form[_BIAS], form[_LARGEST])
    return _lower(_as_halves(low), _as_halves(high))


@njit(inline="always")
def _quarters(words):
    """4 |prediction|, without its fraction; sixteen int32."""
    size = simd.minimum(simd.bit_and(words, 0x7FFFFFFF), _BEYOND)
    return _as_integers(_as_floats(simd.add(size, 2 << 23)))


@njit(**JIT)
def _classify_integers(predictions, scales, n, form, contexts, centres):
    limit = form[_LARGEST]
    for i in range(0, n, 32):
        first, second = _load16(predictions, i), _load16(predictions, i + 16)
        scale, sign = _load16(scales, i), simd.bit_and(_upper(first, second), 0x8000)
        low, high = _quarters(_as_words(first)), _quarters(_as_words(second))
        quarters = simd.add(_lower(_as_halves(low), _as_halves(high)), 2)
        centre = simd.minimum(simd.shift_right(quarters, 2), limit)
        # -1 - x is how ordinals are mirrored, and -x how integers are: their centre makes up for the difference.
        mirrored = simd.select(simd.not_equal(centre, 0), sign, 0)
        opposite = simd.shift_right(simd.bit_xor(sign, mirrored), 15)
        quarter = simd.bit_xor(simd.bit_and(quarters, 3), simd.add(opposite, simd.add(opposite, opposite)))
        width = simd.sub(simd.shift_right_signed(scale, 2), _ONE_WIDTH)
        narrow = simd.maximum_signed(simd.add(width, _NARROW), 0)
        narrow = simd.add(simd.shift_left(narrow, 2), quarter)
        wide = simd.add(simd.minimum_signed(width, _FAR_CONTEXTS - 4 * _NARROW - 1), 4 * _NARROW)
        context = simd.add(simd.select(simd.less_signed(width, 0), narrow, wide), NEAR_CONTEXTS)
        simd.store(contexts, i, _narrow8(context))
        simd.store(centres, i, simd.bit_or(simd.sub(centre, simd.shift_right(mirrored, 15)), mirrored))


@njit(**JIT)
def classify(predictions, scales, n, form, contexts, centres):
    """Context and centre of n scalars, from their predictions and scales.

    predictions: float32, finite. scales: int16, scale codes, or NEVER_NEAR for CONSTANT. form: `form_of`. Writes
    contexts: uint8, below NEAR_CONTEXTS where near; and centres: uint16, the ordinal in 15 bits and, in the highest
    bit, whether the scalar is mirrored. All arrays have room for n + SLACK elements.
    """
    if form[_WHOLE]:
        _classify_integers(predictions, scales, n, form, contexts, centres)
        return
    mantissa_bits, bias, top = form[_MANTISSA], form[_BIAS], form[_LARGEST] >> form[_MANTISSA]
    lowest, first_near = form[_LOWEST], form[_FIRST_NEAR]
    for i in range(0, n, 32):
        first, second = _load16(predictions, i), _load16(predictions, i + 16)
        upper, lower, scale = _upper(first, second), _lower(first, second), _load16(scales, i)
        size, sign = simd.bit_and(upper, 0x7FFF), simd.bit_and(upper, 0x8000)
        apart = simd.sub(simd.shift_right(size, 4), scale)
        wide = simd.select(simd.at_least_signed(scale, first_near), apart, _NEAR_LIMIT)
        near = simd.less_signed(wide, _NEAR_LIMIT)

        ratio = simd.bit_and(simd.maximum_signed(simd.add(apart, 28), 0), 0xFFFC)
        near_context = simd.add(ratio, simd.bit_and(simd.shift_right(scale, 1), 3))
        octave = simd.sub(simd.shift_right_signed(scale, 3), bias)
        octave = simd.minimum_signed(simd.maximum_signed(octave, 0), top)
        near_centre = simd.shift_left(octave, mantissa_bits)

        exponent = simd.maximum_signed(simd.shift_right(size, 7), lowest)
        width = simd.sub(simd.shift_right_signed(scale, 2), simd.add(exponent, exponent))
        width = simd.add(width, form[_OFFSET])
        width = simd.minimum_signed(simd.maximum_signed(width, 0), _FAR_CONTEXTS - 1)
        far_centre = _far_centre(first, second, lower, size, form)

        context = simd.select(near, near_context, simd.add(width, NEAR_CONTEXTS))
        simd.store(contexts, i, _narrow8(context))
        simd.store(centres, i, simd.bit_or(simd.select(near, near_centre, far_centre), sign))
