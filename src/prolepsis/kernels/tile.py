"""The inner loop of every matrix product: 16 weight rows times some activation rows, as explicit LLVM vectors.

A weight matrix is held in *tiles* of 16 rows (`quant.packing` makes them); a tile is a run of *cells*, one for each 32
columns. Row r of the tile is lane r of every vector, so a product needs no horizontal sum, and an output depends on its
own weight row and its own activation row alone: the bits are the same for every batch size, chunk and thread count.

Quantised kinds multiply unsigned weight bytes by 16-bit activations, high bytes first and then low ones, into int32
(exact in any order), then add `scale_w * scale_a * isum` in float32, cell after cell. Float kinds accumulate `w * x` in
float32, column after column.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.byte_dot import byte_dots
from prolepsis.kernels.cpu import has
from prolepsis.kernels.llvm import (
    BYTES,
    FLOATS,
    HALFS,
    I64,
    INTS,
    LANES,
    SMALL,
    brain_to_float,
    broadcast_at,
    data,
    fma,
    half_to_float,
    load,
    prefetch,
    scaled,
    splat,
    store,
)

CELL = 32  # columns in a cell: one block of quantised activations
PLANES = 2  # bytes of a quantised activation

# Kinds of weights a tile can hold, and the bytes of one cell of each.
Q4_0, Q4_1, Q8_0, Q6_K, F16, BF16, F32 = range(7)
KINDS = {"Q4_0": Q4_0, "Q4_1": Q4_1, "Q8_0": Q8_0, "Q6_K": Q6_K, "F16": F16, "BF16": BF16, "F32": F32}
CELL_BYTES = (32 + 256, 64 + 256, 32 + 512, 64 + 384, 1024, 1024, 2048)
QUANTISED = (Q4_0, Q4_1, Q8_0, Q6_K)

# The words of a cell's activation record (`rows.quantise_row` writes them): float32 scale, float32 scale times
# the sum of quants, then minus the sum of the first 16 quants, of the last 16 and of all 32, as int32.
RECORD = 5
_SCALE, _TOTAL, _FIRST_SUM, _WHOLE_SUM = 0, 1, 2, 4

_LINE = 64  # bytes that memory delivers at once
_AHEAD = 16384  # bytes between a weight that is used and one that is fetched

# log2 of what was added to a weight to make it unsigned.
_BIAS_SHIFT = {Q4_0: 3, Q8_0: 7, Q6_K: 5}
_LARGEST = {Q4_0: 15, Q4_1: 15, Q8_0: 255, Q6_K: 63}  # unsigned weights
# Activation rows done at once: as many as the registers hold integer and float accumulators of.
_ROWS_AT_ONCE = (8, 6, 4, 3, 2, 1) if has("avx512f") else (4, 2, 1)
# A float kind's single row waits for its own multiply-adds, so a second pass over a tile costs as much as the first.
_FLOAT_ROWS_AT_ONCE = (8, 6, 5, 4, 3, 2, 1) if has("avx512f") else (4, 3, 2, 1)


def _unpack(b, kind, w, cell):
    """The 8 unsigned byte vectors of a cell, each 16 rows x 4 columns."""

    def at(byte):
        return load(b, BYTES, w, b.add(cell, I64(byte)))

    if kind == Q8_0:
        return [at(32 + 64 * g) for g in range(8)]
    header = 32 if kind == Q4_0 else 64
    packed = [at(header + 64 * g) for g in range(4)]
    low = [b.and_(p, splat(BYTES, 15)) for p in packed]
    high = [b.and_(b.lshr(p, splat(BYTES, 4)), splat(BYTES, 15)) for p in packed]
    if kind != Q6_K:
        return low + high
    planes = [at(header + 256 + 64 * g) for g in range(2)]
    groups = []
    for g, nibbles in enumerate(low + high):
        bits = b.and_(b.lshr(planes[g // 4], splat(BYTES, 2 * (g % 4))), splat(BYTES, 3))
        groups.append(b.or_(nibbles, b.shl(bits, splat(BYTES, 4))))
    return groups


def _steps(b, kind, w, cell):
    """The weights' step sizes in a cell: one vector, or for Q6_K one for each half of the columns."""
    scale = half_to_float(b, load(b, HALFS, w, cell))
    if kind != Q6_K:
        return [scale]
    halves = (load(b, SMALL, w, b.add(cell, I64(32 + 16 * half))) for half in range(2))
    return [b.fmul(scale, b.sitofp(b.sext(signed, INTS), FLOATS)) for signed in halves]


