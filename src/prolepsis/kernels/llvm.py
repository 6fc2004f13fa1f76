"""Builders of LLVM vector IR, shared by the kernels whose inner loops are written as explicit vectors.

Each takes an `llvmlite` IR builder `b` first. Vectors are generic LLVM types, lowered to whatever the CPU has. No
fast-math flag is ever set and every reduction has a fixed order, so the results are the same bits on every CPU.
"""

import math

from llvmlite import ir
from numba.core import cgutils

from prolepsis.kernels.cpu import features

LANES = 16  # float32 values in a 512-bit vector

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F32 = ir.FloatType()
BYTES = ir.VectorType(I8, 64)
INTS = ir.VectorType(I32, LANES)
FLOATS = ir.VectorType(F32, LANES)
HALFS = ir.VectorType(I16, LANES)
SMALL = ir.VectorType(I8, LANES)


def splat(vector, value):
    """A constant vector with `value` in every lane."""
    return ir.Constant(vector, [value] * vector.count)


def iota():
    """The int32 vector 0, 1, ... 15."""
    return ir.Constant(INTS, list(range(LANES)))


def data(context, b, array_type, array):
    """Byte pointer to the first element of a NumPy array argument."""
    return b.bitcast(context.make_array(array_type)(context, b, array).data, I8.as_pointer())


def _typed(b, kind, base, offset):
    return b.bitcast(b.gep(base, [offset]), kind.as_pointer())


def load(b, kind, base, offset):
    """Unaligned load of a scalar or vector `kind` from byte pointer `base` + byte `offset`."""
    value = b.load(_typed(b, kind, base, offset))
    value.align = 1
    return value


def store(b, value, base, offset):
    """Unaligned store to byte pointer `base` + byte `offset`."""
    b.store(value, _typed(b, value.type, base, offset)).align = 1


def broadcast(b, vector, scalar):
    """`scalar` in every lane of `vector`."""
    undefined = ir.Constant(vector, ir.Undefined)
    first = b.insert_element(undefined, scalar, I32(0))
    return b.shuffle_vector(first, undefined, splat(ir.VectorType(I32, vector.count), 0))


def broadcast_at(b, vector, base, offset):
    """The scalar at `base` + byte `offset`, in every lane."""
    return broadcast(b, vector, load(b, vector.element, base, offset))


def call(b, name, result, arguments):
    """Call of an LLVM intrinsic by its mangled name."""
    signature = ir.FunctionType(result, [a.type for a in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, signature, name), arguments)


def prefetch(b, pointer):
    """Have the cache line at an i8 pointer fetched into the second level; the address may be any."""
    signature = ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32])
    read, second_level, data_ = I32(0), I32(2), I32(1)
    b.call(
        cgutils.get_or_insert_function(b.module, signature, "llvm.prefetch.p0"), [pointer, read, second_level, data_]
    )


def fma(b, x, y, z):
    """x * y + z, rounded once."""
    return call(b, "llvm.fma.v16f32", FLOATS, [x, y, z])


def maximum(b, x, y):
    """Lane-wise larger float; y where either is NaN."""
    return b.select(b.fcmp_ordered(">", x, y), x, y)


def absolute(b, x):
    """|x|, by clearing the sign bit."""
    return b.bitcast(b.and_(b.bitcast(x, INTS), splat(INTS, 0x7FFFFFFF)), FLOATS)


def nearest(b, x):
    """Round to the nearest integer, ties to even."""
    return call(b, "llvm.rint.v16f32", FLOATS, [x])


def tree(b, combine, vector):
    """Reduce 16 lanes to a scalar by halving: lane i meets lane i + 8, then i + 4, i + 2, i + 1."""
    for half in (8, 4, 2, 1):
        kind = ir.VectorType(I32, half)
        low, high = (ir.Constant(kind, list(range(start, start + half))) for start in (0, half))
        vector = combine(b.shuffle_vector(vector, vector, low), b.shuffle_vector(vector, vector, high))
    return b.extract_element(vector, I32(0))


