"""Tensors as they will stand in a file, and safetensors files of them, written chunk by chunk.

Format: https://huggingface.co/docs/safetensors, a header in JSON and the tensors' bytes one after the other. The
`safetensors` package writes files too, but needs all tensors in memory at once.
"""

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

_ALIGNMENT = 8
_DTYPES = {"float16": "F16", "float32": "F32", "int32": "I32", "int16": "I16", "uint8": "U8"}


class Stored(NamedTuple):
    """A tensor of an output file. dtype: a name of safetensors or of GGML.

    chunks: its bytes, `nbytes` in all, as arrays one after the other; asked for once, when everything before it is
    written, so that a large tensor need not be in memory.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    chunks: Iterable[NDArray[Any]]

    @staticmethod
    def held(name: str, dtype: str, shape: tuple[int, ...], data: NDArray[Any]) -> "Stored":
        """A tensor whose bytes are those of `data` in C order."""
        return Stored(name, dtype, shape, data.nbytes, (np.ascontiguousarray(data),))

    @staticmethod
    def of(name: str, values: NDArray[Any]) -> "Stored":
        """An array under the dtype it has. Raises KeyError for one that no output has."""
        return Stored.held(name, _DTYPES[values.dtype.name], values.shape, values)


def write_safetensors(file: BinaryIO, tensors: Sequence[Stored], metadata: Mapping[str, str] | None = None) -> None:
    """Write all of them. Raises ValueError for chunks that are not as long as they have to be."""
    header: dict[str, object] = {"__metadata__": dict(metadata or {"format": "pt"})}
    begin = 0
    for name, dtype, shape, nbytes, _ in tensors:
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, begin + nbytes]}
        begin += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    file.write(struct.pack("<Q", len(text)) + text)
    for tensor in tensors:
        written = sum(file.write(chunk.reshape(-1).view(np.uint8).data) for chunk in tensor.chunks)
        if written != tensor.nbytes:
            raise ValueError(f"{tensor.name}: {written} bytes, expected {tensor.nbytes}")
