"""Matrix products of activation rows with packed weights, in tiles of 16 weight rows."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.cells import CELL
from prolepsis.kernels.products import ADDRESSES, call_product
from prolepsis.kernels.rows import quantise_row, quantise_row_to_bytes

# Columns of a row in `Weights.matrices`.
KIND, OFFSET, TILE_BYTES, COLUMNS, ROWS, OUT_COLUMN, WIDTH, GROUP, EXPONENT, FIRST_CELL, NEXT, ORDER = range(12)
FIELDS = 12
NATURAL = -1
"""An ORDER: the columns of the weights come in that of the activations."""


class Weights(NamedTuple):
    """Every matrix of a model: `data` uint8[:] holds their tiles; `matrices` int64 [n, FIELDS] says where and what.

    The fields of a matrix: its kind (`cells.CODES`), byte offset, bytes of a tile, columns, rows (a multiple of 16,
    padded with zeros), and the column of the output where its product begins when several share an input. Then
    WIDTH, the columns of the whole matrix, GROUP, the cells that share a scale where the kind leaves that free, and
    EXPONENT: weights are times 2 ** that. A matrix whose columns are held in several forms has a row for each: the row
    NEXT (0: none) has the columns that begin at FIRST_CELL of its activations, and is added to the same output. ORDER:
    where in `orders` int32[:] the order of a matrix's columns begins: column i meets activation order[i].
    """

    data: NDArray[np.uint8]
    matrices: NDArray[np.int64]
    orders: NDArray[np.int32]
    products: NDArray[np.int64] = ADDRESSES


def lines_of(weights: Weights, matrix: int) -> list[NDArray[np.int64]]:
    """Rows of the table of all forms of a matrix."""
    lines = [weights.matrices[matrix]]
    while lines[-1][NEXT]:
        lines.append(weights.matrices[lines[-1][NEXT]])
    return lines


def kinds_of(weights: Weights, first: int, count: int) -> NDArray[np.int64]:
    """Kinds of all forms of `count` matrices from `first` on."""
    return np.array([line[KIND] for m in range(first, first + count) for line in lines_of(weights, m)], np.int64)


class Activations(NamedTuple):
    """Rows on their way into a product: x float32, their quants as two planes of int8 a cell, and a record
    for each cell (`rows.quantise_row`, `cells.RECORD`)."""

    x: NDArray[np.float32]
    quants: NDArray[np.int8]
    records: NDArray[np.int32]


@njit(cache=True)
def quantise(activations, row, width, in_bytes, orders, order):
    """Fill one row's `quants` and `records` from its `x`, with 8 bits or with 16.

    order: NATURAL, or where in `orders` the order begins in which they are taken.
    """
    x, quants, records = activations
    at = row * width
    if order != NATURAL:
        x, at = _gathered(x, at, width, orders, order), 0
    if in_bytes:
        quantise_row_to_bytes(x, at, width, quants, records, row * (width // CELL))
    else:
        quantise_row(x, at, width, quants, records, row * (width // CELL))


@njit(cache=True)
def _gathered(x, at, width, orders, order):
    out = np.empty(width, np.float32)
    for i in range(width):
        out[i] = x[at + orders[order + i]]
    return out


@njit(cache=True)
def count_tiles(weights, first, count):
    """Tiles of `count` matrices from `first` on."""
    tiles = 0
    for m in range(first, first + count):
        tiles += weights.matrices[m, ROWS] // 16
    return tiles


@njit(inline="always")
def multiply_tiles(weights, first, count, begin, tiles, activations, rows, out, stride, in_bytes):
    """out[:rows] = activations[:rows] @ matrix^T, for `count` matrices from `first` on, side by side in `out`.

    Only the tiles begin ... begin + tiles - 1 of those there are. out float32 flat with rows of `stride`; each matrix's
    product begins at its own OUT_COLUMN. in_bytes: how the activations were quantised, which float weights do not ask.
    The products must have been made with `products.need`.
    """
    x, quants, records = activations
    table = weights.matrices
    for m in range(first, first + count):
        height = table[m, ROWS] // 16
        for tile in range(max(begin, 0), min(begin + tiles, height)):
            form, more = np.int64(m), np.int64(0)
            while form > 0 or more == 0:
                call_product(
                    weights.products[table[form, KIND], 0 if in_bytes else 1], weights.data,
                    table[form, OFFSET] + tile * table[form, TILE_BYTES], table[form, COLUMNS] // CELL,
                    table[form, GROUP], _power(table[form, EXPONENT]), x, quants, records, table[form, FIRST_CELL],
                    table[form, WIDTH] // CELL, rows, out, table[form, OUT_COLUMN] + 16 * tile, stride, more,
                )  # fmt: skip
                form, more = table[form, NEXT], np.int64(1)
        begin -= height


@njit(inline="always")
def _power(exponent):
    return np.float32(2.0**exponent)
