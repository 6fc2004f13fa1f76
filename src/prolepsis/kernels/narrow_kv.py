"""K and V of fewer than 16 bits: what a head's float32 values become in the cache, and what attention reads for it.

A float8 is its byte. An integer is a multiple of the step that its token's head has, fp16 bits beside the values: an
int8 is its byte, and of two int4 in a byte the even channel is the low nibble. Attention reads the value of the nearest
bf16, and 0 for what is no finite number: `coding.past.as_attended` says the same of whole arrays.
"""

from typing import NamedTuple

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.cpu import has
from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    HALFS,
    I8,
    I32,
    I64,
    INTS,
    LANES,
    SMALL,
    absolute,
    broadcast,
    broadcast_at,
    call,
    data,
    float_to_half,
    half_to_float,
    load,
    maximum,
    nearest,
    scaled,
    splat,
    store,
    tree,
)
from prolepsis.kernels.rows import DTYPE_BF16, DTYPE_FP16, DTYPES

_LANES_OF_TWO = ir.VectorType(I32, 2 * LANES)
_IN_TURN = ir.Constant(_LANES_OF_TWO, [lane for i in range(LANES) for lane in (i, LANES + i)])
_i = types.int64


class _Float8(NamedTuple):
    """exponent_bias: float32's exponent code minus its own. overflow: code of what is too large. first_none: of what is
    no finite number."""

    mantissa_bits: int
    exponent_bias: int
    overflow: int
    first_none: int


_FLOATS8 = {DTYPES["fp8_e4m3"]: _Float8(3, 120, 0x7E, 0x7F), DTYPES["fp8_e5m2"]: _Float8(2, 112, 0x7C, 0x7C)}
_INTEGERS = {DTYPES["int8"]: 127, DTYPES["int4"]: 7}
_INT4, _FP8_E5M2 = DTYPES["int4"], DTYPES["fp8_e5m2"]


def _for_each(b, dtype, kinds, emit):
    for code, kind in kinds.items():
        with b.if_then(b.icmp_signed("==", dtype, I64(code))):
            emit(code, kind)