def _quantised_cell(b, kind, planes, w, cell, quants, records, accumulators):
    """Adds one cell's products to the accumulators; `quants` and `records` give (pointer, byte offset) by row."""
    groups, steps = _unpack(b, kind, w, cell), _steps(b, kind, w, cell)
    parts = len(steps)

    def word(t, index):
        base, offset = records(t)
        return base, b.add(offset, I64(4 * index))

    def start(t, part):
        if kind == Q4_1:
            return splat(INTS, 0)
        negated = broadcast_at(b, INTS, *word(t, _WHOLE_SUM if parts == 1 else _FIRST_SUM + part))
        return b.shl(negated, splat(INTS, _BIAS_SHIFT[kind]))

    rows = range(len(accumulators))
    sums = []
    for part in range(parts):
        of_part = range(part * len(groups) // parts, (part + 1) * len(groups) // parts)

        def plane(starts, first, of_part=of_part):
            def activation(row, g):
                base, offset = quants(row)
                return b.bitcast(broadcast_at(b, INTS, base, b.add(offset, I64(first + 4 * of_part[g]))), BYTES)

            return byte_dots(b, starts, [groups[g] for g in of_part], activation, _LARGEST[kind])

        starts = [start(t, part) for t in rows]
        if planes == PLANES:
            high = plane([splat(INTS, 0) for _ in rows], 0)
            starts = [b.add(b.shl(h, splat(INTS, 8)), s) for h, s in zip(high, starts, strict=True)]
        sums.append(plane(starts, CELL * (planes - 1)))
    minimum = half_to_float(b, load(b, HALFS, w, b.add(cell, I64(32)))) if kind == Q4_1 else None
    for t in rows:
        scale = broadcast_at(b, FLOATS, *word(t, _SCALE))
        value = b.load(accumulators[t])
        for isums, step in zip(sums, steps, strict=True):
            value = fma(b, b.sitofp(isums[t], FLOATS), b.fmul(step, scale), value)
        if minimum is not None:
            value = fma(b, minimum, broadcast_at(b, FLOATS, *word(t, _TOTAL)), value)
        b.store(value, accumulators[t])


def _float_cell(b, kind, w, cell, x, accumulators):
    """As `_quantised_cell`, for float weights and float32 activations; `accumulators` are stack slots."""
    width = 4 if kind == F32 else 2
    with cgutils.for_range(b, I64(CELL)) as loop:
        at = b.add(cell, scaled(b, loop.index, LANES * width))
        if kind == F32:
            weights = load(b, FLOATS, w, at)
        else:
            widen = half_to_float if kind == F16 else brain_to_float
            weights = widen(b, load(b, HALFS, w, at))
        for t, slot in enumerate(accumulators):
            base, offset = x(t)
            value = broadcast_at(b, FLOATS, base, b.add(offset, scaled(b, loop.index, 4)))
            b.store(fma(b, weights, value, b.load(slot)), slot)


def _product(b, kind, planes, count, first, tile, activations, output):
    """Rows first .. first + count of the activations times one tile."""
    w, offset, cells = tile
    x, quants, records = activations
    out, stride, column = output
    accumulators = [cgutils.alloca_once_value(b, splat(FLOATS, 0.0)) for _ in range(count)]
    for slot in accumulators:
        b.store(splat(FLOATS, 0.0), slot)
    with cgutils.for_range(b, cells) as loop:
        cell = b.add(offset, scaled(b, loop.index, CELL_BYTES[kind]))
        if count > 1:
            # A single row reads as fast as memory delivers; more compute between reads, and would wait for each.
            for line in range(0, CELL_BYTES[kind], _LINE):
                prefetch(b, b.gep(w, [b.add(cell, I64(_AHEAD + line))]))

        def at(base, size):
            def address(t):
                index = b.add(b.mul(b.add(first, I64(t)), cells), loop.index)
                return base, scaled(b, index, size)

            return address

        if kind in (F16, BF16, F32):
            _float_cell(b, kind, w, cell, at(x, 4 * CELL), accumulators)
        else:
            _quantised_cell(
                b, kind, planes, w, cell, at(quants, PLANES * CELL), at(records, 4 * RECORD), accumulators
            )  # fmt: skip
    for t, slot in enumerate(accumulators):
        index = b.add(b.mul(b.add(first, I64(t)), stride), column)
        store(b, b.load(slot), out, scaled(b, index, 4))


def _tile_product(kinds, planes):
    """Code of the products with weights of these kinds and activations of so many bytes."""

    def codegen(context, b, signature, args):
        def pointer(i):
            return data(context, b, signature.args[i], args[i])

        tile = (pointer(1), args[2], args[3])
        activations = (pointer(4), pointer(5), pointer(6))
        output = (pointer(8), args[9], args[10])
        for code in kinds:
            with b.if_then(b.icmp_signed("==", args[0], I64(code))):
                first = I64(0)
                for count in _ROWS_AT_ONCE if code in QUANTISED else _FLOAT_ROWS_AT_ONCE:
                    left = b.sub(args[7], first)
                    groups = b.udiv(left, I64(count))
                    with cgutils.for_range(b, groups) as loop:
                        start = b.add(first, b.mul(loop.index, I64(count)))
                        _product(b, code, planes, count, start, tile, activations, output)
                    first = b.add(first, b.mul(groups, I64(count)))
        return context.get_dummy_value()

    return codegen


@intrinsic
def tile_product(tyctx, kind, weights, offset, cells, x, quants, records, rows, out, stride, column):
    """out[:rows, column : column + 16] = activations[:rows] times the tile at byte `offset` of weights, transposed.

    kind one of KINDS; weights uint8[:]; x float32[:] (read by float kinds), quants int8[:] and records int32[:] (read
    by the quantised kinds, see `rows.quantise_row`), each `rows` rows of `cells` cells; out float32[:] with rows of
    `stride` floats.
    """
    i = types.int64
    signature = types.void(i, weights, i, i, x, quants, records, i, out, i, i)
    return signature, _tile_product(KINDS.values(), PLANES)


@intrinsic
def tile_product_of_bytes(tyctx, kind, weights, offset, cells, x, quants, records, rows, out, stride, column):
    """As `tile_product`, for activations of `rows.quantise_row_to_bytes` and quantised kinds of weights."""
    i = types.int64
    signature = types.void(i, weights, i, i, x, quants, records, i, out, i, i)
    return signature, _tile_product(QUANTISED, 1)
