"""The three inner loops of paged attention, as explicit LLVM vectors: scores, softmax, weighted values.

K lies transposed in its block, [head_dim, token], so that 16 tokens are the lanes of a vector and a score is a chain of
multiply-adds over head_dim; V lies [token, head_dim], so that an output is a chain of multiply-adds over tokens. Each
(query, token) score and each output value has one fixed order of operations whatever the number of queries, which is
what makes a decode step and a prefill chunk give the same bits.
"""

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    HALFS,
    I64,
    INTS,
    LANES,
    brain_to_float,
    broadcast,
    broadcast_at,
    data,
    exp,
    fma,
    half_to_float,
    iota,
    load,
    maximum,
    scaled,
    splat,
    store,
    tree,
)
from prolepsis.kernels.rows import DTYPE_BF16, DTYPE_FP16

PART = 128  # tokens of context that are one unit of work
UNIT = 32  # tokens scored at once: two vectors
_QUERIES_AT_ONCE = (8, 3, 1)  # 8 x 2 score accumulators
_OUTPUTS_AT_ONCE = (6, 3, 1)  # 6 x 4 output accumulators
_NEVER = float("-inf")

_WIDEN = {DTYPE_BF16: brain_to_float, DTYPE_FP16: half_to_float}
_i = types.int64


def _for_each_dtype(b, dtype, emit):
    for code, widen in _WIDEN.items():
        with b.if_then(b.icmp_signed("==", dtype, I64(code))):
            emit(widen)


def in_groups(b, total, sizes, emit):
    """Cover 0 .. total with runs of the given sizes, largest first: emit(start, size)."""
    first = I64(0)
    for size in sizes:
        runs = b.udiv(b.sub(total, first), I64(size))
        with cgutils.for_range(b, runs) as loop:
            emit(b.add(first, b.mul(loop.index, I64(size))), size)
        first = b.add(first, b.mul(runs, I64(size)))


def zeros(b, count):
    slots = [cgutils.alloca_once(b, FLOATS) for _ in range(count)]
    for slot in slots:
        b.store(splat(FLOATS, 0.0), slot)
    return slots


@intrinsic
def score_unit(tyctx, dtype, k, first_at, second_at, stride, dim, q, queries, scores, column, width):
    """scores[v, column : column + 32] = q[v] . k for two runs of 16 tokens.

    k uint16[:]: element d of the 16 tokens at first_at + d * stride (and second_at + d * stride); q float32
    [queries, dim]; scores float32 [queries, width]. Flat arrays; offsets in elements.
    """

    def codegen(context, b, signature, args):
        pk, pq, po = (data(context, b, signature.args[i], args[i]) for i in (1, 6, 8))
        bases, stride, dim = (args[2], args[3]), args[4], args[5]

        def emit_group(widen, start, count):
            sums = zeros(b, 2 * count)
            with cgutils.for_range(b, dim) as loop:
                row = b.mul(loop.index, stride)
                keys = [widen(b, load(b, HALFS, pk, scaled(b, b.add(at, row), 2))) for at in bases]
                for t in range(count):
                    index = b.add(b.mul(b.add(start, I64(t)), dim), loop.index)
                    query = broadcast_at(b, FLOATS, pq, scaled(b, index, 4))
                    for u, key in enumerate(keys):
                        slot = sums[2 * t + u]
                        b.store(fma(b, key, query, b.load(slot)), slot)
            for t in range(count):
                index = b.add(b.mul(b.add(start, I64(t)), args[10]), args[9])
                for u in range(2):
                    store(b, b.load(sums[2 * t + u]), po, scaled(b, b.add(index, I64(LANES * u)), 4))

        def emit(widen):
            in_groups(b, args[7], _QUERIES_AT_ONCE, lambda start, count: emit_group(widen, start, count))

        _for_each_dtype(b, args[0], emit)
        return context.get_dummy_value()

    return types.void(_i, k, _i, _i, _i, _i, q, _i, scores, _i, _i), codegen


@intrinsic
def exponentiate(tyctx, scores, at, valid, state, state_at):
    """scores[:valid] become exp(score - max); the rest of the last vectors of 32 becomes 0; state = (max, sum)."""

    def codegen(context, b, signature, args):
        ps, pt = (data(context, b, signature.args[i], args[i]) for i in (0, 3))
        padded = b.mul(b.udiv(b.add(args[2], I64(UNIT - 1)), I64(UNIT)), I64(UNIT))
        limit = broadcast(b, INTS, b.trunc(args[2], INTS.element))

        def masked(column):
            where = scaled(b, b.add(args[1], column), 4)
            lane = b.add(broadcast(b, INTS, b.trunc(column, INTS.element)), iota())
            return where, b.icmp_signed("<", lane, limit), load(b, FLOATS, ps, where)

        largest = cgutils.alloca_once(b, FLOATS)
        b.store(splat(FLOATS, _NEVER), largest)
        with cgutils.for_range_slice(b, I64(0), padded, I64(LANES)) as (column, _):
            _, inside, score = masked(column)
            b.store(maximum(b, b.select(inside, score, splat(FLOATS, _NEVER)), b.load(largest)), largest)
        top = tree(b, lambda u, v: maximum(b, u, v), b.load(largest))
        total = zeros(b, 1)[0]
        with cgutils.for_range_slice(b, I64(0), padded, I64(LANES)) as (column, _):
            where, inside, score = masked(column)
            weight = b.select(inside, exp(b, b.fsub(score, broadcast(b, FLOATS, top))), splat(FLOATS, 0.0))
            store(b, weight, ps, where)
            b.store(b.fadd(b.load(total), weight), total)
        store(b, top, pt, scaled(b, args[4], 4))
        store(b, tree(b, b.fadd, b.load(total)), pt, scaled(b, b.add(args[4], I64(1)), 4))
        return context.get_dummy_value()

    return types.void(scores, _i, _i, state, _i), codegen


