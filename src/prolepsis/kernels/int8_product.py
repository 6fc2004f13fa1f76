"""Products of int8 rows with int8 matrices, exact in int32: the same on every machine, in any order.

A matrix is held in tiles of 16 outputs: bytes [tile, column / 4, output, column mod 4], each 128 more than its weight,
so that they are unsigned and a tile's step is one vector. Columns are padded with zeros to multiples of 16.
"""

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from prolepsis.kernels.byte_dot import byte_dots
from prolepsis.kernels.cpu import has
from prolepsis.kernels.llvm import BYTES, I64, INTS, broadcast, broadcast_at, data, load, scaled, store

LANES = 16  # outputs of a tile, and the multiple that columns are padded to

_BIAS_BITS = 7
_GROUPS = 4  # steps of four columns in one turn of the loop
_ROWS_AT_ONCE = (8, 4, 1) if has("avx512f") else (4, 1)


def pack(weights: NDArray[np.int8]) -> NDArray[np.uint8]:
    """int8 [outputs, columns], both multiples of 16, as tiles: uint8 [outputs * columns]."""
    outputs, columns = weights.shape
    tiles = weights.reshape(outputs // LANES, LANES, columns // 4, 4).transpose(0, 2, 1, 3)
    return (tiles.astype(np.int16) + (1 << _BIAS_BITS)).astype(np.uint8).reshape(-1)


def _rows(b, count, first, weights, columns, x, stride, sums, out):
    """Rows first .. first + count of x times one tile."""
    base, offset = weights
    accumulators = []
    for t in range(count):
        row_sum = load(b, ir.IntType(32), sums, scaled(b, b.add(first, I64(t)), 4))
        bias = b.neg(b.shl(broadcast(b, INTS, row_sum), ir.Constant(INTS, [_BIAS_BITS] * LANES)))
        slot = cgutils.alloca_once(b, INTS)
        b.store(bias, slot)
        accumulators.append(slot)
    with cgutils.for_range(b, b.udiv(columns, I64(4 * _GROUPS))) as loop:
        step = b.add(offset, scaled(b, loop.index, 64 * _GROUPS))
        groups = [load(b, BYTES, base, b.add(step, I64(64 * g))) for g in range(_GROUPS)]

        def activation(t, g):
            row = b.mul(b.add(first, I64(t)), stride)
            at = b.add(row, b.add(scaled(b, loop.index, 4 * _GROUPS), I64(4 * g)))
            return b.bitcast(broadcast_at(b, INTS, x, at), BYTES)

        totals = byte_dots(b, [b.load(slot) for slot in accumulators], groups, activation, 255)
        for slot, total in zip(accumulators, totals, strict=True):
            b.store(total, slot)
    for t, slot in enumerate(accumulators):
        store(b, b.load(slot), out, scaled(b, b.add(first, I64(t)), 4 * LANES))


@intrinsic
def tile_int8_product(tyctx, weights, offset, columns, x, stride, sums, rows, out):
    """out[:rows, :16] = x[:rows, :columns] times the tile at byte `offset` of weights, transposed.

    weights: uint8[:] (`pack`). x: int8, rows of `stride` bytes. sums: int32 [rows], the sum of each row's columns.
    out: int32 [rows, 16], contiguous. Nothing is checked.
    """

    def codegen(context, b, signature, args):
        def pointer(i):
            return data(context, b, signature.args[i], args[i])

        first = I64(0)
        for count in _ROWS_AT_ONCE:
            groups = b.udiv(b.sub(args[6], first), I64(count))
            with cgutils.for_range(b, groups) as loop:
                start = b.add(first, b.mul(loop.index, I64(count)))
                _rows(b, count, start, (pointer(0), args[1]), args[2], pointer(3), args[4], pointer(5), pointer(7))
            first = b.add(first, b.mul(groups, I64(count)))
        return context.get_dummy_value()

    i = types.int64
    return types.void(weights, i, i, x, i, sums, i, out), codegen