class _Brain(ir.Type):
    """LLVM's bfloat, for which llvmlite has no type."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _Brain)

    def __hash__(self):
        return hash(_Brain)


def nearest_brain(b, x):
    """float32 to bf16 bits <16 x i16>, to nearest even: numbers that are finite, and zero or normal."""
    if has("avx512f", "avx512bf16"):  # one instruction, which takes subnormal numbers for 0
        name = "llvm.x86.avx512bf16.cvtneps2bf16.512"
        return b.bitcast(call(b, name, ir.VectorType(_Brain(), LANES), [x]), HALFS)
    bits = b.bitcast(x, INTS)
    odd = b.and_(b.lshr(bits, splat(INTS, 16)), splat(INTS, 1))
    rounded = b.add(bits, b.add(odd, splat(INTS, 0x7FFF)))
    return b.trunc(b.lshr(rounded, splat(INTS, 16)), HALFS)


def _float8_to_16_bits(b, kind, codes):
    """<16 x i8> codes as `attended` has them, exactly; 0 for what is no finite number."""
    none = b.icmp_unsigned(">=", b.and_(codes, splat(SMALL, 0x7F)), splat(SMALL, kind.first_none))
    codes = b.select(none, splat(SMALL, 0), codes)
    if kind.mantissa_bits == 2:
        return b.shl(b.zext(codes, HALFS), splat(HALFS, 8))
    # As fp16, with one bit more of exponent, it is less by a power of two.
    lesser = b.and_(b.shl(b.sext(codes, HALFS), splat(HALFS, 7)), splat(HALFS, 0xBFFF))
    return nearest_brain(b, b.fmul(half_to_float(b, lesser), splat(FLOATS, 256.0)))


def _multiples(b, integers, steps):
    """<16 x i32> integers times float32 steps, as the nearest bf16."""
    return nearest_brain(b, b.fmul(b.sitofp(integers, FLOATS), steps))


def _steps(b, bits):
    """fp16 bits <16 x i16> to float32; 0 for what is no finite number."""
    none = b.icmp_unsigned(">=", b.and_(bits, splat(HALFS, 0x7FFF)), splat(HALFS, 0x7C00))
    return half_to_float(b, b.select(none, splat(HALFS, 0), bits))


def _pairs(b, pairs, steps):
    """The even and the odd int4 of bytes <16 x i8> times float32 steps, as the nearest bf16."""
    wide = b.sext(pairs, INTS)
    # Each is left where it lies in its integer: a power of two more, which the step makes up for.
    even, odd = b.shl(wide, splat(INTS, 28)), b.and_(wide, splat(INTS, ~0xF))
    return [_multiples(b, x, b.fmul(steps, splat(FLOATS, 2.0**-n))) for x, n in ((even, 28), (odd, 4))]


@njit(cache=True)
def attended(dtype):
    """The dtype of 16 bits as which attention reads a narrow one: fp16 where its upper byte is the narrow value,
    else bf16."""
    return DTYPE_FP16 if dtype == _FP8_E5M2 else DTYPE_BF16


@intrinsic
def widen_keys(tyctx, dtype, k, first_at, second_at, stride, dim, steps, first_step, second_step, out):
    """out[d, :32] = bits of `attended` of channel d of two runs of 16 tokens.

    k: row r of the bytes of the 16 tokens at byte first_at + r * stride (and second_at + r * stride), a row being a
    channel, or two of int4. steps: fp16 bits of the tokens, from elements first_step and second_step on. out
    uint16[:] [dim, 32], flat.
    """

    def codegen(context, b, signature, args):
        pk, ps, po = (data(context, b, signature.args[i], args[i]) for i in (1, 6, 9))
        bases, stride, dim = (args[2], args[3]), args[4], args[5]

        def put(bits, channel, run):
            store(b, bits, po, scaled(b, b.add(b.mul(channel, I64(2 * LANES)), I64(LANES * run)), 2))

        def each_row(rows, emit):
            with cgutils.for_range(b, rows) as loop:
                for run, base in enumerate(bases):
                    emit(loop.index, run, load(b, SMALL, pk, b.add(base, b.mul(loop.index, stride))))

        def floats(code, kind):
            each_row(dim, lambda row, run, codes: put(_float8_to_16_bits(b, kind, codes), row, run))

        def integers(code, limit):
            sizes = [_steps(b, load(b, HALFS, ps, scaled(b, at, 2))) for at in (args[7], args[8])]

            def bytes_(row, run, values):
                put(_multiples(b, b.sext(values, INTS), sizes[run]), row, run)

            def pairs(row, run, values):
                for odd, bits in enumerate(_pairs(b, values, sizes[run])):
                    put(bits, b.add(b.add(row, row), I64(odd)), run)

            if code == _INT4:
                each_row(b.udiv(dim, I64(2)), pairs)
            else:
                each_row(dim, bytes_)

        _for_each(b, args[0], _FLOATS8, floats)
        _for_each(b, args[0], _INTEGERS, integers)
        return context.get_dummy_value()

    return types.void(_i, k, _i, _i, _i, _i, steps, _i, _i, out), codegen


@intrinsic
def widen_values(tyctx, dtype, v, at, count, dim, steps, step_at, out):
    """out[t] = bits of `attended` of the channels of `count` tokens.

    v: the bytes of token t follow those of token t - 1, the first from byte `at` on. steps: fp16 bits, from element
    step_at on. out uint16[:] [count, dim], flat.
    """

    def codegen(context, b, signature, args):
        pv, ps, po = (data(context, b, signature.args[i], args[i]) for i in (1, 5, 7))
        at, count, dim = args[2], args[3], args[4]

        def floats(code, kind):
            with cgutils.for_range_slice(b, I64(0), b.mul(count, dim), I64(LANES)) as (column, _):
                codes = load(b, SMALL, pv, b.add(at, column))
                store(b, _float8_to_16_bits(b, kind, codes), po, scaled(b, column, 2))

        def integers(code, limit):
            channels = 2 if code == _INT4 else 1  # of a byte
            row = b.udiv(dim, I64(channels))
            with cgutils.for_range(b, count) as loop:
                size = _steps(b, broadcast_at(b, HALFS, ps, scaled(b, b.add(args[6], loop.index), 2)))
                first = b.mul(loop.index, row)
                with cgutils.for_range_slice(b, first, b.add(first, row), I64(LANES)) as (column, _):
                    values, place = load(b, SMALL, pv, b.add(at, column)), scaled(b, column, 2 * channels)
                    if code == _INT4:
                        store(b, b.shuffle_vector(*_pairs(b, values, size), _IN_TURN), po, place)
                    else:
                        store(b, _multiples(b, b.sext(values, INTS), size), po, place)

        _for_each(b, args[0], _FLOATS8, floats)
        _for_each(b, args[0], _INTEGERS, integers)
        return context.get_dummy_value()

    return types.void(_i, v, _i, _i, _i, steps, _i, out), codegen


def _nearest_float8(b, kind, x):
    """float32 to codes <16 x i8>, to nearest even; what is too large becomes `overflow`, a NaN stays one."""
    bits, dropped = b.bitcast(x, INTS), 23 - kind.mantissa_bits
    size = b.and_(bits, splat(INTS, 0x7FFFFFFF))
    odd = b.and_(b.lshr(size, splat(INTS, dropped)), splat(INTS, 1))
    moved = b.sub(size, splat(INTS, kind.exponent_bias << 23))
    normal = b.lshr(b.add(moved, b.add(odd, splat(INTS, (1 << (dropped - 1)) - 1))), splat(INTS, dropped))
    # Below the smallest normal number: added to this power of two, their unit is that of float32.
    smallest = (kind.exponent_bias + 1) << 23
    is_small = b.icmp_unsigned("<", size, splat(INTS, smallest))
    anchor = splat(INTS, smallest + (dropped << 23))
    part = b.bitcast(b.select(is_small, size, splat(INTS, 0)), FLOATS)
    small = b.sub(b.bitcast(b.fadd(part, b.bitcast(anchor, FLOATS)), INTS), anchor)
    code = b.select(is_small, small, normal)
    code = b.select(b.icmp_unsigned("<", code, splat(INTS, kind.overflow)), code, splat(INTS, kind.overflow))
    code = b.select(b.icmp_unsigned(">", size, splat(INTS, 0x7F800000)), splat(INTS, 0x7F), code)
    return b.trunc(b.or_(code, b.and_(b.lshr(bits, splat(INTS, 24)), splat(INTS, 0x80))), SMALL)


def finite(b, x):
    """x, and 0 for NaN and infinities."""
    return b.select(b.fcmp_ordered("<", absolute(b, x), splat(FLOATS, float("inf"))), x, splat(FLOATS, 0.0))


def _packed(b, first, second):
    """The int4 of 32 channels, int32 in two vectors, as bytes <16 x i8>."""
    order = ir.Constant(_LANES_OF_TWO, list(range(2 * LANES)))
    couples = b.bitcast(b.shuffle_vector(b.trunc(first, SMALL), b.trunc(second, SMALL), order), HALFS)
    low = b.and_(couples, splat(HALFS, 0x000F))
    return b.trunc(b.or_(low, b.and_(b.lshr(couples, splat(HALFS, 4)), splat(HALFS, 0x00F0))), SMALL)


@intrinsic
def store_narrow_head(tyctx, dtype, x, at, width, out, out_at, steps, step_at):
    """A head's float32 values as a cache stores them (`coding.cache_dtypes.quantise`), to `out` from byte out_at on.

    steps uint16[:]: the head's step goes to element step_at, where the dtype has one.
    """

    def codegen(context, b, signature, args):
        px, po, ps = (data(context, b, signature.args[i], args[i]) for i in (1, 4, 6))
        start, width, out_at = args[2], args[3], args[5]

        def read(column):
            return load(b, FLOATS, px, scaled(b, b.add(start, column), 4))

        def floats(code, kind):
            with cgutils.for_range_slice(b, I64(0), width, I64(LANES)) as (column, _):
                store(b, _nearest_float8(b, kind, read(column)), po, b.add(out_at, column))

        def integers(code, limit):
            slot = cgutils.alloca_once_value(b, splat(FLOATS, 0.0))
            with cgutils.for_range_slice(b, I64(0), width, I64(LANES)) as (column, _):
                b.store(maximum(b, absolute(b, finite(b, read(column))), b.load(slot)), slot)
            largest = tree(b, lambda u, v: maximum(b, u, v), b.load(slot))
            step = float_to_half(b, broadcast(b, FLOATS, b.fdiv(largest, F32(limit))))
            store(b, b.extract_element(step, I32(0)), ps, scaled(b, args[7], 2))
            size = half_to_float(b, step)
            none = b.fcmp_ordered("==", size, splat(FLOATS, 0.0))
            divisor = b.select(none, splat(FLOATS, float("inf")), size)

            def nearest_integers(column):
                number = nearest(b, b.fdiv(finite(b, read(column)), divisor))
                top, bottom = splat(FLOATS, float(limit)), splat(FLOATS, float(-limit))
                number = b.select(b.fcmp_ordered(">", number, top), top, number)
                return b.fptosi(b.select(b.fcmp_ordered("<", number, bottom), bottom, number), INTS)

            if code == _INT4:
                with cgutils.for_range_slice(b, I64(0), width, I64(2 * LANES)) as (column, _):
                    halves = (nearest_integers(b.add(column, I64(LANES * h))) for h in range(2))
                    store(b, _packed(b, *halves), po, b.add(out_at, b.udiv(column, I64(2))))
            else:
                with cgutils.for_range_slice(b, I64(0), width, I64(LANES)) as (column, _):
                    store(b, b.trunc(nearest_integers(column), SMALL), po, b.add(out_at, column))

        _for_each(b, args[0], _FLOATS8, floats)
        _for_each(b, args[0], _INTEGERS, integers)
        return context.get_dummy_value()

    return types.void(_i, x, _i, _i, out, _i, steps, _i), codegen


@intrinsic
def scatter_bytes(tyctx, source, count, out, at, stride):
    """Byte i of `source` to byte at + i * stride of `out`."""

    def codegen(context, b, signature, args):
        px, po = (data(context, b, signature.args[i], args[i]) for i in (0, 2))
        with cgutils.for_range(b, args[1]) as loop:
            store(b, load(b, I8, px, loop.index), po, b.add(args[3], b.mul(loop.index, args[4])))
        return context.get_dummy_value()

    return types.void(source, _i, out, _i, _i), codegen
