"""Matrices of floats as packed weights: rounded to a GGUF type, and laid out for `kernels.tile`."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import COLUMNS, ROWS, Weights, unpack_rows
from prolepsis.kernels.tile import CELL, CELL_BYTES, KINDS
from prolepsis.quant.packing import pack, packed_bytes


class Blocks(NamedTuple):
    """A matrix as GGUF stores it. data: uint8 [rows, bytes]; out_column: where its product begins in the output."""

    type_name: str
    data: NDArray[np.uint8]
    columns: int
    out_column: int = 0


def rounded(values: NDArray[np.float32], type_name: str, out_column: int = 0) -> Blocks:
    """A float32 matrix, its columns a multiple of 32, rounded to nearest in a type such as "Q8_0"."""
    data = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[type_name])
    return Blocks(type_name, data, values.shape[1], out_column)


def unpacked(weights: Weights, matrix: int) -> NDArray[np.float32]:
    """The values of a packed matrix, padding included: float32 [rows, columns]."""
    rows, columns = (int(weights.matrices[matrix, field]) for field in (ROWS, COLUMNS))
    out = np.empty((rows, columns), np.float32)
    unpack_rows(weights, matrix, np.arange(rows), out)
    return out


def packed(matrices: Sequence[Blocks]) -> Weights:
    """All of them in one piece of memory."""
    table, sizes = np.zeros((len(matrices), 6), np.int64), [0]
    for row, (kind, data, columns, out_column) in zip(table, matrices, strict=True):
        tile_bytes = columns // CELL * CELL_BYTES[KINDS[kind]]
        row[:] = KINDS[kind], sizes[-1], tile_bytes, columns, -(-len(data) // LANES) * LANES, out_column
        sizes.append(sizes[-1] + packed_bytes(kind, len(data), columns))
    out = np.empty(sizes[-1], np.uint8)
    for (kind, data, columns, _), begin, end in zip(matrices, sizes, sizes[1:], strict=False):
        pack(kind, data.reshape(-1), len(data), columns, None, out[begin:end])
    return Weights(out, table)
