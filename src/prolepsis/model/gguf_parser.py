"""The bytes of one GGUF file, memory-mapped: metadata as Python values, tensors as views.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.

The parser is our own for two reasons, both measured on the default model (272 tensors, 98,052 strings in
its arrays). `gguf.GGUFReader` takes 1.6 s there, as it makes several NumPy views a string; this one takes
about 0.05 s. And `GGUFReader` allocates by counts it has not checked, where here no count or length is used
before it is known to fit into the bytes that are left. The numbers of the format (quantisation types with
their block sizes, value types) come from the `gguf` package.
"""

from __future__ import annotations

import mmap
import stat
import struct
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from prolepsis.errors import ModelFileError

MAGIC = b"GGUF"
READABLE_VERSIONS = (2, 3)

MAX_KEY_BYTES = 65_535
MAX_DIMENSIONS = 4
MAX_NESTING = 4
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")

# Value type numbers of the format: scalars as struct codes, then the two that have a length.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9

# What general.type says of files that are no models.
NOT_A_MODEL = {
    "imatrix": "is an i-matrix (statistics of activations, for a quantiser), not a model",
    "adapter": "is an adapter (such as LoRA), not a model, and adapters are not supported",
    "mmproj": "is the projector of a multimodal model, not a model of text",
}


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor, as it lies in the file.

    `type_name` is GGML's name of the storage type ("F32", "Q4_1", ...). `shape` is in NumPy order, slowest
    dimension first: a matrix is (rows, cols) with each row contiguous. `data` is uint8 [bytes], read-only,
    a view of the map: nothing is copied.
    """

    name: str
    type_name: str
    shape: tuple[int, ...]
    data: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Part:
    """One file: its metadata, where each value of that lies with its type before it, its tensors, and all its bytes."""

    path: Path
    metadata: dict[str, Any]
    spans: dict[str, slice]
    tensors: dict[str, GGUFTensor]
    data: npt.NDArray[np.uint8]


def parse(path: Path) -> Part:
    """Map the file at `path` and read its metadata and tensor table.

    Raises:
        ModelFileError: no such file, not readable, not GGUF, of a version or byte order that is not read here,
            truncated, or inconsistent; the message names the field or tensor.
    """
    return _Parser(path, _map(path)).parse()


def is_old_imatrix(head: bytes) -> bool:
    """Whether a file that begins so is an i-matrix of llama.cpp from before these were GGUF: a count, then the length
    of a tensor's name and the name."""
    if len(head) < 8:
        return False
    length = _U32.unpack_from(head, 4)[0]
    return 0 < length <= MAX_KEY_BYTES and head[8 : 8 + length].endswith(b".weight")


