"""The inner loop of every matrix product: 16 weight rows times some activation rows, as explicit LLVM vectors.

A weight matrix is held in tiles of 16 rows (`cells` says how). Row r of a tile is lane r of every vector, so a product
needs no horizontal sum, and an output depends on its own weight row and its own activation row alone: the bits are the
same for every batch size, chunk and thread count.

Quantised kinds multiply unsigned weight bytes by 16-bit activations, high bytes first and then low ones, into int32
(exact in any order; biases and zero points are a part of it), then add `scale_w * scale_a * isum` in float32, cell
after cell. Float kinds accumulate `w * x` in float32, column after column.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.byte_dot import byte_dots, look_up
from prolepsis.kernels.cells import (
    CELL,
    PLANES,
    RECORD,
    cell_bytes,
    group_bytes,
    is_float,
    part_bytes,
    parts_of,
    plane_bytes,
    planes_of,
)
from prolepsis.kernels.cpu import has
from prolepsis.kernels.kinds import FREE, KINDS
from prolepsis.kernels.llvm import (
    BYTES,
    FLOATS,
    HALFS,
    I64,
    INTS,
    LANES,
    SMALL,
    brain_to_float,
    broadcast,
    broadcast_at,
    fma,
    half_to_float,
    load,
    prefetch,
    scaled,
    splat,
    store,
)

_SCALE, _TOTAL, _FIRST_SUM, _WHOLE_SUM = 0, 1, 2, 4  # words of a record
_LINE = 64  # bytes that memory delivers at once
_AHEAD = 16384  # bytes between a weight that is used and one that is fetched
_VECTORS = CELL // 4  # of bytes in a cell

# Activation rows done at once: as many as the registers hold integer and float accumulators of.
_ROWS_AT_ONCE = (8, 6, 4, 3, 2, 1) if has("avx512f") else (4, 2, 1)
# Each number is a loop to compile: rare kinds have fewer.
_RARE_ROWS_AT_ONCE = (8, 4, 2, 1) if has("avx512f") else (4, 1)
# A float kind's single row waits for its own multiply-adds, so a second pass over a tile costs as much as the first.
_FLOAT_ROWS_AT_ONCE = (8, 6, 5, 4, 3, 2, 1) if has("avx512f") else (4, 3, 2, 1)


def _bias(kind):
    """What is added to values to make them unsigned: of a book, a power of two that suffices."""
    return 1 << (-min(kind.book) - 1).bit_length() if kind.book else kind.bias


def _largest(kind):
    """The largest unsigned value."""
    return max(kind.book) + _bias(kind) if kind.book else (1 << kind.bits) - 1


def _vector_of_plane(b, packed, bits, v):
    """Vector v of the codes' bits that lie in a plane."""
    each = 8 // bits
    vector, at = (packed[v % 4], v // 4) if bits == 4 else (packed[v // each], v % each)
    shifted = b.lshr(vector, splat(BYTES, at * bits)) if at else vector
    return shifted if bits == 8 else b.and_(shifted, splat(BYTES, (1 << bits) - 1))


def _unpack(b, kind, w, codes):
    """The 8 vectors of unsigned bytes at `codes`, each 16 rows x 4 columns."""
    vectors, at, shift = [None] * _VECTORS, 0, 0
    for bits in planes_of(kind):
        size = plane_bytes(bits)
        packed = [load(b, BYTES, w, b.add(codes, I64(at + byte))) for byte in range(0, size, 64)]
        for v in range(_VECTORS):
            part = _vector_of_plane(b, packed, bits, v)
            part = b.shl(part, splat(BYTES, shift)) if shift else part
            vectors[v] = part if vectors[v] is None else b.or_(vectors[v], part)
        at, shift = at + size, shift + bits
    if not kind.book:
        return vectors
    table = [value + _bias(kind) for value in kind.book]
    return [look_up(b, table, vector) for vector in vectors]


def _halves(b, w, at):
    return half_to_float(b, load(b, HALFS, w, at))


class _Group:
    """The numbers that the cells of a group share: vectors of 16 rows."""

    def __init__(self, b, kind, w, at):
        if is_float(kind):
            return
        self.scale = _halves(b, w, at)
        behind = b.add(at, I64(2 * LANES))
        self.minimum = _halves(b, w, behind) if kind.minimums else None
        self.zero = b.zext(load(b, SMALL, w, behind), INTS) if kind.group == FREE else None

    def steps(self, b, kind, w, cell):
        """Of the parts of a cell: step sizes, and minimums or None."""
        parts = parts_of(kind)
        if not parts:
            return [self.scale], [self.minimum]

        def factors(first, widen):
            at = (b.add(cell, I64(LANES * (first + part))) for part in range(parts))
            return [b.sitofp(widen(load(b, SMALL, w, where), INTS), FLOATS) for where in at]

        steps = [b.fmul(self.scale, factor) for factor in factors(0, b.sext)]
        if not kind.minimums:
            return steps, [None] * parts
        return steps, [b.fneg(b.fmul(self.minimum, factor)) for factor in factors(parts, b.zext)]


class _Record:
    """The words of one activation row's record of a cell."""

    def __init__(self, b, at):
        self._base, self._offset = at

    def broadcast(self, b, vector, word):
        return broadcast_at(b, vector, self._base, b.add(self._offset, I64(4 * word)))

    def total(self, b, part, parts):
        """The sum of the activations of a part, rounded once."""
        if parts == 1:
            return self.broadcast(b, FLOATS, _TOTAL)
        negated = b.sitofp(self.broadcast(b, INTS, _FIRST_SUM + part), FLOATS)
        return b.fmul(self.broadcast(b, FLOATS, _SCALE), b.fneg(negated))


def _start(b, kind, group, record, part, parts):
    """What biases and zero points take off the integer sum of a part."""
    bias = _bias(kind)
    if not bias and group.zero is None:
        return splat(INTS, 0)
    negated = record.broadcast(b, INTS, _WHOLE_SUM if parts == 1 else _FIRST_SUM + part)
    if group.zero is not None:
        return b.mul(negated, group.zero)
    return b.shl(negated, splat(INTS, bias.bit_length() - 1))


def _quantised_cell(b, kind, planes, w, cell, group, quants, records, accumulators):
    """Adds one cell's products to the accumulators; `quants` and `records` give (pointer, byte offset) by row."""
    vectors = _unpack(b, kind, w, b.add(cell, I64(part_bytes(kind))))
    steps, minimums = group.steps(b, kind, w, cell)
    rows, parts = [_Record(b, records(t)) for t in range(len(accumulators))], len(steps)
    sums = []
    for part in range(parts):
        of_part = range(part * _VECTORS // parts, (part + 1) * _VECTORS // parts)

        def plane(starts, first, of_part=of_part):
            def activation(row, v):
                base, offset = quants(row)
                return b.bitcast(broadcast_at(b, INTS, base, b.add(offset, I64(first + 4 * of_part[v]))), BYTES)

            return byte_dots(b, starts, [vectors[v] for v in of_part], activation, _largest(kind))

        starts = [_start(b, kind, group, record, part, parts) for record in rows]
        if planes == PLANES:
            high = plane([splat(INTS, 0) for _ in rows], 0)
            starts = [b.add(b.shl(h, splat(INTS, 8)), s) for h, s in zip(high, starts, strict=True)]
        sums.append(plane(starts, CELL * (planes - 1)))
    for t, record in enumerate(rows):
        scale = record.broadcast(b, FLOATS, _SCALE)
        value = b.load(accumulators[t])
        for isums, step in zip(sums, steps, strict=True):
            value = fma(b, b.sitofp(isums[t], FLOATS), b.fmul(step, scale), value)
        for part, minimum in enumerate(minimums):
            if minimum is not None:
                value = fma(b, minimum, record.total(b, part, parts), value)
        b.store(value, accumulators[t])


def _float_cell(b, kind, w, cell, x, accumulators):
    """As `_quantised_cell`, for float weights and float32 activations; `accumulators` are stack slots."""
    width = kind.bits // 8
    with cgutils.for_range(b, I64(CELL)) as loop:
        at = b.add(cell, scaled(b, loop.index, LANES * width))
        if kind.bits == 32:
            weights = load(b, FLOATS, w, at)
        else:
            widen = brain_to_float if kind.brain else half_to_float
            weights = widen(b, load(b, HALFS, w, at))
        for t, slot in enumerate(accumulators):
            base, offset = x(t)
            value = broadcast_at(b, FLOATS, base, b.add(offset, scaled(b, loop.index, 4)))
            b.store(fma(b, weights, value, b.load(slot)), slot)


def _each_cell(b, kind, w, cells, cells_of_group, visit):
    """Code that calls visit(byte offset of a cell, its number, its group) for every cell of a tile."""
    header, size = group_bytes(kind), cell_bytes(kind)
    if kind.group != FREE and kind.group <= CELL:
        with cgutils.for_range(b, cells) as loop:
            at = scaled(b, loop.index, header + size)
            visit(b.add(at, I64(header)), loop.index, _Group(b, kind, w, at))
        return
    per_group = cells_of_group if kind.group == FREE else I64(kind.group // CELL)
    groups = b.udiv(b.sub(b.add(cells, per_group), I64(1)), per_group)
    group_size = b.add(b.mul(per_group, I64(size)), I64(header))
    with cgutils.for_range(b, groups) as loop:
        at, first = b.mul(loop.index, group_size), b.mul(loop.index, per_group)
        group, left = _Group(b, kind, w, at), b.sub(cells, first)
        count = b.select(b.icmp_unsigned("<", left, per_group), left, per_group)
        with cgutils.for_range(b, count) as inner:
            cell = b.add(b.add(at, I64(header)), scaled(b, inner.index, size))
            visit(cell, b.add(first, inner.index), group)


def _product(b, kind, planes, count, first, tile, activations, output):
    """Rows first .. first + count of the activations times one tile."""
    w, cells, cells_of_group, factor = tile
    x, quants, records, row_cells = activations
    out, stride, accumulate = output
    accumulators = [cgutils.alloca_once_value(b, splat(FLOATS, 0.0)) for _ in range(count)]
    for slot in accumulators:
        b.store(splat(FLOATS, 0.0), slot)

    def visit(cell, number, group):
        if count > 1:
            # A single row reads as fast as memory delivers; more compute between reads, and would wait for each.
            for line in range(0, cell_bytes(kind), _LINE):
                prefetch(b, b.gep(w, [b.add(cell, I64(_AHEAD + line))]))

        def at(base, size):
            def address(t):
                index = b.add(b.mul(b.add(first, I64(t)), row_cells), number)
                return base, scaled(b, index, size)

            return address

        if is_float(kind):
            _float_cell(b, kind, w, cell, at(x, 4 * CELL), accumulators)
        else:
            quants_at, records_at = at(quants, PLANES * CELL), at(records, 4 * RECORD)
            _quantised_cell(b, kind, planes, w, cell, group, quants_at, records_at, accumulators)

    _each_cell(b, kind, w, cells, cells_of_group, visit)
    for t, slot in enumerate(accumulators):
        where = scaled(b, b.mul(b.add(first, I64(t)), stride), 4)
        before = b.select(accumulate, load(b, FLOATS, out, where), splat(FLOATS, -0.0))  # adding this changes nothing
        store(b, fma(b, b.load(slot), factor, before), out, where)


def _rows_at_once(kind):
    if is_float(kind):
        return _FLOAT_ROWS_AT_ONCE
    return _RARE_ROWS_AT_ONCE if kind.book or kind.bits not in (4, 6, 8) else _ROWS_AT_ONCE


POINTER = types.voidptr
SIGNATURE = types.void(
    POINTER, types.int64, types.int64, types.float32,
    POINTER, POINTER, POINTER, types.int64, types.int64,
    POINTER, types.int64, types.int64,
)  # fmt: skip
"""Of a product: `tile_product` without its first two arguments."""


@intrinsic(prefer_literal=True)
def tile_product(tyctx, code, planes, w, cells, group, factor, x, quants, records, row_cells, rows, out, stride, more):
    """out[:rows] = activations[:rows] times the tile of 16 rows at `w`, transposed; or out += that, where `more` is 1.

    code, planes: constants, the kind of weights (`cells.CODES`) and the bytes of an activation. cells: of the tile, and
    `group` of those that share a scale, where the kind leaves that free; factor float32: a power of two by which all
    weights are multiplied. x float32 (read by float kinds), quants int8 and records int32 (read by the quantised kinds,
    see `rows.quantise_row`): pointers to the first cell that meets the tile, of rows of `row_cells` cells; out: to 16
    float32 of rows of `stride`.
    """
    kind, width = list(KINDS.values())[code.literal_value], planes.literal_value

    def codegen(context, b, signature, args):
        w, cells, group, factor, x, quants, records, row_cells, rows, out, stride, more = args[2:]
        tile = w, cells, group, broadcast(b, FLOATS, factor)
        activations, output = (x, quants, records, row_cells), (out, stride, b.icmp_signed("!=", more, I64(0)))
        first = I64(0)
        for count in _rows_at_once(kind):
            groups = b.udiv(b.sub(rows, first), I64(count))
            with cgutils.for_range(b, groups) as loop:
                start = b.add(first, b.mul(loop.index, I64(count)))
                _product(b, kind, width, count, start, tile, activations, output)
            first = b.add(first, b.mul(groups, I64(count)))
        return context.get_dummy_value()

    return types.void(code, planes, *SIGNATURE.args), codegen
