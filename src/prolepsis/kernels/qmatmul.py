"""Matrix products of activation rows with packed weights, in tiles of 16 weight rows."""

import math
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from prolepsis.kernels.rows import quantise_row, quantise_row_to_bytes
from prolepsis.kernels.tile import (
    BF16,
    CELL,
    F16,
    F32,
    Q4_0,
    Q4_1,
    Q8_0,
    QUANTISED,
    tile_product,
    tile_product_of_bytes,
)

# Columns of a row in `Weights.matrices`.
KIND, OFFSET, TILE_BYTES, COLUMNS, ROWS, OUT_COLUMN = range(6)


class Weights(NamedTuple):
    """Every matrix of a model: `data` uint8[:] holds their tiles; `matrices` int64 [n, 6] says where and what.

    The fields of a matrix: its kind (`tile.KINDS`), byte offset, bytes of a tile, columns, rows (a multiple of 16,
    padded with zeros), and the column of the output where its product begins when several share an input.
    """

    data: NDArray[np.uint8]
    matrices: NDArray[np.int64]


class Activations(NamedTuple):
    """Rows on their way into a product: x float32, their quants as two planes of int8 a cell, and a record
    for each cell (`rows.quantise_row`, `tile.RECORD`)."""

    x: NDArray[np.float32]
    quants: NDArray[np.int8]
    records: NDArray[np.int32]


@njit(cache=True)
def quantise(activations, row, width, in_bytes):
    """Fill one row's `quants` and `records` from its `x`, with 8 bits or with 16."""
    x, quants, records = activations
    if in_bytes:
        quantise_row_to_bytes(x, row * width, width, quants, records, row * (width // CELL))
    else:
        quantise_row(x, row * width, width, quants, records, row * (width // CELL))


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
    """
    data, matrices = weights
    x, quants, records = activations
    for m in range(first, first + count):
        height, kind = matrices[m, ROWS] // 16, matrices[m, KIND]
        cells = matrices[m, COLUMNS] // CELL
        for tile in range(max(begin, 0), min(begin + tiles, height)):
            at, column = matrices[m, OFFSET] + tile * matrices[m, TILE_BYTES], matrices[m, OUT_COLUMN] + 16 * tile
            if in_bytes and kind in QUANTISED:
                tile_product_of_bytes(kind, data, at, cells, x, quants, records, rows, out, stride, column)
            else:
                tile_product(kind, data, at, cells, x, quants, records, rows, out, stride, column)
        begin -= height


@njit(cache=True)
def _half(bits):
    """Value of IEEE half bits."""
    exponent, mantissa = (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        magnitude = np.inf if mantissa == 0 else np.nan
    elif exponent == 0:
        magnitude = math.ldexp(mantissa, -24)
    else:
        magnitude = math.ldexp(1024 + mantissa, exponent - 25)
    return -magnitude if bits & 0x8000 else magnitude


@njit(cache=True)
def _u16(data, at):
    return np.int64(data[at]) | np.int64(data[at + 1]) << 8


@njit(cache=True)
def _quantised(data, kind, cell, lane, column):
    """The weight at (lane, column) of a cell of a quantised kind."""
    group, byte = column // 4, column % 4
    step = _half(_u16(data, cell + 2 * lane))
    if kind == Q8_0:
        return step * (np.int64(data[cell + 32 + 64 * group + 4 * lane + byte]) - 128)
    header = cell + (32 if kind == Q4_0 else 64)
    nibble = np.int64(data[header + 64 * (group % 4) + 4 * lane + byte]) >> (4 * (group // 4)) & 15
    if kind == Q4_0:
        return step * (nibble - 8)
    if kind == Q4_1:
        return step * nibble + _half(_u16(data, cell + 32 + 2 * lane))
    plane = np.int64(data[header + 256 + 64 * (group // 4) + 4 * lane + byte])
    scale = np.int64(np.int8(data[cell + 32 + 16 * (group // 4) + lane]))
    return step * scale * ((nibble | (plane >> (2 * (group % 4)) & 3) << 4) - 32)


@njit(cache=True)
def unpack_row(weights, matrix, row, out, at):
    """out[at : at + columns] = one row of a matrix as float32: an embedding look-up, or a check of the packing."""
    kind, columns = weights.matrices[matrix, KIND], weights.matrices[matrix, COLUMNS]
    tile_bytes = weights.matrices[matrix, TILE_BYTES]
    tile = weights.matrices[matrix, OFFSET] + row // 16 * tile_bytes
    cell_bytes, lane = tile_bytes * CELL // columns, row % 16
    data = weights.data
    for c in range(columns):
        cell, inside = tile + c // CELL * cell_bytes, c % CELL
        if kind == F16:
            value = _half(_u16(data, cell + 2 * (16 * inside + lane)))
        elif kind in (BF16, F32):
            width = 2 if kind == BF16 else 4
            bits = _u16(data, cell + width * (16 * inside + lane)) << (16 if kind == BF16 else 0)
            if kind == F32:
                bits |= _u16(data, cell + 4 * (16 * inside + lane) + 2) << 16
            value = np.float64(np.uint32(bits).view(np.float32))
        else:
            value = _quantised(data, kind, cell, lane, inside)
        out[at + c] = value


@njit(cache=True)
def unpack_rows(weights, matrix, rows, out):
    """out[i] = row rows[i] of a matrix. rows: int64 [n]. out: float32 [n, columns]."""
    flat = out.reshape(-1)
    for i in range(len(rows)):
        unpack_row(weights, matrix, rows[i], flat, i * out.shape[1])
