"""The inner loops of attention by bf16 dot products, as explicit LLVM vectors: scores, softmax, weighted values.

A lane of a dot product takes two products: of two channels for a score, of two tokens for an output. Each score is one
chain of such steps over the channels, each output value one over a part's tokens, whatever the number of queries.

No step meets a subnormal number, which CPUs may treat differently: queries and weights have a factor of 2^64, and what
is less than 2^14 with it is 0, so that they are multiples of 2^7. bf16 are multiples of 2^-133; all products and sums
are thus multiples of 2^-126, the smallest normal number. Subnormal K and V count as 0.
"""

import math

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.attention_parts import UNIT, in_groups, zeros
from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    HALFS,
    I32,
    I64,
    INTS,
    LANES,
    absolute,
    brain_dot,
    brain_pairs,
    broadcast,
    broadcast_at,
    data,
    float_to_brain,
    fma,
    has_brain_dots,
    interleave,
    iota,
    load,
    maximum,
    power_of_two,
    scaled,
    splat,
    store,
    tree,
)

FACTOR = 2.0**64  # of queries and of weights
_SMALLEST = 2.0**14  # what is less, with the factor, counts as 0
_PER_SCORE = math.log2(math.e) / FACTOR
_ONES = 0x3F803F80  # a pair
GROUP = 12  # queries scored at once
# 12 x 2 accumulators of scores and 6 x 4 of outputs; fewer where a step is several instructions, and compiled as long.
_SCORES_AT_ONCE, _OUTPUTS_AT_ONCE = ((GROUP, 3, 1), (6, 3, 1)) if has_brain_dots() else ((3, 1), (3, 1))

_i = types.int64


@intrinsic
def round_queries(tyctx, q, count, out):
    """out = q * `FACTOR` as bf16 bits, 0 for what is less than 2^-50; q float32[:], out uint16[:], count: a multiple
    of 16."""

    def codegen(context, b, signature, args):
        pq, po = (data(context, b, signature.args[i], args[i]) for i in (0, 2))
        with cgutils.for_range_slice(b, I64(0), args[1], I64(LANES)) as (column, _):
            value = b.fmul(load(b, FLOATS, pq, scaled(b, column, 4)), splat(FLOATS, FACTOR))
            small = b.fcmp_ordered("<", absolute(b, value), splat(FLOATS, _SMALLEST))
            value = b.select(small, splat(FLOATS, 0.0), value)
            store(b, float_to_brain(b, value), po, scaled(b, column, 2))
        return context.get_dummy_value()

    return types.void(q, _i, out), codegen


@intrinsic
def score_pairs(tyctx, k, first_at, second_at, stride, dim, q, first, queries, scores, column, width):
    """scores[v, column : column + 32] = q[v] . k for two runs of 16 tokens and queries first <= v < queries.

    k uint16[:]: element d of the 16 tokens at first_at + d * stride (and second_at + d * stride); q uint16
    [queries, dim], of `round_queries`; scores float32 [queries, width]. Flat arrays; offsets in elements.
    """

    def codegen(context, b, signature, args):
        pk, pq, po = (data(context, b, signature.args[i], args[i]) for i in (0, 5, 8))
        bases, stride, dim = (args[1], args[2]), args[3], args[4]

        def emit_group(start, count):
            rows = [b.add(b.add(args[6], start), I64(t)) for t in range(count)]
            sums = zeros(b, 2 * count)
            with cgutils.for_range_slice(b, I64(0), dim, I64(2)) as (channel, _):
                row = b.mul(channel, stride)
                keys = []
                for at in bases:
                    place = b.add(at, row)
                    even, odd = (load(b, HALFS, pk, scaled(b, x, 2)) for x in (place, b.add(place, stride)))
                    keys.append(interleave(b, even, odd))
                for t in range(count):
                    index = b.add(b.mul(rows[t], dim), channel)
                    query = broadcast_at(b, INTS, pq, scaled(b, index, 2))
                    for u, key in enumerate(keys):
                        slot = sums[2 * t + u]
                        b.store(brain_dot(b, b.load(slot), key, query), slot)
            for t in range(count):
                index = b.add(b.mul(rows[t], args[10]), args[9])
                for u in range(2):
                    store(b, b.load(sums[2 * t + u]), po, scaled(b, b.add(index, I64(LANES * u)), 4))

        in_groups(b, b.sub(args[7], args[6]), _SCORES_AT_ONCE, emit_group)
        return context.get_dummy_value()

    return types.void(k, _i, _i, _i, _i, q, _i, _i, scores, _i, _i), codegen


