"""A weight matrix of any format, in the parts that `kernels.kinds` names: what files become and quantisers make."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.kernels.kinds import KINDS


class Form(NamedTuple):
    """How some columns of a matrix are held.

    kind: a name of `kernels.kinds.KINDS`; columns: how many, a multiple of 32; group: columns that share a scale, where
    the kind leaves that free (a multiple of 32; the last group may be shorter); exponent: scales and minimums are times
    2 ** exponent.
    """

    kind: str
    columns: int
    group: int = 0
    exponent: int = 0


class Codes(NamedTuple):
    """Some rows of a form that has codes. Absent parts are None.

    codes: uint8 [rows, columns], each below 2 ** bits.
    scales: float16 [rows, groups]. minimums: the same, where the kind has them.
    zeros: uint8 [rows, groups], for kinds of free groups.
    parts: int8 [rows, columns / part], what scales are multiplied by, where the kind has parts.
    part_minimums: uint8 [rows, columns / part], what minimums are multiplied by, where the kind has both.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float16]
    minimums: NDArray[np.float16] | None = None
    zeros: NDArray[np.uint8] | None = None
    parts: NDArray[np.int8] | None = None
    part_minimums: NDArray[np.uint8] | None = None


Words = NDArray[np.uint16] | NDArray[np.uint32]
"""Some rows of a form of float weights: their bits, [rows, columns]."""


class Matrix(Protocol):
    """A matrix that is read a few rows at a time.

    shape: (rows, columns). forms: how it is held, from the first columns to the last; most have one form. order: int32
    [columns] or None: column i of the forms multiplies activation order[i].
    """

    shape: tuple[int, int]
    forms: tuple[Form, ...]
    order: NDArray[np.int32] | None

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """Those rows, in that order, of each form. Raises ModelFileError for content that cannot be."""
        ...


@dataclass
class HeldMatrix:
    """A matrix in memory. parts: all its rows, of each form. The other fields: see `Matrix`."""

    shape: tuple[int, int]
    forms: tuple[Form, ...]
    parts: tuple[Codes | Words, ...]
    order: NDArray[np.int32] | None = None

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """Those rows, in that order, of each form."""
        return [_picked(part, rows) for part in self.parts]


class RowsOf:
    """A matrix whose row i is row `rows[i]` of another: some of its rows, or all in another order."""

    def __init__(self, matrix: Matrix, rows: NDArray[np.intp]) -> None:
        self.shape = (len(rows), matrix.shape[1])
        self.forms, self.order = matrix.forms, matrix.order
        self._matrix, self._rows = matrix, rows

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """See `Matrix.read`."""
        return self._matrix.read(self._rows[rows])

    def held(self) -> HeldMatrix:
        """All of it in memory."""
        return HeldMatrix(self.shape, self.forms, tuple(self._matrix.read(self._rows)), self.order)


def whole(matrix: Matrix, rows: NDArray[np.intp] | None = None) -> NDArray[np.float32]:
    """The numbers of `matrix`, all or `rows`: float32 [rows, columns], columns in the order of the activations."""
    parts = matrix.read(np.arange(matrix.shape[0]) if rows is None else rows)
    held = np.concatenate([dequantised(*pair) for pair in zip(matrix.forms, parts, strict=True)], axis=1)
    if matrix.order is None:
        return held
    out = np.empty_like(held)
    out[:, matrix.order] = held
    return out


def dequantised(form: Form, part: Codes | Words) -> NDArray[np.float32]:
    """The numbers that some rows of a form stand for: float32 [rows, columns], rounded where minimums are added."""
    kind = KINDS[form.kind]
    if not isinstance(part, Codes):
        return _floats(form.kind, part)
    wide = np.float32(2.0**form.exponent)
    columns, group = form.columns, kind.group or form.group

    def spread(values: NDArray[np.generic], width: int) -> NDArray[np.float32]:
        return np.repeat(values.astype(np.float32), width, axis=1)[:, :columns]

    values = np.array(kind.book, np.float32)[part.codes] if kind.book else part.codes.astype(np.float32) - kind.bias
    if part.zeros is not None:
        values -= spread(part.zeros, group)
    step = spread(part.scales, group) * wide
    if part.parts is not None:
        step *= spread(part.parts, kind.part)
    out = step * values
    if part.minimums is not None:
        least = spread(part.minimums, group) * wide
        out += least if part.part_minimums is None else -(least * spread(part.part_minimums, kind.part))
    return out


def _picked(part: Codes | Words, rows: NDArray[np.intp]) -> Codes | Words:
    if not isinstance(part, Codes):
        return part[rows]
    return Codes(*(None if field is None else field[rows] for field in part))  # type: ignore[arg-type]


def _floats(kind: str, words: Words) -> NDArray[np.float32]:
    if kind == "F16":
        return words.view(np.float16).astype(np.float32)
    return (words.astype(np.uint32) << (16 if kind == "BF16" else 0)).view(np.float32)