def half_to_float(b, bits):
    """<16 x i16> IEEE half bits to float32, exactly."""
    if "f16c" in features() or "avx512f" in features():
        return b.fpext(b.bitcast(bits, ir.VectorType(ir.HalfType(), LANES)), FLOATS)
    wide = b.zext(bits, INTS)
    magnitude = b.shl(b.and_(wide, splat(INTS, 0x7FFF)), splat(INTS, 13))
    sign = b.shl(b.and_(wide, splat(INTS, 0x8000)), splat(INTS, 16))
    scaled = b.bitcast(b.fmul(b.bitcast(magnitude, FLOATS), splat(FLOATS, 2.0**112)), INTS)
    special = b.icmp_unsigned(">=", magnitude, splat(INTS, 0x7C00 << 13))
    infinite = b.or_(magnitude, splat(INTS, 0x7F800000))
    return b.bitcast(b.or_(b.select(special, infinite, scaled), sign), FLOATS)


def brain_to_float(b, bits):
    """<16 x i16> bfloat16 bits to float32, exactly."""
    return b.bitcast(b.shl(b.zext(bits, INTS), splat(INTS, 16)), FLOATS)


def exp(b, x):
    """e**x in float32 for x <= 88; below -87 it is 0, of a NaN a NaN. Relative error under 2e-7.

    x = n ln 2 + r with |r| <= ln 2 / 2, e**r by its Taylor polynomial of degree 7, 2**n through the exponent bits.
    """
    n = nearest(b, b.fmul(x, splat(FLOATS, 1 / math.log(2))))
    r = fma(b, n, splat(FLOATS, -0.693359375), x)  # ln 2 in two parts: the first has few bits, so n * it is exact
    r = fma(b, n, splat(FLOATS, 2.12194440054690583e-4), r)
    p = splat(FLOATS, 1 / math.factorial(7))
    for k in range(6, -1, -1):
        p = fma(b, p, r, splat(FLOATS, 1 / math.factorial(k)))
    zero = splat(FLOATS, 0.0)
    power = b.fptosi(b.select(b.fcmp_ordered(">=", x, splat(FLOATS, -87.0)), n, zero), INTS)
    scale = b.bitcast(b.shl(b.add(power, splat(INTS, 127)), splat(INTS, 23)), FLOATS)
    return b.select(b.fcmp_ordered("<", x, splat(FLOATS, -87.0)), zero, b.fmul(p, scale))


def scaled(b, index, size):
    """Byte offset of element `index` in an array of elements of `size` bytes."""
    return b.mul(index, I64(size))


def sigmoid_weighted(b, x):
    """x / (1 + e**-x), the SiLU."""
    negated = b.fneg(x)
    limited = b.select(b.fcmp_ordered(">", negated, splat(FLOATS, 88.0)), splat(FLOATS, 88.0), negated)
    return b.fdiv(x, b.fadd(splat(FLOATS, 1.0), exp(b, limited)))


def float_to_brain(b, x):
    """float32 to bfloat16 bits <16 x i16>, to nearest even; a NaN stays a NaN."""
    bits = b.bitcast(x, INTS)
    odd = b.and_(b.lshr(bits, splat(INTS, 16)), splat(INTS, 1))
    rounded = b.add(bits, b.add(odd, splat(INTS, 0x7FFF)))
    quiet = b.or_(bits, splat(INTS, 0x00400000))
    chosen = b.select(b.fcmp_unordered("uno", x, x), quiet, rounded)
    return b.trunc(b.lshr(chosen, splat(INTS, 16)), HALFS)


def float_to_half(b, x):
    """float32 to IEEE half bits <16 x i16>, to nearest even; too large becomes infinite, a NaN stays a NaN."""
    bits = b.bitcast(x, INTS)
    magnitude = b.and_(bits, splat(INTS, 0x7FFFFFFF))
    sign = b.and_(b.lshr(bits, splat(INTS, 16)), splat(INTS, 0x8000))
    odd = b.and_(b.lshr(magnitude, splat(INTS, 13)), splat(INTS, 1))
    normal = b.lshr(b.sub(b.add(magnitude, b.add(odd, splat(INTS, 0xFFF))), splat(INTS, 112 << 23)), splat(INTS, 13))
    # Adding 0.5 aligns the last bit of the sum with the step of half's subnormals, and rounds.
    shifted = b.bitcast(b.fadd(b.bitcast(magnitude, FLOATS), splat(FLOATS, 0.5)), INTS)
    small = b.sub(shifted, splat(INTS, 0x3F000000))
    result = b.select(b.icmp_unsigned("<", magnitude, splat(INTS, 113 << 23)), small, normal)
    result = b.select(b.icmp_unsigned(">=", magnitude, splat(INTS, 0x477FF000)), splat(INTS, 0x7C00), result)
    result = b.select(b.icmp_unsigned(">", magnitude, splat(INTS, 0x7F800000)), splat(INTS, 0x7E00), result)
    return b.trunc(b.or_(result, sign), HALFS)