@intrinsic
def weigh(tyctx, scores, at, valid, count, weights, weights_at, tops, sums, index):
    """weights[weights_at : weights_at + valid] = 2^64 e^(score - max) as bf16 bits, those up to `count` 0; tops[index]
    = max, as a power of two; sums[index] = sum of the weights.

    The sum is that of the rounded weights, so that their shares of it sum up to 1. What is less than 2^-50 is 0.
    count: a multiple of 32. Scores up to the next multiple of 32 may change.
    """

    def codegen(context, b, signature, args):
        ps, pw, pt, pn = (data(context, b, signature.args[i], args[i]) for i in (0, 4, 6, 7))
        padded = b.and_(b.add(args[2], I64(UNIT - 1)), I64(-UNIT))
        never = splat(FLOATS, float("-inf"))

        def place(column):
            return scaled(b, b.add(args[1], column), 4)

        def weights_place(column):
            return scaled(b, b.add(args[5], column), 2)

        def score(column):
            return load(b, FLOATS, ps, place(column))

        with cgutils.for_range_slice(b, b.and_(args[2], I64(-LANES)), padded, I64(LANES)) as (column, _):
            limit = broadcast(b, INTS, b.trunc(b.sub(args[2], column), I32))
            store(b, b.select(b.icmp_signed("<", iota(), limit), score(column), never), ps, place(column))
        largest = [cgutils.alloca_once_value(b, never) for _ in range(2)]
        with cgutils.for_range_slice(b, I64(0), padded, I64(UNIT)) as (column, _):
            for u, slot in enumerate(largest):
                b.store(maximum(b, score(b.add(column, I64(LANES * u))), b.load(slot)), slot)
        largest = maximum(b, *(b.load(slot) for slot in largest))
        top = b.fmul(tree(b, lambda u, v: maximum(b, u, v), largest), F32(_PER_SCORE))
        start = broadcast(b, FLOATS, b.fsub(F32(math.log2(FACTOR)), top))
        total = zeros(b, 1)[0]

        def weight(column):
            return power_of_two(b, fma(b, score(column), splat(FLOATS, _PER_SCORE), start), math.log2(_SMALLEST))

        with cgutils.for_range_slice(b, I64(0), padded, I64(UNIT)) as (column, _):
            pairs = brain_pairs(b, weight(column), weight(b.add(column, I64(LANES))))
            store(b, pairs, pw, weights_place(column))
            b.store(brain_dot(b, b.load(total), pairs, splat(INTS, _ONES)), total)
        with cgutils.for_range_slice(b, padded, args[3], I64(UNIT)) as (column, _):
            store(b, splat(INTS, 0), pw, weights_place(column))
        store(b, top, pt, scaled(b, args[8], 4))
        store(b, tree(b, b.fadd, b.load(total)), pn, scaled(b, args[8], 4))
        return context.get_dummy_value()

    return types.void(scores, _i, _i, _i, weights, _i, tops, sums, _i), codegen


