"""Weights as the fingerprints of twins know them: profiles stay valid however the kernels lay weights out."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.cells import CELL, CODES, cell_bytes, group_bytes
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import GROUP, KIND, NATURAL, OFFSET, ROWS, TILE_BYTES, WIDTH, Weights

Bytes = NDArray[np.uint8]


def said(weights: Weights, alignment: int) -> Iterator[NDArray[np.generic]]:
    """All that makes the weights what they are, as they lay when fingerprints were first made: each matrix begins at a
    multiple of `alignment` bytes, and Q6_K repeats its scale in every cell.

    What only later kinds and forms have is left out where nothing has it.
    """
    table, size = weights.matrices[:, :WIDTH].copy(), 0
    for line in table:
        begin, width = int(line[OFFSET]), int(line[TILE_BYTES])
        tiles = weights.data[begin : begin + int(line[ROWS]) // LANES * width].reshape(-1, width)
        if line[KIND] == CODES["Q6_K"]:
            tiles = _scale_in_every_cell(tiles)
        gap = np.zeros(-tiles.size % alignment, np.uint8)
        line[OFFSET], line[TILE_BYTES] = size, tiles.shape[1]
        size += tiles.size + gap.size
        yield tiles
        yield gap
    yield table
    later = weights.matrices[:, GROUP:]
    if later[:, :-1].any() or (later[:, -1] != NATURAL).any():
        yield later
        yield weights.orders


def _scale_in_every_cell(tiles: Bytes) -> Bytes:
    kind = KINDS["Q6_K"]
    header, cell, cells = group_bytes(kind), cell_bytes(kind), kind.group // CELL
    groups = tiles.reshape(-1, header + cells * cell)
    scales = np.repeat(groups[:, None, :header], cells, axis=1)
    spread = np.concatenate([scales, groups[:, header:].reshape(-1, cells, cell)], axis=2)
    return spread.reshape(len(tiles), -1)
