"""exp of float64 numbers <= 0, 64 at a time, as explicit vectors.

Every result is the same bits on every machine: IEEE additions and multiplications in a fixed order, no contraction to
FMA, no fast-math, no library call. Lane by lane there is one long chain of them, so speed comes from the number of
independent chains begun together. A compiler that sees a whole polynomial puts one chain behind the other: hence the
loop over its coefficients.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.cpu import has
from prolepsis.kernels.llvm import F32, I64, broadcast, broadcast_at, data, load, scaled, splat, store

RUN = 64
"""Numbers that `exp_run` takes."""

# Chains that fit in the registers: 8 vectors of 8, or 4 to 8 smaller ones.
_LANES = 64 if has("avx512f") else 16

F64 = ir.DoubleType()
_DOUBLES, _LONGS, _FLOATS = (ir.VectorType(kind, _LANES) for kind in (F64, I64, F32))

_LOG2_E = 1.4426950408889634
# ln 2 in two parts (Cody and Waite): the first has 21 trailing zero bits, so n * _LN2_HIGH is exact for |n| <= 1100.
_LN2_HIGH = 6.93147180369123816490e-01
_LN2_LOW = 1.90821492927058770002e-10
# Adding and subtracting 1.5 * 2^52 rounds to an integer, and leaves that integer in the low bits of the sum.
_ROUNDER = 6755399441055744.0
_SMALLEST_EXPONENT = -708.0  # exp of anything lower would be subnormal; it counts as 0.

# Taylor to degree 13: the remainder at |r| <= ln(2) / 2 is below 2^-58. The last two coefficients are 1.
COEFFICIENTS = np.array([1.0 / math.factorial(degree) for degree in range(13, 1, -1)])
"""What `exp_run` is to be given."""


def _polynomial(b, r, coefficients, count):
    """Horner's rule over the coefficients in memory."""
    slot = cgutils.alloca_once(b, _DOUBLES)
    b.store(broadcast_at(b, _DOUBLES, coefficients, I64(0)), slot)
    with cgutils.for_range(b, b.sub(count, I64(1))) as loop:
        coefficient = broadcast_at(b, _DOUBLES, coefficients, scaled(b, b.add(loop.index, I64(1)), 8))
        b.store(b.fadd(b.fmul(b.load(slot), r), coefficient), slot)
    return b.load(slot)


def _exp(b, x, coefficients, count):
    """exp(x) of vectors x <= 0 within 1 ulp (2 near the bottom); exactly 1 at 0, and 0 below -708."""
    lowest = splat(_DOUBLES, _SMALLEST_EXPONENT)
    vanishes = b.fcmp_ordered("<", x, lowest)
    x = b.select(vanishes, lowest, x)
    shifted = b.fadd(b.fmul(x, splat(_DOUBLES, _LOG2_E)), splat(_DOUBLES, _ROUNDER))
    n = b.fsub(shifted, splat(_DOUBLES, _ROUNDER))
    r = b.fsub(x, b.fmul(n, splat(_DOUBLES, _LN2_HIGH)))
    r = b.fsub(r, b.fmul(n, splat(_DOUBLES, _LN2_LOW)))
    p = _polynomial(b, r, coefficients, count)
    p = b.fadd(b.fadd(b.fmul(b.fmul(p, r), r), r), splat(_DOUBLES, 1.0))
    # p is in 0.7 .. 1.5, so p * 2^n is p with n added to its exponent.
    power = b.shl(b.bitcast(shifted, _LONGS), splat(_LONGS, 52))
    return b.select(vanishes, splat(_DOUBLES, 0.0), b.bitcast(b.add(b.bitcast(p, _LONGS), power), _DOUBLES))


@intrinsic
def exp_run(typing, logits, at, largest, inverse_temperature, coefficients, count, out, to):
    """out[to + i] = exp((logits[at + i] - largest) * inverse_temperature) for 64 i.

    logits float32, none above `largest`; out float64; largest and inverse_temperature float64; coefficients and count:
    `COEFFICIENTS` and its length, which the compiler must not know.
    """
    if logits.layout != "C":
        return None  # no such function: the values do not lie side by side

    def emit(context, b, signature, arguments):
        _, at, largest, factor, _, count, _, to = arguments
        source, numbers, target = (data(context, b, signature.args[i], arguments[i]) for i in (0, 4, 6))
        largest, factor = (broadcast(b, _DOUBLES, value) for value in (largest, factor))
        for part in range(0, RUN, _LANES):
            value = b.fpext(load(b, _FLOATS, source, scaled(b, b.add(at, I64(part)), 4)), _DOUBLES)
            weight = _exp(b, b.fmul(b.fsub(value, largest), factor), numbers, count)
            store(b, weight, target, scaled(b, b.add(to, I64(part)), 8))
        return context.get_dummy_value()

    index, real = types.int64, types.float64
    return types.void(logits, index, real, real, coefficients, index, out, index), emit
