"""What it costs to round weights with given steps: the inner loop of the quantisers in `quant.rounding`.

Sixteen rows are the lanes of a vector, so that sums go by columns, in the same order on every machine.
"""

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.llvm import (
    FLOATS,
    I64,
    INTS,
    LANES,
    SMALL,
    broadcast_at,
    data,
    fma,
    load,
    maximum,
    nearest,
    scaled,
    splat,
    store,
)  # fmt: skip

ERROR, SUM, SQUARES, PRODUCTS = range(4)
"""What `measure` adds up for each part, each term times the column's weight: (x - rounded x) ** 2, v, v * v, v * x."""

_FLOATS = types.float32[::1]
_VECTOR = 4 * LANES


def _clipped(b, y, levels, last):
    """The nearest whole number from the first to the last level."""
    low, high = broadcast_at(b, FLOATS, levels, I64(0)), broadcast_at(b, FLOATS, levels, last)
    above = maximum(b, nearest(b, y), low)
    return b.select(b.fcmp_ordered("<", above, high), above, high)


def _level(b, y, levels, thresholds, count):
    """The level to which y belongs: the one above the last threshold that y exceeds."""
    chosen = cgutils.alloca_once_value(b, broadcast_at(b, FLOATS, levels, I64(0)))
    with cgutils.for_range(b, count) as loop:
        above = b.fcmp_ordered(">", y, broadcast_at(b, FLOATS, thresholds, scaled(b, loop.index, 4)))
        level = broadcast_at(b, FLOATS, levels, scaled(b, b.add(loop.index, I64(1)), 4))
        b.store(b.select(above, level, b.load(chosen)), chosen)
    return b.load(chosen)


@intrinsic
def _measure_part(
    typing, x, weights, column, width, first, steps, offsets, part, levels, thresholds, sums, into, apart, values
):
    """One part of one tile. column: the part's first in `weights`; first: its first vector in x; part: its vector in
    steps and offsets; into: the vector in sums of its first sum, `apart` vectors from the next."""

    def emit(context, b, signature, arguments):
        arrays = {
            name: data(context, b, signature.args[i], arguments[i])
            for name, i in (("x", 0), ("weights", 1), ("steps", 5), ("offsets", 6), ("levels", 8), ("thresholds", 9),
                            ("sums", 10), ("values", 13))
        }  # fmt: skip
        column, width, first, part, into, apart = (arguments[i] for i in (2, 3, 4, 7, 11, 12))
        size = {
            name: context.make_array(signature.args[i])(context, b, arguments[i]).nitems
            for name, i in (("levels", 8), ("thresholds", 9), ("values", 13))
        }
        one, zero = splat(FLOATS, 1.0), splat(FLOATS, 0.0)
        step = load(b, FLOATS, arrays["steps"], scaled(b, part, _VECTOR))
        offset = load(b, FLOATS, arrays["offsets"], scaled(b, part, _VECTOR))
        inverse = b.select(b.fcmp_ordered("==", step, zero), zero, b.fdiv(one, step))
        last = scaled(b, b.sub(size["levels"], I64(1)), 4)
        totals = [cgutils.alloca_once_value(b, zero) for _ in range(4)]
        rounded = cgutils.alloca_once(b, FLOATS)
        with cgutils.for_range(b, width) as loop:
            at = b.add(first, loop.index)
            value = load(b, FLOATS, arrays["x"], scaled(b, at, _VECTOR))
            weight = broadcast_at(b, FLOATS, arrays["weights"], scaled(b, b.add(column, loop.index), 4))
            y = b.fmul(b.fadd(value, offset), inverse)
            with b.if_else(b.icmp_signed("==", size["thresholds"], I64(0))) as (uniform, uneven):
                with uniform:
                    b.store(_clipped(b, y, arrays["levels"], last), rounded)
                with uneven:
                    b.store(_level(b, y, arrays["levels"], arrays["thresholds"], size["thresholds"]), rounded)
            v = b.load(rounded)
            missed = b.fsub(b.fadd(value, offset), b.fmul(step, v))
            weighted = b.fmul(weight, v)
            terms = ((b.fmul(weight, missed), missed), (weight, v), (weighted, v), (weighted, value))
            for total, (factor, term) in zip(totals, terms, strict=True):
                b.store(fma(b, factor, term, b.load(total)), total)
            with b.if_then(b.icmp_signed("!=", size["values"], I64(0))):
                store(b, b.trunc(b.fptosi(v, INTS), SMALL), arrays["values"], scaled(b, at, LANES))
        for total in totals:
            store(b, b.load(total), arrays["sums"], scaled(b, into, _VECTOR))
            into = b.add(into, apart)
        return context.get_dummy_value()

    integer = types.int64
    return types.void(
        x, weights, integer, integer, integer, steps, offsets, integer, levels, thresholds, sums, integer, integer,
        values,
    ), emit  # fmt: skip


@njit(
    types.void(
        types.int64, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, _FLOATS, types.int8[::1]
    ),
    cache=True,
    nogil=True,
)  # fmt: skip
def measure(parts, x, weights, steps, offsets, levels, thresholds, sums, values):
    """Round x to `step * v - offset`, v the nearest of `levels`. All arrays are C-contiguous and flat; their shapes are

    x: float32 [tiles, columns, 16]. weights: float32 [columns]. steps, offsets: float32 [tiles, parts, 16]; where a
    step is 0, v is that of 0. levels: ascending whole numbers; thresholds: their midpoints; or none where levels are
    all whole numbers between the first and the last, which are given. sums: float32 [tiles, 4, parts, 16], out (`ERROR`
    and on). values: int8 [tiles, columns, 16], out, or empty.
    """
    columns = weights.size
    width = columns // parts
    for tile in range(x.size // (columns * LANES)):
        for part in range(parts):
            _measure_part(
                x, weights, part * width, width, tile * columns + part * width, steps, offsets, tile * parts + part,
                levels, thresholds, sums, 4 * tile * parts + part, parts, values,
            )  # fmt: skip
