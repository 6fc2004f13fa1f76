"""llama.cpp's i-matrices: how much each column of each matrix counts when it is quantised.

Two formats: GGUF with general.type "imatrix" (tensors NAME.in_sum2 and NAME.counts), and the older one of its own,
which has a count of entries and then of each: length of the name, name, calls, count of values, values; int32 and
float32. Source: tools/imatrix and tools/quantize of llama.cpp.
"""

import os
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.model.gguf_parser import GGUFTensor, is_old_imatrix

_SUMS, _COUNTS = ".in_sum2", ".counts"
_MAX_BYTES = 1 << 30


def read_imatrix(path: str | os.PathLike[str]) -> dict[str, NDArray[np.float32]]:
    """By tensor ("blk.0.attn_q.weight"): the mean square of what each column was multiplied by, float32 [columns].

    Raises ModelFileError for files of neither format, and damaged ones.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            head = file.read(1 << 17)
            old = is_old_imatrix(head)
            raw = head + file.read(_MAX_BYTES) if old else b""
    except OSError as error:
        raise ModelFileError(f"{path}: cannot be read: {error.strerror or error}") from None
    found = _read_old(path, raw) if old else _read_gguf(GGUFFile.open(path))
    for name, values in found.items():
        if not (np.isfinite(values) & (values >= 0)).all():
            raise ModelFileError(f"{path}: {name} has values that are negative or not finite")
    return found


def _read_gguf(file: GGUFFile) -> dict[str, NDArray[np.float32]]:
    if file.metadata.get("general.type") != "imatrix":
        raise ModelFileError(f"{file.path}: is not an i-matrix")
    found = {}
    for name, sums in file.tensors.items():
        if name.endswith(_SUMS):
            base = name.removesuffix(_SUMS)
            counts = file.tensors.get(base + _COUNTS)
            if counts is None:
                raise ModelFileError(f"{file.path}: tensor {base + _COUNTS!r} is missing")
            count = _floats(file, counts).sum()
            found[base] = _floats(file, sums).sum(axis=0) / max(count, 1)
    return found


def _floats(file: GGUFFile, tensor: GGUFTensor) -> NDArray[np.float32]:
    """[matrices, columns]; there are several matrices where a tensor has one for each expert."""
    if tensor.type_name != "F32":
        raise ModelFileError(f"{file.path}: tensor {tensor.name!r} is {tensor.type_name}, expected F32")
    return tensor.data.view("<f4").reshape(-1, tensor.shape[-1])


def _read_old(path: Path, raw: bytes) -> dict[str, NDArray[np.float32]]:
    found: dict[str, NDArray[np.float32]] = {}
    try:
        (entries,) = struct.unpack_from("<i", raw)
        at = 4
        for _ in range(entries):
            (length,) = struct.unpack_from("<I", raw, at)
            name, at = raw[at + 4 : at + 4 + length].decode(), at + 4 + length
            calls, columns = struct.unpack_from("<iI", raw, at)
            found[name] = np.frombuffer(raw, np.float32, columns, at + 8) / np.float32(max(calls, 1))
            at += 8 + 4 * columns
    except (struct.error, ValueError) as error:
        raise ModelFileError(f"{path}: the i-matrix is truncated or damaged: {error}") from None
    return found
