"""Matrices packed for `kernels.tile`, all of a model in one piece of memory; and floats rounded to a GGUF type."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from numpy.typing import NDArray

from prolepsis.kernels.cells import CELL, CODES, tile_bytes
from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.qmatmul import (
    COLUMNS,
    EXPONENT,
    FIELDS,
    GROUP,
    KIND,
    NATURAL,
    NEXT,
    OFFSET,
    ORDER,
    OUT_COLUMN,
    ROWS,
    WIDTH,
    Weights,
    lines_of,
)
from prolepsis.kernels.unpacking import unpack_rows
from prolepsis.quant.gguf_types import matrix_of
from prolepsis.quant.matrix import Codes, Form, Matrix, Words, whole
from prolepsis.quant.packing import PackedMatrix, Piece, pack, packed_bytes, pieces

_ALIGNMENT = 64


class Blocks(NamedTuple):
    """A matrix as GGUF stores it. data: uint8 [rows, bytes]; out_column: where its product begins in the output."""

    type_name: str
    data: NDArray[np.uint8]
    columns: int
    out_column: int = 0

    def matrix(self) -> Matrix:
        """What the bytes say."""
        return matrix_of("a matrix", self.type_name, (len(self.data), self.columns), self.data.reshape(-1))

    def placed(self) -> "Placed":
        """To be packed."""
        return Placed(self.matrix(), self.out_column)


class Placed(NamedTuple):
    """A matrix to be packed. out_column: where its product begins in the output; rows: the order in which its rows
    are taken."""

    matrix: Matrix | PackedMatrix
    out_column: int = 0
    rows: NDArray[np.intp] | None = None


class NaturalFloats:
    """A matrix as float32, its columns in the order of the activations: as exact, and of four times the bytes."""

    def __init__(self, matrix: Matrix) -> None:
        self.shape = matrix.shape
        self.forms: tuple[Form, ...] = (Form("F32", matrix.shape[1]),)
        self.order: NDArray[np.int32] | None = None
        self._matrix = matrix

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """Those rows, in that order."""
        return [whole(self._matrix, rows).view(np.uint32)]


class PackedRounded:
    """A packed matrix, padding included, rounded to a GGUF type."""

    def __init__(self, weights: Weights, matrix: int, type_name: str) -> None:
        self._weights, self._matrix, self._type_name = weights, matrix, type_name
        rows, width = _shape(weights, matrix)
        self.shape = rows, width
        self.forms: tuple[Form, ...] = (Form(type_name, width),)
        self.order: NDArray[np.int32] | None = None

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """Those rows, in that order."""
        values = np.empty((len(rows), self.shape[1]), np.float32)
        unpack_rows(self._weights, self._matrix, rows, values)
        return rounded(values, self._type_name).matrix().read(np.arange(len(rows)))

    def placed(self) -> Placed:
        """Where it was."""
        return Placed(self, int(self._weights.matrices[self._matrix, OUT_COLUMN]))


def kept(weights: Weights, matrix: int) -> Placed:
    """A packed matrix as it is, where it was."""
    lines, names = lines_of(weights, matrix), list(CODES)
    first = lines[0]
    forms = tuple(
        Form(names[line[KIND]], int(line[COLUMNS]), int(line[GROUP]) * CELL, int(line[EXPONENT])) for line in lines
    )
    sizes = (packed_bytes(form, int(first[ROWS])) for form in forms)
    tiles = tuple(weights.data[line[OFFSET] :][:size] for line, size in zip(lines, sizes, strict=True))
    order = None if first[ORDER] == NATURAL else weights.orders[first[ORDER] :][: first[WIDTH]]
    return Placed(PackedMatrix(_shape(weights, matrix), forms, order, tiles), int(first[OUT_COLUMN]))


def _shape(weights: Weights, matrix: int) -> tuple[int, int]:
    """With rows of padding."""
    return int(weights.matrices[matrix, ROWS]), int(weights.matrices[matrix, WIDTH])


def rounded(values: NDArray[np.float32], type_name: str, out_column: int = 0) -> Blocks:
    """A float32 matrix, its columns a multiple of 32, rounded to nearest in a type such as "Q8_0"."""
    data = quantize(np.ascontiguousarray(values, np.float32), GGMLQuantizationType[type_name])
    return Blocks(type_name, data, values.shape[1], out_column)


def unpacked(weights: Weights, matrix: int) -> NDArray[np.float32]:
    """The values of a packed matrix, padding included: float32 [rows, columns], in the order of the activations."""
    out = np.empty(_shape(weights, matrix), np.float32)
    unpack_rows(weights, matrix, np.arange(len(out)), out)
    return out


def packed_size(matrices: Sequence[Placed]) -> int:
    """Bytes that `packed` takes for their weights, which may be many times those of a file."""
    return sum(_room(form, placed.matrix.shape[0]) for placed in matrices for form in placed.matrix.forms)


def _room(form: Form, rows: int) -> int:
    return -(-packed_bytes(form, rows) // _ALIGNMENT) * _ALIGNMENT


def packed(matrices: Sequence[Placed]) -> Weights:
    """All of them in one piece of memory, on all cores: matrix i is row i of the table, further forms come behind."""
    table = np.zeros((sum(len(placed.matrix.forms) for placed in matrices), FIELDS), np.int64)
    orders, rooms, size, further = _Orders(), [], 0, len(matrices)
    for line, placed in enumerate(matrices):
        rows, width = placed.matrix.shape
        order, first_cell, room = orders.place_of(placed.matrix.order), 0, []
        for number, form in enumerate(placed.matrix.forms):
            if number:
                table[line, NEXT] = further
                line, further = further, further + 1
            table[line] = (
                CODES[form.kind], size, tile_bytes(form.kind, form.columns, form.group), form.columns,
                -(-rows // LANES) * LANES, placed.out_column, width, form.group // CELL, form.exponent, first_cell, 0,
                order,
            )  # fmt: skip
            room.append(slice(size, size + packed_bytes(form, rows)))
            size += _room(form, rows)
            first_cell += form.columns // CELL
        rooms.append(room)
    data = np.zeros(size, np.uint8)

    def fill(placed: Placed, piece: Piece, room: list[slice]) -> None:
        pack(placed.matrix, placed.rows, piece, [data[one] for one in room])

    with ThreadPoolExecutor() as workers:
        work = [
            workers.submit(fill, placed, piece, room)
            for placed, room in zip(matrices, rooms, strict=True)
            for piece in pieces(placed.matrix)
        ]
        for done in work:
            done.result()
    return Weights(data, table, orders.joined)


class _Orders:
    """Orders of columns, each kept once."""

    def __init__(self) -> None:
        self._places: dict[bytes, int] = {}
        self._size = 0

    def place_of(self, order: NDArray[np.int32] | None) -> int:
        """Where it begins among all."""
        if order is None:
            return NATURAL
        key = order.astype(np.int32).tobytes()
        if key not in self._places:
            self._places[key] = self._size
            self._size += len(order)
        return self._places[key]

    @property
    def joined(self) -> NDArray[np.int32]:
        """All of them."""
        return np.frombuffer(b"".join(self._places), np.int32).copy()
