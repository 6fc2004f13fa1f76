"""Matrices of INT kinds whose parts lie in a checkpoint's tensors: what GPTQ, AWQ and compressed-tensors have alike."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.kernels.cells import CELL
from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.half import half_scales
from prolepsis.quant.matrix import Codes, Form, Words

BITS = tuple(kind.bits for name, kind in KINDS.items() if name.startswith("INT"))
Rows = NDArray[np.intp]
Scales = NDArray[np.floating[Any]]
Read = Callable[[Rows], NDArray[np.uint8]]
"""Codes or zero points of some rows: uint8 [rows, columns or groups]."""


class GroupedMatrix:
    """A matrix of one form with a scale and a zero point for each group of columns."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        bits: int,
        group: int,
        codes: Read,
        zeros: Read | int,
        scales: Scales,
        order: NDArray[np.int32] | None = None,
    ) -> None:
        """codes: of the columns as the file has them; order: that in which groups are contiguous, see `Matrix.order`;
        zeros: int where all are the same; scales: [rows, groups].

        Raises ModelFileError for a group that the kinds do not allow.
        """
        require_groups(name, bits, group, shape[1])
        exponent = 0
        if scales.dtype != np.float16:
            scales, exponent = half_scales(scales)
        self._scales: NDArray[np.float16] = scales.view(np.float16)
        self.name, self.shape, self.order = name, shape, order
        self.forms: tuple[Form, ...] = (Form(f"INT{bits}", shape[1], group, exponent),)
        self._codes, self._zeros = codes, zeros

    def read(self, rows: Rows) -> list[Codes | Words]:
        """See `Matrix.read`."""
        codes = self._codes(rows)
        if self.order is not None:
            codes = np.take(codes, self.order, axis=1)
        scales: NDArray[np.float16] = np.ascontiguousarray(self._scales[rows])
        if not np.isfinite(scales).all():
            raise ModelFileError(f"{self.name}: a scale is not a finite number")
        zeros = np.empty(scales.shape, np.uint8)
        zeros[...] = self._zeros if isinstance(self._zeros, int) else self._zeros(rows)
        return [Codes(np.ascontiguousarray(codes), scales, zeros=zeros)]


def require_groups(name: str, bits: int, group: int, columns: int) -> None:
    """Raise ModelFileError unless the kinds have such codes, and every group but the last is of whole units."""
    require_bits(name, bits)
    if group % CELL or columns % CELL or group <= 0:
        raise ModelFileError(
            f"{name}: groups of {group} of {columns} columns are not supported: both must be multiples of {CELL}; "
            f"quantise the model again with another group size"
        )


def require_bits(name: str, bits: int) -> None:
    """Raise ModelFileError unless the kinds have such codes."""
    if bits not in BITS:
        raise ModelFileError(f"{name}: codes of {bits} bits are not supported; supported: {', '.join(map(str, BITS))}")


def checked_groups(name: str, scales: Scales, rows: int) -> int:
    """Of scales [groups, rows], how many groups there are. Raises ModelFileError for another shape."""
    if scales.ndim != 2 or scales.shape[1] != rows:
        raise ModelFileError(f"{name}: scales have shape {scales.shape}, expected (groups, {rows})")
    return len(scales)


def group_size(name: str, columns: int, groups: int, declared: int | None) -> int:
    """Columns that share a scale, where there are `groups` of them: what the configuration says where that fits (-1 is
    a whole row), or an even share. At most the columns, in whole units.

    Raises ModelFileError where neither can be.
    """
    size = columns if declared == -1 else declared
    if size is not None and size > 0 and -(-columns // size) == groups:
        return min(size, -(-columns // CELL) * CELL)
    if groups and columns % groups == 0:
        return columns // groups
    raise ModelFileError(f"{name}: {groups} groups of scales do not fit {columns} columns in groups of {declared}")