@intrinsic
def add_values(tyctx, dtype, v, at, count, dim, weights, column, width, first, queries, out):
    """out[first + r] += sum over t < count of weights[first + r, column + t] * v[t], for r < queries.

    v uint16[:]: token t at element at + t * dim; weights float32 [., width]; out float32 [., dim]. Flat arrays.
    """

    def codegen(context, b, signature, args):
        pv, pw, po = (data(context, b, signature.args[i], args[i]) for i in (1, 5, 10))
        dim, base = args[4], args[8]

        def emit_group(widen, start, count, slice_at, vectors):
            rows = [b.add(b.add(base, start), I64(t)) for t in range(count)]

            def place(t, vector):
                index = b.add(b.add(b.mul(rows[t], dim), slice_at), I64(LANES * vector))
                return scaled(b, index, 4)

            sums = zeros(b, count * vectors)
            for t in range(count):
                for u in range(vectors):
                    b.store(load(b, FLOATS, po, place(t, u)), sums[t * vectors + u])
            with cgutils.for_range(b, args[3]) as loop:
                token = b.add(b.add(args[2], b.mul(loop.index, dim)), slice_at)
                values = [
                    widen(b, load(b, HALFS, pv, scaled(b, b.add(token, I64(LANES * u)), 2))) for u in range(vectors)
                ]
                for t in range(count):
                    index = b.add(b.add(b.mul(rows[t], args[7]), args[6]), loop.index)
                    weight = broadcast_at(b, FLOATS, pw, scaled(b, index, 4))
                    for u, value in enumerate(values):
                        slot = sums[t * vectors + u]
                        b.store(fma(b, weight, value, b.load(slot)), slot)
            for t in range(count):
                for u in range(vectors):
                    store(b, b.load(sums[t * vectors + u]), po, place(t, u))

        def emit(widen):
            def emit_slice(slice_at, vectors):
                in_groups(b, args[9], _OUTPUTS_AT_ONCE, lambda s, n: emit_group(widen, s, n, slice_at, vectors))

            wide = b.udiv(dim, I64(4 * LANES))
            with cgutils.for_range(b, wide) as loop:
                emit_slice(b.mul(loop.index, I64(4 * LANES)), 4)
            done = b.mul(wide, I64(4 * LANES))
            with cgutils.for_range_slice(b, done, dim, I64(2 * LANES)) as (slice_at, _):
                emit_slice(slice_at, 2)

        _for_each_dtype(b, args[0], emit)
        return context.get_dummy_value()

    return types.void(_i, v, _i, _i, _i, weights, _i, _i, _i, _i, out), codegen


@intrinsic
def merge(tyctx, out, out_at, state, state_at, part, part_at, part_state, part_state_at, dim):
    """Merge a later part of the context into an earlier one: rescale both to the larger maximum and add.

    out, part float32 [dim] at their offsets; state, part_state (max, sum). The online softmax of Milakov and
    Gimelshein 2018 (arXiv:1805.02867), algorithm 3.
    """

    def codegen(context, b, signature, args):
        po, ps, pp, pt = (data(context, b, signature.args[i], args[i]) for i in (0, 2, 4, 6))
        here, there = scaled(b, args[3], 4), scaled(b, args[7], 4)
        four = I64(4)
        top, part_top = load(b, F32, ps, here), load(b, F32, pt, there)
        larger = b.select(b.fcmp_ordered(">", part_top, top), part_top, top)

        def weight(value):
            return exp(b, broadcast(b, FLOATS, b.fsub(value, larger)))

        keep, take = weight(top), weight(part_top)
        total = broadcast(b, FLOATS, load(b, F32, ps, b.add(here, four)))
        part_total = broadcast(b, FLOATS, load(b, F32, pt, b.add(there, four)))
        merged = fma(b, part_total, take, b.fmul(total, keep))
        with cgutils.for_range_slice(b, I64(0), args[8], I64(LANES)) as (column, _):
            where = scaled(b, b.add(args[1], column), 4)
            value = load(b, FLOATS, pp, scaled(b, b.add(args[5], column), 4))
            store(b, fma(b, value, take, b.fmul(load(b, FLOATS, po, where), keep)), po, where)
        store(b, larger, ps, here)
        store(b, b.extract_element(merged, INTS.element(0)), ps, b.add(here, four))
        return context.get_dummy_value()

    return types.void(out, _i, state, _i, part, _i, part_state, _i, _i), codegen


@intrinsic
def divide_row(tyctx, x, at, width, sums, index, out, out_at):
    """out = x / sums[index], the end of a softmax."""

    def codegen(context, b, signature, args):
        px, ps, po = (data(context, b, signature.args[i], args[i]) for i in (0, 3, 5))
        divisor = broadcast_at(b, FLOATS, ps, scaled(b, args[4], 4))
        with cgutils.for_range_slice(b, I64(0), args[2], I64(LANES)) as (column, _):
            value = load(b, FLOATS, px, scaled(b, b.add(args[1], column), 4))
            store(b, b.fdiv(value, divisor), po, scaled(b, b.add(args[6], column), 4))
        return context.get_dummy_value()

    return types.void(x, _i, _i, sums, _i, out, _i), codegen
