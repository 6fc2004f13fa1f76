"""What a kind of output makes of matrices and vectors: tensors as they will stand in its files."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.config import RopeStyle
from prolepsis.quant.matrix import HeldMatrix, Matrix, whole
from prolepsis.quantize.stored import Stored

Floats = NDArray[np.float32]
_CHUNK = 1 << 24  # weights at a time that are not quantised


class Layout(Protocol):
    """A format of files. Names are canonical ones."""

    @property
    def rope_style(self) -> RopeStyle:
        """How Q and K rows are ordered in it: see `ModelConfig.rope`."""
        ...

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """Raise InputError for matrices of a layer that it cannot hold."""
        ...

    def matrix(self, name: str, matrix: HeldMatrix) -> list[Stored]:
        """A matrix of a layer."""
        ...

    def vector(self, name: str, values: Floats) -> Stored:
        """A norm's gains."""
        ...

    def embedding(self, name: str, matrix: Matrix) -> Stored:
        """The embedding or the head, converted as it is written."""
        ...

    def write(self, place: Path, tensors: Sequence[Stored]) -> None:
        """Make the output at `place`, which does not exist."""
        ...


def row_chunks(matrix: Matrix) -> Iterator[Floats]:
    """All rows of a matrix in float32, some at a time."""
    rows, columns = matrix.shape
    step = max(1, _CHUNK // columns)
    for begin in range(0, rows, step):
        yield whole(matrix, np.arange(begin, min(begin + step, rows)))


def halves(name: str, values: Floats) -> NDArray[np.float16]:
    """float16 of `values`. Raises InputError where that is no number."""
    with np.errstate(over="ignore"):
        out = values.astype(np.float16)
    if not np.isfinite(out).all():
        raise InputError(f"{name} holds numbers beyond float16, which these files have; write GGUF (--format gguf)")
    return out
