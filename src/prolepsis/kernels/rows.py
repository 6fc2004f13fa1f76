"""What is done to one row of activations at a time: norm, quantise, gate, rotate, add. All float32, fixed order.

Every row function is an intrinsic over flat arrays and element offsets; widths are multiples of 32.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.cells import CELL, PLANES, RECORD
from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    I64,
    INTS,
    LANES,
    SMALL,
    absolute,
    broadcast,
    call,
    data,
    float_to_brain,
    float_to_half,
    fma,
    load,
    nearest,
    scaled,
    sigmoid_weighted,
    splat,
    store,
    tree,
)

LARGEST_QUANT = 127.0 * 256 + 127  # the largest number of two signed bytes whose negative is one too
LARGEST_BYTE = 127.0
MODERATE = 2.0**60  # larger numbers are no hidden state of any model, and must not become infinite
DTYPE_BF16, DTYPE_FP16 = 0, 1
DTYPES = {"bf16": DTYPE_BF16, "fp16": DTYPE_FP16, "fp8_e4m3": 2, "fp8_e5m2": 3, "int8": 4, "int4": 5, "kivi4": 6}
"""Codes of cache dtypes. The first two have 16 bits; `kivi` makes and reads the last, and `narrow_kv` the others."""

_i = types.int64
_f = types.float32


def _vectors(b, width):
    """Loop over a row in vectors of 16; yields the element offset."""
    return cgutils.for_range_slice(b, I64(0), width, I64(LANES))


def _mean_square(b, px, at, width):
    total = cgutils.alloca_once(b, FLOATS)
    b.store(splat(FLOATS, 0.0), total)
    with _vectors(b, width) as (column, _):
        value = load(b, FLOATS, px, scaled(b, b.add(at, column), 4))
        b.store(fma(b, value, value, b.load(total)), total)
    return b.fdiv(tree(b, b.fadd, b.load(total)), b.sitofp(width, F32))


@intrinsic
def root_mean_square(tyctx, x, at, width):
    """sqrt(mean(x^2)) of a row, float32."""

    def codegen(context, b, signature, args):
        px = data(context, b, signature.args[0], args[0])
        return call(b, "llvm.sqrt.f32", F32, [_mean_square(b, px, args[1], args[2])])

    return _f(x, _i, _i), codegen


@intrinsic
def norm_row(tyctx, x, at, width, weight, weight_at, eps, out, out_at):
    """out = x / sqrt(mean(x^2) + eps) * weight (RMSNorm, Zhang and Sennrich 2019, arXiv:1910.07467, equation 4)."""

    def codegen(context, b, signature, args):
        px, pw, po = (data(context, b, signature.args[i], args[i]) for i in (0, 3, 6))
        mean = _mean_square(b, px, args[1], args[2])
        root = call(b, "llvm.sqrt.f32", F32, [b.fadd(mean, args[5])])
        factor = broadcast(b, FLOATS, b.fdiv(F32(1.0), root))
        with _vectors(b, args[2]) as (column, _):
            value = load(b, FLOATS, px, scaled(b, b.add(args[1], column), 4))
            gain = load(b, FLOATS, pw, scaled(b, b.add(args[4], column), 4))
            store(b, b.fmul(b.fmul(value, factor), gain), po, scaled(b, b.add(args[7], column), 4))
        return context.get_dummy_value()

    return types.void(x, _i, _i, weight, _i, _f, out, _i), codegen


@intrinsic
def add_row(tyctx, x, at, width, delta, delta_at):
    """x += delta."""

    def codegen(context, b, signature, args):
        px, pd = (data(context, b, signature.args[i], args[i]) for i in (0, 3))
        with _vectors(b, args[2]) as (column, _):
            where = scaled(b, b.add(args[1], column), 4)
            change = load(b, FLOATS, pd, scaled(b, b.add(args[4], column), 4))
            store(b, b.fadd(load(b, FLOATS, px, where), change), px, where)
        return context.get_dummy_value()

    return types.void(x, _i, _i, delta, _i), codegen


def _moderate(b, value):
    """`value` where it is below MODERATE in magnitude, else 0; NaN is none of the first."""
    small = b.fcmp_ordered("<", absolute(b, value), splat(FLOATS, MODERATE))
    return b.select(small, value, splat(FLOATS, 0.0))


@intrinsic
def moderate_row(tyctx, x, at, width):
    """Make what is NaN, or not below MODERATE in magnitude, 0."""

    def codegen(context, b, signature, args):
        px = data(context, b, signature.args[0], args[0])
        with _vectors(b, args[2]) as (column, _):
            where = scaled(b, b.add(args[1], column), 4)
            store(b, _moderate(b, load(b, FLOATS, px, where)), px, where)
        return context.get_dummy_value()

    return types.void(x, _i, _i), codegen


@intrinsic
def add_moderate_row(tyctx, x, at, width, delta):
    """x += delta, both from `at` on; what is then NaN, or not below MODERATE in magnitude, becomes 0; delta = 0."""

    def codegen(context, b, signature, args):
        px, pd = (data(context, b, signature.args[i], args[i]) for i in (0, 3))
        with _vectors(b, args[2]) as (column, _):
            where = scaled(b, b.add(args[1], column), 4)
            total = b.fadd(load(b, FLOATS, px, where), load(b, FLOATS, pd, where))
            store(b, _moderate(b, total), px, where)
            store(b, splat(FLOATS, 0.0), pd, where)
        return context.get_dummy_value()

    return types.void(x, _i, _i, delta), codegen


@intrinsic
def subtract_row(tyctx, x, y, at, width, out, out_at):
    """out = x - y, both from `at` on."""

    def codegen(context, b, signature, args):
        px, py, po = (data(context, b, signature.args[i], args[i]) for i in (0, 1, 4))
        with _vectors(b, args[3]) as (column, _):
            where = scaled(b, b.add(args[2], column), 4)
            difference = b.fsub(load(b, FLOATS, px, where), load(b, FLOATS, py, where))
            store(b, difference, po, scaled(b, b.add(args[5], column), 4))
        return context.get_dummy_value()

    return types.void(x, y, _i, _i, out, _i), codegen


@intrinsic
def gate_row(tyctx, gate, at, up_at, width, out, out_at):
    """out = silu(gate) * up, both in `gate` (SwiGLU, Shazeer 2020, arXiv:2002.05202, equation 5)."""

    def codegen(context, b, signature, args):
        pg, po = (data(context, b, signature.args[i], args[i]) for i in (0, 4))
        with _vectors(b, args[3]) as (column, _):
            g = load(b, FLOATS, pg, scaled(b, b.add(args[1], column), 4))
            u = load(b, FLOATS, pg, scaled(b, b.add(args[2], column), 4))
            store(b, b.fmul(sigmoid_weighted(b, g), u), po, scaled(b, b.add(args[5], column), 4))
        return context.get_dummy_value()

    return types.void(gate, _i, _i, _i, out, _i), codegen


def _quantise(planes):
    """Code of the functions that quantise a row to so many bytes."""
    limit = F32(LARGEST_QUANT if planes == PLANES else LARGEST_BYTE)

    def codegen(context, b, signature, args):
        def larger(u, v):
            return b.select(b.icmp_unsigned(">", u, v), u, v)

        px, pq, pr = (data(context, b, signature.args[i], args[i]) for i in (0, 3, 4))
        with cgutils.for_range(b, b.udiv(args[2], I64(CELL))) as loop:
            column = b.add(args[1], b.mul(loop.index, I64(CELL)))
            halves = [load(b, FLOATS, px, scaled(b, b.add(column, I64(LANES * h)), 4)) for h in range(2)]
            # As integers, the bits of positive floats are in the same order, and a NaN is the largest.
            magnitudes = [b.bitcast(absolute(b, half), INTS) for half in halves]
            largest = b.bitcast(tree(b, larger, larger(*magnitudes)), F32)
            scale = b.fdiv(largest, limit)
            inverse = b.select(b.fcmp_ordered(">", largest, F32(1e-30)), b.fdiv(limit, largest), F32(0.0))
            index = b.add(args[5], loop.index)
            sums = []
            for h, half in enumerate(halves):
                scaled_up = b.fmul(half, broadcast(b, FLOATS, inverse))
                number = b.fcmp_ordered("ord", scaled_up, scaled_up)
                q = b.fptosi(nearest(b, b.select(number, scaled_up, splat(FLOATS, 0.0))), INTS)
                for plane, byte in enumerate(_bytes(b, q, planes)):
                    at = b.add(scaled(b, index, PLANES * CELL), I64(CELL * plane + LANES * h))
                    store(b, b.trunc(byte, SMALL), pq, at)
                sums.append(tree(b, b.add, q))
            whole = b.add(*sums)
            words = [
                scale,
                b.fmul(scale, b.sitofp(whole, F32)),
                b.neg(sums[0]),
                b.neg(sums[1]),
                b.neg(whole),
            ]
            for i, word in enumerate(words):
                store(b, word, pr, b.add(scaled(b, index, 4 * RECORD), I64(4 * i)))
        return context.get_dummy_value()

    return codegen


def _bytes(b, q, planes):
    """The signed bytes of int32 quants, high ones first."""
    if planes == 1:
        return [q]
    low = b.sub(b.and_(b.add(q, splat(INTS, 128)), splat(INTS, 255)), splat(INTS, 128))
    return [b.ashr(b.sub(q, low), splat(INTS, 8)), low]


@intrinsic
def quantise_row(tyctx, x, at, width, quants, records, cell):
    """Quantise a row to 16 bits, one scale for each cell of 32: scale = max|x| / 32639, q = round(x / scale).

    q = 256 high + low, both int8: a cell's 32 high bytes come first, then its 32 low ones. A cell with an infinity or a
    NaN gets that as its scale and zeros as quants, which makes every product with it NaN;
    a cell whose largest value is 1e-30 or less gets zeros.
    quants int8[:] and records int32[:] (see `cells.RECORD`) are written from cell index `cell` on.
    """
    return types.void(x, _i, _i, quants, records, _i), _quantise(PLANES)


@intrinsic
def quantise_row_to_bytes(tyctx, x, at, width, quants, records, cell):
    """As `quantise_row`, to 8 bits: scale = max|x| / 127, and q takes the place of the high bytes."""
    return types.void(x, _i, _i, quants, records, _i), _quantise(1)


@intrinsic
def rotate_head(tyctx, x, at, rotated, width, cos, sin, angle, factor, out, out_at):
    """out = RoPE of one head's `width` values times `factor`; pairs (i, i + rotated / 2), the rest is only scaled.

    cos, sin float32[:], read from element `angle` on. Source: RoFormer, arXiv:2104.09864, equation 34.
    """

    def codegen(context, b, signature, args):
        px, pc, ps, po = (data(context, b, signature.args[i], args[i]) for i in (0, 4, 5, 8))
        half = b.udiv(args[2], I64(2))
        scale = broadcast(b, FLOATS, args[7])

        def read(column):
            return load(b, FLOATS, px, scaled(b, b.add(args[1], column), 4))

        def write(value, column):
            store(b, b.fmul(value, scale), po, scaled(b, b.add(args[9], column), 4))

        with _vectors(b, half) as (column, _):
            c, s = (load(b, FLOATS, p, scaled(b, b.add(args[6], column), 4)) for p in (pc, ps))
            first, second = read(column), read(b.add(column, half))
            write(b.fsub(b.fmul(first, c), b.fmul(second, s)), column)
            write(b.fadd(b.fmul(second, c), b.fmul(first, s)), b.add(column, half))
        with cgutils.for_range_slice(b, args[2], args[3], I64(LANES)) as (column, _):
            write(read(column), column)
        return context.get_dummy_value()

    return types.void(x, _i, _i, _i, cos, sin, _i, _f, out, _i), codegen


@intrinsic
def store_head(tyctx, dtype, x, at, width, pool, pool_at):
    """Round a head's float32 values to bf16 or fp16 (`DTYPES`) into uint16 `pool`, contiguous."""

    def codegen(context, b, signature, args):
        px, pp = (data(context, b, signature.args[i], args[i]) for i in (1, 4))
        for code, convert in ((DTYPE_BF16, float_to_brain), (DTYPE_FP16, float_to_half)):
            with b.if_then(b.icmp_signed("==", args[0], I64(code))), _vectors(b, args[3]) as (column, _):
                value = load(b, FLOATS, px, scaled(b, b.add(args[2], column), 4))
                store(b, convert(b, value), pp, scaled(b, b.add(args[5], column), 2))
        return context.get_dummy_value()

    return types.void(_i, x, _i, _i, pool, _i), codegen
