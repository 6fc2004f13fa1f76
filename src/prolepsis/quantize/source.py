"""Where weights come from: anything that has matrices and vectors by their GGUF names."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.quant.matrix import Form, HeldMatrix, Matrix


class Source(Protocol):
    """The weights of a model. Both raise ModelFileError for what is missing or of another shape."""

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix: ...

    def vector(self, name: str, size: int) -> NDArray[np.float32]: ...


class GGUFSource:
    """The weights of a GGUF file."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """That matrix as float32."""
        return HeldMatrix(shape, (Form("F32", shape[1]),), (self._floats(name, shape).view(np.uint32),))

    def vector(self, name: str, size: int) -> NDArray[np.float32]:
        """That vector, float32 [size]."""
        return self._floats(name, (size,))

    def _floats(self, name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        tensor = self._file.tensors.get(name)
        if tensor is None or tensor.shape != shape:
            found = "is missing" if tensor is None else f"has shape {tensor.shape}, expected {shape}"
            raise ModelFileError(f"{self._file.path}: tensor {name!r} {found}")
        kind = GGMLQuantizationType[tensor.type_name]
        return np.ascontiguousarray(dequantize(tensor.data, kind), np.float32).reshape(shape)
