"""A cache of 4 bits as in KIVI (Liu et al. 2024, arXiv:2402.02750): K in runs of 32 tokens of a channel, V in runs of
32 channels of a token, each with a step and a minimum of its own; and the tokens behind the last whole block exactly.

A block is a part of attention, so what a row reads is a function of its position alone: the block it lies in exactly,
all before it from their codes. A block has both forms until it is full and sure to stay. Either form lies run after
run, K as [head_dim, token] and V as [token, head_dim], so that one pair of loops makes and reads the codes of both.
"""

from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from prolepsis.kernels.llvm import (
    F32,
    FLOATS,
    HALFS,
    I32,
    I64,
    INTS,
    LANES,
    SMALL,
    brain_to_float,
    broadcast,
    broadcast_at,
    data,
    float_to_half,
    fma,
    half_to_float,
    load,
    maximum,
    nearest,
    scaled,
    splat,
    store,
    tree,
)
from prolepsis.kernels.narrow_kv import finite, nearest_brain

RUN = 32  # values that share a step and a minimum, and lie in 16 bytes: the first 16 in the low nibbles
_LARGEST = 15.0  # code
_CODE_BYTES = RUN // 2
_i = types.int64


def _as_half(b, x):
    """(fp16 bits of a float32, its value in every lane)."""
    bits = float_to_half(b, broadcast(b, FLOATS, x))
    return b.extract_element(bits, I32(0)), finite(b, half_to_float(b, bits))


@intrinsic
def code_runs(tyctx, x, at, runs, codes, params, first):
    """Codes of runs of bf16 bits x from element `at` on: to `codes` from byte 16 * first on, and steps and minimums,
    fp16 bits in turn, to `params` from element 2 * first on.

    A code is (value - minimum) / step, to nearest even, within 0 .. 15; the step is a 15th of the run's range. NaN and
    infinities count as 0.
    """

    def codegen(context, b, signature, args):
        px, pc, pp = (data(context, b, signature.args[i], args[i]) for i in (0, 3, 4))

        def negative(x):
            return b.fsub(splat(FLOATS, 0.0), x)

        with cgutils.for_range(b, args[2]) as loop:
            base = b.add(args[1], b.mul(loop.index, I64(RUN)))
            halves = [
                finite(b, brain_to_float(b, load(b, HALFS, px, scaled(b, b.add(base, I64(LANES * h)), 2))))
                for h in range(2)
            ]
            top = tree(b, lambda u, v: maximum(b, u, v), maximum(b, *halves))
            low = tree(b, lambda u, v: maximum(b, u, v), maximum(b, *map(negative, halves)))
            low = b.fsub(F32(0.0), low)
            low_bits, minimum = _as_half(b, low)
            step_bits, step = _as_half(b, b.fdiv(b.fsub(top, low), F32(_LARGEST)))
            none = b.fcmp_ordered("==", step, splat(FLOATS, 0.0))
            divisor = b.select(none, splat(FLOATS, float("inf")), step)

            def code(x):
                number = nearest(b, b.fdiv(b.fsub(x, minimum), divisor))
                number = maximum(b, number, splat(FLOATS, 0.0))
                most = splat(FLOATS, _LARGEST)
                return b.trunc(b.fptosi(b.select(b.fcmp_ordered("<", number, most), number, most), INTS), SMALL)

            first, second = map(code, halves)
            run = b.add(args[5], loop.index)
            store(b, b.or_(first, b.shl(second, splat(SMALL, 4))), pc, scaled(b, run, _CODE_BYTES))
            store(b, step_bits, pp, scaled(b, run, 4))
            store(b, low_bits, pp, b.add(scaled(b, run, 4), I64(2)))
        return context.get_dummy_value()

    return types.void(x, _i, _i, codes, params, _i), codegen


@intrinsic
def read_runs(tyctx, codes, params, first, stride, runs, out):
    """out uint16 [runs, RUN], flat: bf16 bits of the runs first, first + stride, ...

    A value is the bf16 nearest to code * step + minimum, which is rounded once before; a step or a minimum that is no
    finite number is 0.
    """

    def codegen(context, b, signature, args):
        pc, pp, po = (data(context, b, signature.args[i], args[i]) for i in (0, 1, 5))

        with cgutils.for_range(b, args[4]) as loop:
            run = b.add(args[2], b.mul(loop.index, args[3]))
            where = scaled(b, run, 4)
            step, minimum = (
                finite(b, half_to_float(b, broadcast_at(b, HALFS, pp, b.add(where, I64(2 * i))))) for i in range(2)
            )
            pairs = load(b, SMALL, pc, scaled(b, run, _CODE_BYTES))
            for h, code in enumerate((b.and_(pairs, splat(SMALL, 15)), b.lshr(pairs, splat(SMALL, 4)))):
                value = fma(b, b.uitofp(b.zext(code, INTS), FLOATS), step, minimum)
                place = b.add(b.mul(loop.index, I64(RUN)), I64(LANES * h))
                store(b, nearest_brain(b, value), po, scaled(b, place, 2))
        return context.get_dummy_value()

    return types.void(codes, params, _i, _i, _i, out), codegen


@njit(cache=True)
def code_block(pool, recent, block):
    """Make the codes of a full block of every KV head from its exact form in the pool `recent`.

    block: (where its codes go, where it is), numbered through all layers.
    """
    values = pool.kv_heads * pool.head_dim * pool.block_size
    runs = values // RUN
    code_runs(recent.k, block[1] * values, runs, pool.k, pool.k_steps, block[0] * runs)
    code_runs(recent.v, block[1] * values, runs, pool.v, pool.v_steps, block[0] * runs)


@njit(cache=True)
def read_keys(pool, block, slot, wide):
    """wide[d, :32] = K of the RUN tokens from `slot` on of a block, numbered with the head."""
    a_channel = pool.block_size // RUN
    first = block * pool.head_dim * a_channel + slot // RUN
    read_runs(pool.k, pool.k_steps, first, a_channel, pool.head_dim, wide)


@njit(cache=True)
def read_values(pool, block, count, wide):
    """wide[t] = V of the first tokens of a block, numbered with the head."""
    a_token = pool.head_dim // RUN
    read_runs(pool.v, pool.v_steps, block * pool.block_size * a_token, 1, count * a_token, wide)
