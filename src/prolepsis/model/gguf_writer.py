"""GGUF files, written tensor after tensor: only the chunk at hand is in memory.

`gguf.GGUFWriter` wants whole arrays, or ones that it keeps in a temporary file; and it forgets of values copied from
another file which type they had there.
"""

import struct
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, BinaryIO, NamedTuple

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from prolepsis.model.gguf_parser import ARRAY, DEFAULT_ALIGNMENT, MAGIC, SCALARS, STRING

_VERSION = 3
_CODES = {code: number for number, code in SCALARS.items()}
_ZEROS = bytes(DEFAULT_ALIGNMENT)


class TensorEntry(NamedTuple):
    """A tensor to be written.

    type_name: GGML's, such as "Q4_K". shape: slowest dimension first, in values, as `GGUFTensor.shape` has it.
    chunks: its bytes in order (bytes or contiguous arrays); asked for once, when everything before it is written.
    """

    name: str
    shape: tuple[int, ...]
    type_name: str
    chunks: Iterable[Any]

    @property
    def size(self) -> int:
        """Bytes that the chunks must have together."""
        per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[self.type_name]]
        if self.shape[-1] % per_block:
            raise ValueError(f"{self.name}: rows of {self.shape[-1]} are not whole blocks of {self.type_name}")
        return prod(self.shape) // per_block * block_bytes


def write_gguf(file: BinaryIO, metadata: Mapping[str, Any], tensors: Sequence[TensorEntry]) -> None:
    """Write a model into `file`, which is empty and open for writing (as `store.replace_file` gives it).

    metadata: bool, int, float, str or a list of one of these, by key; or bytes of a value that already is in the
    format's form, as `GGUFFile.encoded_metadata` gives them. Whole numbers become uint32 where they fit, in lists
    int32; real ones float32: what llama.cpp reads.

    Raises ValueError for chunks that are not as long as a tensor's type and shape say, and OSError of the file.
    """
    head = MAGIC + struct.pack("<IQQ", _VERSION, len(tensors), len(metadata))
    keys = b"".join(_text(key) + encoded_value(value) for key, value in metadata.items())
    infos, offset = [], 0
    for tensor in tensors:
        infos.append(_info(tensor, offset))
        offset += tensor.size + _padding(tensor.size)
    head += keys + b"".join(infos)
    file.write(head + _ZEROS[: _padding(len(head))])
    for tensor in tensors:
        _write_tensor(file, tensor)


def _write_tensor(file: BinaryIO, tensor: TensorEntry) -> None:
    written = 0
    for chunk in tensor.chunks:
        view = memoryview(chunk).cast("B")
        written += len(view)
        file.write(view)
    if written != tensor.size:
        raise ValueError(f"{tensor.name}: {written} bytes, but {tensor.type_name} {tensor.shape} has {tensor.size}")
    file.write(_ZEROS[: _padding(written)])


def _padding(size: int) -> int:
    return -size % DEFAULT_ALIGNMENT


def _text(value: str) -> bytes:
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def _info(tensor: TensorEntry, offset: int) -> bytes:
    shape = tensor.shape[::-1]
    kind = GGMLQuantizationType[tensor.type_name]
    return _text(tensor.name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def encoded_value(value: Any) -> bytes:
    """A metadata value in the format's form: its type, then itself. TypeError for what has no type there."""
    if isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return struct.pack("<I", STRING) + _text(value)
    if isinstance(value, list | tuple):
        return _array(value)
    code = _code([value], "IiQq")
    return struct.pack(f"<I{code}", _CODES[code], value)


def _array(values: Sequence[Any]) -> bytes:
    if all(isinstance(value, str) for value in values):
        return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(map(_text, values))
    code = _code(values, "iIqQ")
    return struct.pack(f"<IIQ{len(values)}{code}", ARRAY, _CODES[code], len(values), *values)


def _code(values: Sequence[Any], whole: str) -> str:
    """The struct code of one type for all values; of whole numbers' the first in `whole` that holds them."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return "?"
    if kinds == {int}:
        for code in whole:
            bits = 8 * struct.calcsize(f"<{code}")
            least, most = (0, 2**bits) if code.isupper() else (-(2 ** (bits - 1)), 2 ** (bits - 1))
            if least <= min(values) and max(values) < most:
                return code
    if float in kinds and kinds <= {int, float}:
        return "f"
    raise TypeError(f"GGUF metadata cannot hold {values[:3]!r}")
