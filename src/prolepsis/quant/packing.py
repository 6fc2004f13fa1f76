"""Matrices of any format to the tiles that `kernels.tile` multiplies (`kernels.cells` says how they lie): nothing is
lost, and little memory is needed beside that of the tiles.

Every form of a matrix is tiles of its own. Codes are rearranged four at a time, a 32-bit word of columns 4 v to 4 v + 3
of a row: word (v, row) of a cell is lane `row` of its vector v, of as many bits as the plane has.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.cells import (
    CELL,
    cells_of_group,
    group_bytes,
    part_bytes,
    parts_of,
    plane_bytes,
    planes_of,
    tile_bytes,
)
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.tile_writing import PLANE_WRITERS, put_lanes
from prolepsis.quant.matrix import Codes, Form, Matrix, Words

_CHUNK = 1 << 18  # weights rearranged at a time: what they pass through stays in the second-level cache

Bytes = NDArray[np.uint8]


class PackedMatrix(NamedTuple):
    """A matrix that is packed already. tiles: of each form, uint8[packed_bytes]. The other fields: see `Matrix`."""

    shape: tuple[int, int]
    forms: tuple[Form, ...]
    order: NDArray[np.int32] | None
    tiles: tuple[Bytes, ...]


class Piece(NamedTuple):
    """Some whole tiles of a matrix: from tile `first` on, `number` of them."""

    first: int
    number: int


def packed_bytes(form: Form, rows: int) -> int:
    """Size of a packed form; its rows are padded to a multiple of 16."""
    return -(-rows // LANES) * tile_bytes(form.kind, form.columns, form.group)


def pieces(matrix: Matrix | PackedMatrix) -> Iterator[Piece]:
    """Parts of a matrix that take little memory while they are packed, each by itself."""
    rows, columns = matrix.shape
    step, tiles = max(1, _CHUNK // (columns * LANES)), -(-rows // LANES)
    for first in range(0, tiles, step):
        yield Piece(first, min(step, tiles - first))


def pack(matrix: Matrix | PackedMatrix, order: NDArray[np.intp] | None, piece: Piece, outs: Sequence[Bytes]) -> None:
    """Write the tiles of `piece` into outs uint8[packed_bytes], one for each form of the matrix.

    `order`, if given, picks the rows: packed row i is the matrix's row order[i]. What is packed already keeps its own.
    """
    if isinstance(matrix, PackedMatrix):
        for form, packed, out in zip(matrix.forms, matrix.tiles, outs, strict=True):
            size = tile_bytes(form.kind, form.columns, form.group)
            span = slice(piece.first * size, (piece.first + piece.number) * size)
            out[span] = packed[span]
        return
    stop = min((piece.first + piece.number) * LANES, matrix.shape[0])
    rows = np.arange(piece.first * LANES, stop)
    for form, part, out in zip(matrix.forms, matrix.read(rows if order is None else order[rows]), outs, strict=True):
        tiles = out.reshape(-1, tile_bytes(form.kind, form.columns, form.group))
        _pack_form(form, part, tiles[piece.first : piece.first + piece.number])


def _pack_form(form: Form, part: Codes | Words, tiles: Bytes) -> None:
    kind = KINDS[form.kind]
    if not isinstance(part, Codes):
        _scatter(part, LANES * part.itemsize * np.arange(form.columns), tiles)
        return
    header, before = group_bytes(kind), part_bytes(kind)
    per_group, size = cells_of_group(kind, form.group), before + plane_bytes(kind.bits)
    number = np.arange(form.columns // CELL)
    groups = np.arange(part.scales.shape[1]) * (header + per_group * size)
    cells = number * size + (number // per_group + 1) * header
    at = 0
    for values in (part.scales.view(np.uint16), _bits(part.minimums), part.zeros):
        if values is not None:
            _scatter(values, groups + at, tiles)
            at += LANES * values.itemsize
    if part.parts is not None:
        places = LANES * np.arange(parts_of(kind))
        _scatter(part.parts.view(np.uint8), np.add.outer(cells, places).reshape(-1), tiles)
        if part.part_minimums is not None:
            _scatter(part.part_minimums, np.add.outer(cells, places + LANES * len(places)).reshape(-1), tiles)
    words, low = np.ascontiguousarray(part.codes).view(np.uint32), 0
    for bits in planes_of(kind):
        PLANE_WRITERS[bits](words, low, (cells + before) // 4, tiles.view(np.uint32))
        low, before = low + bits, before + plane_bytes(bits)


def _bits(halves: NDArray[np.float16] | None) -> NDArray[np.uint16] | None:
    return None if halves is None else halves.view(np.uint16)


def _scatter(values: NDArray[np.unsignedinteger], starts: NDArray[np.intp], tiles: Bytes) -> None:
    """Number i of each row goes to its lane of the 16 numbers that begin at byte starts[i] of the row's tile."""
    put_lanes(values, starts // values.itemsize, tiles.view(values.dtype))
