"""One compiled product for each kind of weights and width of activations, compiled when a model needs it.

Compiled code calls them by address, so that what calls them is compiled once, whatever the kinds.
"""

import threading

import numpy as np
from llvmlite import ir
from numba import cfunc, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from prolepsis.kernels.cells import CELL, PLANES, RECORD, is_float
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import F32, I8, I64, data, scaled
from prolepsis.kernels.tile import SIGNATURE, tile_product

ADDRESSES = np.zeros((len(KINDS), PLANES), np.int64)
"""Where each kind's products begin, for activations of 8 bits and of 16; 0 where none has been needed here."""

_kept: list[object] = []  # what was compiled, which must live as long as its address
_lock = threading.Lock()


def _product(code, planes):
    @cfunc(SIGNATURE, cache=True)
    def product(w, cells, group, factor, x, quants, records, row_cells, rows, out, stride, more):
        tile_product(code, planes, w, cells, group, factor, x, quants, records, row_cells, rows, out, stride, more)

    return product


def need(codes: NDArray[np.int64], in_bytes: bool) -> None:
    """Compile or load the products of some kinds of weights (`cells.CODES`) with activations of 8 or 16 bits."""
    for code in set(codes.tolist()):
        with _lock:
            if ADDRESSES[code, 0 if in_bytes else 1]:
                continue
            floats = is_float(list(KINDS.values())[code])
            widths = range(PLANES) if floats else [0 if in_bytes else 1]
            product = _product(code, PLANES if floats else widths[0] + 1)
            _kept.append(product)
            ADDRESSES[code, widths] = product.address


_BYTE = I8.as_pointer()
_FUNCTION = ir.FunctionType(
    ir.VoidType(), [_BYTE, I64, I64, F32, _BYTE, _BYTE, _BYTE, I64, I64, _BYTE, I64, I64]
).as_pointer()


@intrinsic
def call_product(
    tyctx, address, weights, offset, cells, group, factor, x, quants, records, first, row_cells, rows, out, column,
    stride, more,
):  # fmt: skip
    """`tile.tile_product` of the kind whose product is at `address`, on arrays.

    weights uint8[:], from byte `offset` on; x float32[:], quants int8[:] and records int32[:], from cell `first` on;
    out float32[:], from `column` on.
    """

    def codegen(context, b, signature, args):
        def pointer(i, index, size):
            return b.gep(data(context, b, signature.args[i], args[i]), [scaled(b, index, size)])

        first, column = args[9], args[13]
        arguments = [
            pointer(1, args[2], 1), *args[3:6],
            pointer(6, first, 4 * CELL), pointer(7, first, PLANES * CELL), pointer(8, first, 4 * RECORD), *args[10:12],
            pointer(12, column, 4), *args[14:],
        ]  # fmt: skip
        b.call(b.inttoptr(args[0], _FUNCTION), arguments)
        return context.get_dummy_value()

    i = types.int64
    signature = types.void(i, weights, i, i, i, types.float32, x, quants, records, i, i, i, out, i, i, i)
    return signature, codegen
