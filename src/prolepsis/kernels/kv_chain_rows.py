"""The inner loops of `kv_chain`: rows of 16 channels as explicit vectors, exact, or float32 and never fused."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    I32,
    I64,
    INTS,
    SMALL,
    data,
    load,
    nearest,
    scaled,
    splat,
    store,
    tree,
)

PAIRS = 8
_ROW = 4 * 2 * PAIRS  # bytes of a row of float32 or int32
_HALF = ir.VectorType(F32, PAIRS)


def _looping(emit):
    """An intrinsic's code generator that calls emit(b, pointer, arguments, row) for each row; the last argument counts
    them."""

    def codegen(context, b, signature, args):
        def pointer(i):
            return data(context, b, signature.args[i], args[i])

        with cgutils.for_range(b, args[-1]) as loop:
            emit(b, pointer, args, loop.index)
        return context.get_dummy_value()

    return codegen


@intrinsic
def add_rows(tyctx, base, first, stride, steps, products, out, out_first, out_stride, rows):
    """out[t, out_first : out_first + 16] = base[t, first : first + 16] + steps[first : first + 16] * products[t].

    base, out: float32, rows of `stride` and `out_stride`; they may be the same. steps: float32 [stride]. products:
    int32 [rows, 16].
    """

    def emit(b, pointer, args, row):
        step = load(b, FLOATS, pointer(3), scaled(b, args[1], 4))
        at = scaled(b, b.add(b.mul(row, args[2]), args[1]), 4)
        product = b.sitofp(load(b, INTS, pointer(4), scaled(b, row, _ROW)), FLOATS)
        total = b.fadd(load(b, FLOATS, pointer(0), at), b.fmul(step, product))
        store(b, total, pointer(5), scaled(b, b.add(b.mul(row, args[7]), args[6]), 4))

    i = types.int64
    return types.void(base, i, i, steps, products, out, i, i, i), _looping(emit)


@intrinsic
def turn_rows(tyctx, source, cos, sin, pair, stride, back, out, rows):
    """out[t] = source[t], whose first and second halves are pairs, turned by the angles of pairs `pair` ... `pair` + 7.

    source, out: float32 [rows, 16]. cos, sin: float32, rows of `stride`. back: 1 to turn the other way, else 0.
    """

    def emit(b, pointer, args, row):
        at = scaled(b, b.add(b.mul(row, args[4]), args[3]), 4)
        c, s = load(b, _HALF, pointer(1), at), load(b, _HALF, pointer(2), at)
        s = b.select(b.icmp_signed("==", args[5], I64(1)), b.fneg(s), s)
        begin = scaled(b, row, _ROW)
        middle = b.add(begin, I64(_ROW // 2))
        x, y = load(b, _HALF, pointer(0), begin), load(b, _HALF, pointer(0), middle)
        store(b, b.fsub(b.fmul(x, c), b.fmul(y, s)), pointer(6), begin)
        store(b, b.fadd(b.fmul(x, s), b.fmul(y, c)), pointer(6), middle)

    i = types.int64
    return types.void(source, cos, sin, i, i, i, out, i), _looping(emit)


def _nearest_within(b, x, limit):
    """The nearest integers within -limit ... limit, to even; -limit for NaN."""
    x = b.select(b.fcmp_ordered(">", x, splat(FLOATS, -limit)), x, splat(FLOATS, -limit))
    x = b.select(b.fcmp_ordered("<", x, splat(FLOATS, limit)), x, splat(FLOATS, limit))
    return b.fptosi(nearest(b, x), INTS)


def _add_to(b, pointer, row, kind, amount):
    at = scaled(b, row, kind.width // 8)
    store(b, b.add(load(b, kind, pointer, at), amount), pointer, at)


def learner(largest_feature, error_steps, largest_error):
    """Function (values, guesses, means, inverses, errors, first, stride, features, sums, energy, rows).

    For 16 channels from `first` on, features[t] = (values[t] - means) * inverses, rounded and bounded; sums[t] and
    energy[t] grow by the features and by the squares of (values[t] - guesses[t]) * errors * error_steps, rounded and
    bounded. values, guesses: float32 [rows, 16]. means, inverses, errors: float32 [stride]. features: int8, rows of
    `stride`. sums: int32 [rows]. energy: int64 [rows].
    """

    @intrinsic
    def learn_rows(tyctx, values, guesses, means, inverses, errors, first, stride, features, sums, energy, rows):
        def emit(b, pointer, args, row):
            def channel(i):
                return load(b, FLOATS, pointer(i), scaled(b, args[5], 4))

            def total(x):
                return tree(b, b.add, x)

            x, guess = (load(b, FLOATS, pointer(i), scaled(b, row, _ROW)) for i in range(2))
            feature = _nearest_within(b, b.fmul(b.fsub(x, channel(2)), channel(3)), float(largest_feature))
            store(b, b.trunc(feature, SMALL), pointer(7), b.add(b.mul(row, args[6]), args[5]))
            _add_to(b, pointer(8), row, I32, total(feature))
            scaled_error = b.fmul(b.fmul(b.fsub(x, guess), channel(4)), splat(FLOATS, float(error_steps)))
            error = _nearest_within(b, scaled_error, float(largest_error))
            _add_to(b, pointer(9), row, I64, b.sext(total(b.mul(error, error)), I64))

        i = types.int64
        return (
            types.void(values, guesses, means, inverses, errors, i, i, features, sums, energy, i),
            _looping(emit),
        )

    return learn_rows
