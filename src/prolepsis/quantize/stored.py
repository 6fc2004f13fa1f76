"""Tensors as they will stand in a file, and safetensors files of them, written without holding more than one.

Format: https://huggingface.co/docs/safetensors, a header in JSON and the tensors' bytes one after the other. The
`safetensors` package writes files too, but needs all tensors in memory at once.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int16": "I16", "uint8": "U8"}


class Stored(NamedTuple):
    """A tensor of an output file. dtype: a name of safetensors or of GGML; data: its bytes, in C order."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.generic]

    @staticmethod
    def of(name: str, values: NDArray[np.generic]) -> "Stored":
        """An array under the dtype it has. Raises KeyError for one that no output has."""
        return Stored(name, _DTYPES[values.dtype.name], values.shape, np.ascontiguousarray(values))

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return self.data.nbytes


def write_safetensors(file: BinaryIO, tensors: Iterable[Stored], metadata: Mapping[str, str] | None = None) -> None:
    """Write all of them. They are gone through twice: once for what they are, once for their bytes."""
    tensors = tensors if isinstance(tensors, Sequence) else list(tensors)
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    begin = 0
    for name, dtype, shape, data in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + data.nbytes]}
        begin += data.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        file.write(tensor.data.reshape(-1).view(np.uint8).data)
