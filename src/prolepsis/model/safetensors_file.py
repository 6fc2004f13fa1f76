"""Tensors of safetensors files, memory-mapped: views of the files' bytes, so that nothing is read before it is used.

Format: https://github.com/huggingface/safetensors. The `safetensors` library opens a file first, and with that checks
its header: length, offsets, sizes. It cannot give bfloat16 to NumPy, nor parts of tensors without a copy, hence the
views here.
"""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError

MAX_JSON_BYTES = 1 << 26
MAX_SHARDS = 10_000

# bfloat16 is its bits.
DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
}
FLOATS = ("F32", "F16", "BF16")


class Tensor(NamedTuple):
    """One tensor: `dtype` is the format's name of it, `data` a read-only view, None where NumPy has no such type."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[Any] | None

    def floats(self) -> NDArray[np.float16] | NDArray[np.float32]:
        """The values of a float tensor: float16 as they are, others in float32."""
        assert self.data is not None
        if self.dtype == "BF16":
            return (self.data.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return self.data


def read_json(path: Path) -> dict[str, Any]:
    """The object in the JSON file at `path`. Raises ModelFileError where there is none, or one that is too large."""
    try:
        value = json.loads(read_small(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{path}: holds a {type(value).__name__}, expected a JSON object")
    return value


def read_small(path: Path, limit: int) -> bytes:
    """The bytes of the file at `path`. Raises ModelFileError for more than `limit`, and what is no regular file."""
    if (size := regular_size(path)) > limit:
        raise ModelFileError(f"{path}: {size} bytes are too many for a file of this kind")
    return path.read_bytes()


def regular_size(path: Path) -> int:
    """Bytes of the file at `path`. Raises ModelFileError for a pipe, a device or a directory, and OSError."""
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise ModelFileError(f"{path}: is not a regular file")
    return status.st_size


def open_tensors(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of some files by name.

    Raises:
        ModelFileError: a file is missing, truncated or inconsistent, or two hold a tensor of the same name.
    """
    tensors: dict[str, Tensor] = {}
    for path in files:
        found = _open(path)
        if twice := next((name for name in found if name in tensors), None):
            raise ModelFileError(f"{path}: tensor {twice!r} is in another file of this model as well")
        tensors |= found
    return tensors


def shard_files(index: Path) -> list[Path]:
    """The files that an index names, all of them beside it.

    Raises:
        ModelFileError: it is no index, or names a file elsewhere.
    """
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelFileError(f"{index}: 'weight_map' is missing or not an object of tensor and file names")
    names = set()
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name != os.path.basename(name) or not name.endswith(".safetensors"):
            raise ModelFileError(f"{index}: tensor {tensor!r:.80} is said to be in {name!r:.80}, not a file beside it")
        names.add(name)
    if len(names) > MAX_SHARDS:
        raise ModelFileError(f"{index}: names {len(names)} files, at most {MAX_SHARDS} are allowed")
    return [index.with_name(name) for name in sorted(names)]


def check_index(index: Path, tensors: dict[str, Tensor]) -> None:
    """Raise ModelFileError unless every tensor that an index names is there."""
    absent = next((name for name in read_json(index)["weight_map"] if name not in tensors), None)
    if absent is not None:
        raise ModelFileError(f"{index}: tensor {absent!r:.80} is in none of the files it names; download them again")


def _open(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError, safe_open

    try:
        regular_size(path)
        with safe_open(path, "numpy"), path.open("rb") as file:
            raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = int.from_bytes(raw[:8], "little")
            header = json.loads(raw[8 : 8 + length], object_pairs_hook=_unique)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file; download the model again") from None
    except (SafetensorError, OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"{path}: not a whole safetensors file ({error}); download it again") from None
    data = memoryview(raw)[8 + length :]
    return {name: _tensor(path, name, entry, data) for name, entry in header.items() if name != "__metadata__"}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        raise ValueError("a name occurs twice in its header")
    return out


def _tensor(path: Path, name: str, entry: dict[str, Any], data: memoryview) -> Tensor:
    dtype, shape = entry["dtype"], tuple(entry["shape"])
    begin, end = entry["data_offsets"]
    if dtype not in DTYPES:
        return Tensor(dtype, shape, None)
    view = np.frombuffer(data[begin:end], np.dtype(DTYPES[dtype]).newbyteorder("<"))
    try:
        return Tensor(dtype, shape, view.reshape(shape))
    except ValueError:
        raise ModelFileError(f"{path}: tensor {name!r} has {end - begin} bytes, which do not fit {shape}") from None