class Brain(ir.Type):
    """LLVM's bfloat, for which llvmlite has no type."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, Brain)

    def __hash__(self):
        return hash(Brain)


_POWER_OF_TWO = (1.0, 0.6931241933678401, 0.2402409861125949, 0.05590642503645811, 0.00958285316890951)
_BRAINS = ir.VectorType(Brain(), 2 * LANES)
_IN_TURN = ir.Constant(ir.VectorType(I32, 2 * LANES), [lane for i in range(LANES) for lane in (i, LANES + i)])


def has_brain_dots():
    """Whether the CPU multiplies bf16."""
    return {"avx512f", "avx512bf16"} <= features()


def interleave(b, even, odd):
    """<16 x i16> and <16 x i16> as pairs <16 x i32>: the first is the lower half."""
    return b.bitcast(b.shuffle_vector(even, odd, _IN_TURN), INTS)


def brain_pairs(b, low, high):
    """32 float32 in two vectors, none of them subnormal, to bf16 pairs <16 x i32> in their order, to nearest even; a
    NaN stays one."""
    if has_brain_dots():
        return b.bitcast(call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", _BRAINS, [high, low]), INTS)
    order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(2 * LANES)))
    return b.bitcast(b.shuffle_vector(float_to_brain(b, low), float_to_brain(b, high), order), INTS)


def brain_dot(b, total, x, y):
    """total + the product of the upper and then that of the lower bf16 of pairs <16 x i32>, each sum rounded once.

    Subnormal numbers of x count as 0. y, total and both sums must not be subnormal: there, CPUs may differ.
    Source: Intel's Software Developer's Manual, VDPBF16PS.
    """
    if has_brain_dots():
        x, y = b.bitcast(x, _BRAINS), b.bitcast(y, _BRAINS)
        return call(b, "llvm.x86.avx512bf16.dpbf16ps.512", FLOATS, [total, x, y])

    def normal(bits):
        none = b.icmp_signed("==", b.and_(bits, splat(INTS, 0x7F800000)), splat(INTS, 0))
        return b.bitcast(b.select(none, splat(INTS, 0), bits), FLOATS)

    def halves(pairs):
        return b.and_(pairs, splat(INTS, 0xFFFF0000)), b.shl(pairs, splat(INTS, 16))

    for part, other in zip(halves(x), halves(y), strict=True):
        total = fma(b, normal(part), b.bitcast(other, FLOATS), total)
    return total


def power_of_two(b, x, least):
    """2**x in float32 for x <= 127, exactly for integers; below `least` (at least -126) it is 0. Of a NaN whose last 9
    bits are 0, as of all that come from bf16, a NaN. Relative error under 3e-6.

    x = n + r with |r| <= 1/2, 2**r by the polynomial of degree 4, 1 at 0, whose largest relative error is least.
    """
    # Adding and subtracting 1.5 * 2^23 rounds to an integer, and leaves that integer in the low bits of the sum.
    rounder = splat(FLOATS, 1.5 * 2**23)
    shifted = b.fadd(x, rounder)
    r = b.fsub(x, b.fsub(shifted, rounder))
    p = splat(FLOATS, _POWER_OF_TWO[-1])
    for coefficient in _POWER_OF_TWO[-2::-1]:
        p = fma(b, p, r, splat(FLOATS, coefficient))
    power = b.add(b.bitcast(p, INTS), b.shl(b.bitcast(shifted, INTS), splat(INTS, 23)))
    return b.select(b.fcmp_ordered("<", x, splat(FLOATS, least)), splat(FLOATS, 0.0), b.bitcast(power, FLOATS))
