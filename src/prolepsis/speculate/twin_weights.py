"""The weights of a drafting twin: the target's, rounded where they have more bits than a draft is worth.

The head covers all tokens. One of the first 32,768 alone (of 49,152, in order of merges) saves a tenth of a step on the
default model and accepts 1 to 3 points less, which is no gain; 16,384 and 8,192 lose 4 to 6 and 8 to 20 points.
"""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.forward import QKV, Plan
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import COLUMNS, KIND, OFFSET, ROWS, TILE_BYTES, Weights
from prolepsis.kernels.tile import CELL, CELL_BYTES, KINDS, Q4_0, Q4_1, QUANTISED
from prolepsis.quant.matrices import rounded, unpacked
from prolepsis.quant.packing import pack

COARSE = "Q4_1"
"""What most weights are rounded to. Q4_0 takes a tenth less memory and accepts 1 to 2 points less."""

FINE = "Q8_0"
"""What embedding, head and the projections to K and V are rounded to: 4 bits there cost more than they save."""


def twin_plan(target: Plan) -> Plan:
    """The twin of `target`: coarser weights and 8-bit activations.

    Weights of 4 bits, and fine ones of at most 8, are taken as they are; where all are, so is the memory they lie in.
    """
    types = _types(target)
    weights = _rounded(target.weights, types) if any(types) else target.weights
    return target._replace(weights=weights, fast=True)


def _types(target: Plan) -> list[str]:
    """What each matrix is to be rounded to; "" where it is taken as it is."""
    fine = {target.embedding, int(target.groups[-1, 0])}
    for first in target.groups[QKV:-1:4, 0].tolist():
        fine |= {first + 1, first + 2}
    types = []
    for matrix, kind in enumerate(target.weights.matrices[:, KIND].tolist()):
        keeps = QUANTISED if matrix in fine else (Q4_0, Q4_1)
        types.append("" if kind in keeps else FINE if matrix in fine else COARSE)
    return types


def _rounded(weights: Weights, types: list[str]) -> Weights:
    """All matrices in one piece of memory, each rounded to its type."""
    table, size = weights.matrices.copy(), 0
    for row, name in zip(table, types, strict=True):
        if name:
            row[KIND], row[TILE_BYTES] = KINDS[name], row[COLUMNS] // CELL * CELL_BYTES[KINDS[name]]
        row[OFFSET] = size
        size += int(row[ROWS]) // LANES * int(row[TILE_BYTES])
    data = np.empty(size, np.uint8)

    def fill(matrix: int) -> None:
        out = _bytes_of(Weights(data, table), matrix)
        if not types[matrix]:
            out[:] = _bytes_of(weights, matrix)
            return
        blocks = rounded(unpacked(weights, matrix), types[matrix])
        pack(types[matrix], blocks.data.reshape(-1), len(blocks.data), blocks.columns, None, out)

    with ThreadPoolExecutor() as workers:
        list(workers.map(fill, range(len(table))))
    return Weights(data, table)


def _bytes_of(weights: Weights, matrix: int) -> NDArray[np.uint8]:
    """The tiles of a matrix, a view."""
    row = weights.matrices[matrix]
    return weights.data[row[OFFSET] : row[OFFSET] + row[ROWS] // LANES * row[TILE_BYTES]]