@intrinsic
def add_weighted(
    tyctx, v, places, blocks, size, dim, weights, column, width, valid, first, queries, out, keep, take, merge
):  # fmt: skip
    """out[r] += sum over t of weights[r, column + t] * v[t], for first <= r < queries; if `merge`,
    out[r] = out[r] * keep[r] + that sum * take[r].

    v uint16[:]: token t is the (t % size)th at element places[t // size]; query r sees those with column + t less than
    valid[r], which grows with r; weights uint16 [., width]: bf16 bits, 0 for those not seen; out float32 [., dim].
    """

    def codegen(context, b, signature, args):
        pv, pp, pw, pn, po, pk, pt = (data(context, b, signature.args[i], args[i]) for i in (0, 1, 5, 8, 11, 12, 13))
        blocks, size, dim = args[2], args[3], args[4]

        def emit_group(start, count, slice_at, vectors):
            rows = [b.add(b.add(args[9], start), I64(t)) for t in range(count)]
            seen = [b.sub(load(b, I64, pn, scaled(b, row, 8)), args[6]) for row in rows]

            def place(t, vector):
                index = b.add(b.add(b.mul(rows[t], dim), slice_at), I64(LANES * vector))
                return scaled(b, index, 4)

            sums = zeros(b, count * vectors)
            with b.if_then(b.not_(args[14])):
                for t in range(count):
                    for u in range(vectors):
                        b.store(load(b, FLOATS, po, place(t, u)), sums[t * vectors + u])

            def pairs(base, block_start, begin, end, mask):
                with cgutils.for_range_slice(b, begin, end, I64(2)) as (token, _):
                    at = b.add(b.add(base, b.mul(token, dim)), slice_at)
                    values = []
                    for u in range(vectors):
                        here = b.add(at, I64(LANES * u))
                        even, odd = (load(b, HALFS, pv, scaled(b, x, 2)) for x in (here, b.add(here, dim)))
                        values.append(interleave(b, even, odd))
                    column = b.add(block_start, token)
                    for t in range(count):
                        index = b.add(b.add(b.mul(rows[t], args[7]), args[6]), column)
                        weight = broadcast_at(b, INTS, pw, scaled(b, index, 2))
                        for u, value in enumerate(values):
                            slot = sums[t * vectors + u]
                            if mask:
                                value = b.and_(value, broadcast(b, INTS, _visible(b, b.sub(seen[t], column))))
                            b.store(brain_dot(b, b.load(slot), value, weight), slot)

            with cgutils.for_range(b, blocks) as loop:
                base = load(b, I64, pp, scaled(b, loop.index, 8))
                block_start = b.mul(loop.index, size)
                # All of the group see the first ones; some see a few more.
                common = _limited(b, b.sub(seen[0], block_start), size)
                last = _limited(b, b.sub(seen[-1], block_start), size)
                even = b.and_(common, I64(-2))
                pairs(base, block_start, I64(0), even, False)
                pairs(base, block_start, even, last, True)
            # A sum of -0 is one of 0: so pairs of zeros, which some have and others do not, change nothing.
            totals = [b.fadd(b.load(slot), splat(FLOATS, 0.0)) for slot in sums]
            with b.if_else(args[14]) as (merging, adding):
                with merging:
                    for t in range(count):
                        kept, taken = (broadcast_at(b, FLOATS, p, scaled(b, rows[t], 4)) for p in (pk, pt))
                        for u in range(vectors):
                            before = load(b, FLOATS, po, place(t, u))
                            store(b, fma(b, totals[t * vectors + u], taken, b.fmul(before, kept)), po, place(t, u))
                with adding:
                    for t in range(count):
                        for u in range(vectors):
                            store(b, totals[t * vectors + u], po, place(t, u))

        def emit_slice(slice_at, vectors, groups):
            in_groups(b, b.sub(args[10], args[9]), groups, lambda s, n: emit_group(s, n, slice_at, vectors))

        wide = b.udiv(dim, I64(4 * LANES))
        with cgutils.for_range(b, wide) as loop:
            emit_slice(b.mul(loop.index, I64(4 * LANES)), 4, _OUTPUTS_AT_ONCE)
        done = b.mul(wide, I64(4 * LANES))
        with cgutils.for_range_slice(b, done, dim, I64(2 * LANES)) as (slice_at, _):
            emit_slice(slice_at, 2, (3, 1))
        return context.get_dummy_value()

    return types.void(v, places, _i, _i, _i, weights, _i, _i, valid, _i, _i, out, keep, take, types.boolean), codegen