def _map(path: Path) -> mmap.mmap:
    """Map `path` read-only, or say why that cannot be done."""
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise ModelFileError(f"{path}: is a directory, expected a GGUF file")
        if not stat.S_ISREG(status.st_mode):
            raise ModelFileError(f"{path}: is not a regular file, so it cannot be memory-mapped")
        if status.st_size == 0:
            raise ModelFileError(f"{path}: the file is empty (0 bytes); download it again")
        with path.open("rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelFileError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise ModelFileError(f"{path}: cannot be read: {error}") from None


@cache
def _storage_types() -> dict[int, tuple[str, int, int]]:
    """GGML type number -> (name, elements a block, bytes a block)."""
    from gguf.constants import GGML_QUANT_SIZES

    return {int(kind): (kind.name, *sizes) for kind, sizes in GGML_QUANT_SIZES.items()}


class _Parser:
    """A cursor over the mapped bytes. Every read checks that the bytes exist before it uses them."""

    def __init__(self, path: Path, raw: mmap.mmap) -> None:
        self.path = path
        self.raw = raw
        self.size = len(raw)
        self.pos = 0

    def parse(self) -> Part:
        self.read_header()
        n_tensors = self.u64("tensor count")
        n_keys = self.u64("metadata count")
        # The least a record can take: a key of 1 byte with a 1-byte value; a tensor of 1 character, 1 dimension.
        self.check_count(n_keys, 8 + 1 + 4 + 1, "metadata count")
        self.check_count(n_tensors, 8 + 1 + 4 + 8 + 4 + 8, "tensor count")
        metadata, spans = self.read_metadata(n_keys)
        infos = self.read_tensor_infos(n_tensors)
        data = np.frombuffer(self.raw, dtype=np.uint8)
        return Part(self.path, metadata, spans, self.place_tensors(infos, metadata, data), data)

    def fail(self, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: {problem}")

    def truncated(self, what: str) -> ModelFileError:
        return self.fail(
            f"truncated or damaged: {what} does not fit into the {self.size} bytes of the file; download it again"
        )

    def check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size - self.pos:
            raise self.truncated(f"{what} = {count}")

    def take(self, n: int, what: str) -> int:
        """Move past `n` bytes and return where they begin."""
        start = self.pos
        if n > self.size - start:
            raise self.truncated(what)
        self.pos = start + n
        return start

    def u32(self, what: str) -> int:
        return int(_U32.unpack_from(self.raw, self.take(4, what))[0])

    def u64(self, what: str) -> int:
        return int(_U64.unpack_from(self.raw, self.take(8, what))[0])

    def string(self, what: str, limit: int | None = None) -> str:
        length = self.u64(f"length of {what}")
        if limit is not None and length > limit:
            raise self.fail(f"{what} claims {length} bytes, at most {limit} are allowed")
        start = self.take(length, what)
        try:
            return str(self.raw[start : start + length], "utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not valid UTF-8") from None

    def read_header(self) -> None:
        magic = self.raw[:4]
        if magic != MAGIC:
            if is_old_imatrix(self.raw[: 8 + MAX_KEY_BYTES]):
                raise self.fail(NOT_A_MODEL["imatrix"])
            raise self.fail(f"not a GGUF file: it begins with {magic!r}, expected {MAGIC!r}")
        self.pos = 4
        version = self.u32("version")
        if version in READABLE_VERSIONS:
            return
        readable = " and ".join(map(str, READABLE_VERSIONS))
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        if swapped < version:
            raise self.fail("big-endian GGUF; only little-endian files are read, convert it (gguf-convert-endian)")
        raise self.fail(f"GGUF version {version}; versions {readable} are read here, convert the model again")

    def read_metadata(self, count: int) -> tuple[dict[str, Any], dict[str, slice]]:
        metadata: dict[str, Any] = {}
        spans: dict[str, slice] = {}
        for index in range(count):
            key = self.string(f"metadata key {index}", MAX_KEY_BYTES)
            if key in metadata:
                raise self.fail(f"metadata key {key!r} occurs twice")
            start = self.pos
            metadata[key] = self.value(self.u32(f"type of {key!r}"), key, 0)
            spans[key] = slice(start, self.pos)
        return metadata, spans

    def value(self, kind: int, key: str, depth: int) -> Any:
        if kind in SCALARS:
            return self.scalars(kind, 1, key)[0]
        if kind == STRING:
            return self.string(f"value of {key!r}")
        if kind == ARRAY:
            return self.array(key, depth)
        raise self.fail(f"metadata key {key!r} has unknown value type {kind}")

    def array(self, key: str, depth: int) -> list[Any]:
        if depth >= MAX_NESTING:
            raise self.fail(f"metadata key {key!r} nests arrays more than {MAX_NESTING} deep")
        kind = self.u32(f"element type of {key!r}")
        count = self.u64(f"element count of {key!r}")
        if kind in SCALARS:
            return self.scalars(kind, count, key)
        if kind == STRING:
            return self.strings(count, key)
        self.check_count(count, 12, f"element count of {key!r}")
        return [self.value(kind, key, depth + 1) for _ in range(count)]

    def scalars(self, kind: int, count: int, key: str) -> list[Any]:
        code = SCALARS[kind]
        start = self.take(struct.calcsize(f"<{code}") * count, f"value of {key!r}")
        return list(struct.unpack_from(f"<{count}{code}", self.raw, start))

    def strings(self, count: int, key: str) -> list[str]:
        """An array of strings; written out as one loop, since vocabularies hold hundreds of thousands."""
        self.check_count(count, 8, f"element count of {key!r}")
        raw, size, length_at = self.raw, self.size, _U64.unpack_from
        pos = self.pos
        out: list[bytes] = []
        for _ in range(count):
            begin = pos + 8
            if begin > size:
                raise self.truncated(f"value of {key!r}")
            pos = begin + length_at(raw, pos)[0]
            if pos > size:
                raise self.truncated(f"value of {key!r}")
            out.append(raw[begin:pos])
        self.pos = pos
        try:
            return [str(item, "utf-8") for item in out]
        except UnicodeDecodeError:
            raise self.fail(f"a string of {key!r} is not valid UTF-8") from None

    def read_tensor_infos(self, count: int) -> dict[str, tuple[tuple[int, ...], int, int]]:
        """Name -> (shape in the file's order, type number, offset from the start of the data section)."""
        infos: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for index in range(count):
            name = self.string(f"name of tensor {index}", MAX_KEY_BYTES)
            if name in infos:
                raise self.fail(f"tensor {name!r} occurs twice")
            n_dims = self.u32(f"dimension count of tensor {name!r}")
            if not 1 <= n_dims <= MAX_DIMENSIONS:
                raise self.fail(f"tensor {name!r} has {n_dims} dimensions, expected 1 to {MAX_DIMENSIONS}")
            shape = tuple(self.u64(f"shape of tensor {name!r}") for _ in range(n_dims))
            kind = self.u32(f"type of tensor {name!r}")
            infos[name] = (shape, kind, self.u64(f"offset of tensor {name!r}"))
        return infos

    def place_tensors(
        self,
        infos: dict[str, tuple[tuple[int, ...], int, int]],
        metadata: dict[str, Any],
        data: npt.NDArray[np.uint8],
    ) -> dict[str, GGUFTensor]:
        alignment = self.alignment(metadata)
        base = -(-self.pos // alignment) * alignment
        tensors: dict[str, GGUFTensor] = {}
        spans: list[tuple[int, int, str]] = []
        for name, (shape, kind, offset) in infos.items():
            type_name, n_bytes = self.storage(name, shape, kind)
            if offset % alignment:
                raise self.fail(f"tensor {name!r} begins at {offset}, not a multiple of the alignment {alignment}")
            start = base + offset
            if start + n_bytes > self.size:
                raise self.truncated(f"tensor {name!r} ({type_name}, {n_bytes} bytes at {start})")
            spans.append((start, start + n_bytes, name))
            tensors[name] = GGUFTensor(name, type_name, shape[::-1], data[start : start + n_bytes])
        spans.sort()
        for (_, end, name), (start, _, other) in pairwise(spans):
            if start < end:
                raise self.fail(f"tensors {name!r} and {other!r} overlap")
        return tensors

    def alignment(self, metadata: dict[str, Any]) -> int:
        alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
            raise self.fail(f"general.alignment is {alignment!r:.80}, expected a power of two up to {MAX_ALIGNMENT}")
        return alignment

    def storage(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[str, int]:
        """Type name and byte count of a tensor, after checking that its shape can be stored as that type."""
        types = _storage_types()
        if kind not in types:
            raise self.fail(
                f"tensor {name!r} has unknown type number {kind}; known are "
                + ", ".join(type_name for type_name, *_ in types.values())
            )
        type_name, block, block_bytes = types[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if elements == 0:
            raise self.fail(f"tensor {name!r} has an empty shape {shape[::-1]}")
        if shape[0] % block:
            raise self.fail(f"tensor {name!r}: rows of {shape[0]} are not a multiple of {type_name}'s block of {block}")
        return type_name, elements // block * block_bytes