def _limited(b, x, size):
    """x, at least 0 and at most size."""
    x = b.select(b.icmp_signed("<", x, I64(0)), I64(0), x)
    return b.select(b.icmp_signed("<", x, size), x, size)


def _visible(b, left):
    """The mask of a pair of tokens, `left` of which are seen: the first is the lower half."""
    some = b.select(b.icmp_signed("==", left, I64(1)), I32(0xFFFF), I32(-1))
    return b.select(b.icmp_signed("<", left, I64(1)), I32(0), some)


@intrinsic
def join_sums(tyctx, tops, sums, part_tops, part_sums, keep, take, first, queries):
    """Merge the maxima and sums of a later part of the context into those of earlier ones, for first <= v < queries, as
    `attention_parts.merge` does; the outputs are to be merged by out[v] * keep[v] + part[v] * take[v]. All float32.
    """

    def codegen(context, b, signature, args):
        pointers = [data(context, b, signature.args[i], args[i]) for i in range(6)]
        flags = ir.VectorType(ir.IntType(1), LANES)
        with cgutils.for_range_slice(b, args[6], args[7], I64(LANES)) as (v, _):
            left = broadcast(b, INTS, b.trunc(b.sub(args[7], v), I32))
            inside = b.icmp_signed("<", iota(), left)
            places = [b.bitcast(b.gep(p, [scaled(b, v, 4)]), FLOATS.as_pointer()) for p in pointers]

            def read(place):
                signature = ir.FunctionType(FLOATS, [place.type, I32, flags, FLOATS])
                function = cgutils.get_or_insert_function(b.module, signature, "llvm.masked.load.v16f32.p0")
                return b.call(function, [place, I32(4), inside, splat(FLOATS, 0.0)])

            def write(value, place):
                signature = ir.FunctionType(ir.VoidType(), [FLOATS, place.type, I32, flags])
                function = cgutils.get_or_insert_function(b.module, signature, "llvm.masked.store.v16f32.p0")
                b.call(function, [value, place, I32(4), inside])

            top, total, part_top, part_total = (read(place) for place in places[:4])
            larger = maximum(b, part_top, top)
            kept, taken = (power_of_two(b, b.fsub(x, larger), -126.0) for x in (top, part_top))
            merged = fma(b, part_total, taken, b.fmul(total, kept))
            for value, place in zip((larger, merged, kept, taken), (*places[:2], *places[4:]), strict=True):
                write(value, place)
        return context.get_dummy_value()

    return types.void(tops, sums, part_tops, part_sums, keep, take, _i, _i), codegen


@intrinsic
def merge_row(tyctx, out, out_at, part, part_at, dim, keep, take, index):
    """out = out * keep[index] + part * take[index], for a row of `dim`. All float32."""

    def codegen(context, b, signature, args):
        po, pp, pk, pt = (data(context, b, signature.args[i], args[i]) for i in (0, 2, 5, 6))
        kept, taken = (broadcast_at(b, FLOATS, p, scaled(b, args[7], 4)) for p in (pk, pt))
        with cgutils.for_range_slice(b, I64(0), args[4], I64(LANES)) as (column, _):
            where = scaled(b, b.add(args[1], column), 4)
            value = load(b, FLOATS, pp, scaled(b, b.add(args[3], column), 4))
            store(b, fma(b, value, taken, b.fmul(load(b, FLOATS, po, where), kept)), po, where)
        return context.get_dummy_value()

    return types.void(out, _i, part, _i, _i, keep, take, _i), codegen
