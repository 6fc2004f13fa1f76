"""A model in GGUF: one file, or several parts that llama.cpp's `gguf-split` made, opened as one."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.model.gguf_parser import GGUFTensor, Part, parse
from prolepsis.quant.gguf_types import WORDS, matrix_of
from prolepsis.quant.matrix import Matrix, whole

FINGERPRINT_CHUNK = 1 << 24

# `llama_split_path` of llama.cpp: the number of the part, from 1, and of all parts.
_PART_NAME = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


@dataclass(frozen=True)
class GGUFFile:
    """An open GGUF model; its maps live as long as this object or any view of its tensors does.

    `path` is that of the first part. `metadata` holds every key of it: bool, int, float, str, or a list of these.
    `tensors` are those of all parts.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]
    _parts: tuple[Part, ...]

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Map the file at `path`, and the other parts if it is one of several.

        Raises:
            ModelFileError: no such file, not readable, not GGUF, of a version or byte order that is not
                read here, truncated, or inconsistent; a part is missing or belongs elsewhere. The message names
                the file, and the field or tensor.
        """
        part = parse(Path(path))
        parts = _all_parts(part) if _count(part) > 1 else (part,)
        return GGUFFile(parts[0].path, parts[0].metadata, _tensors(parts), parts)

    @property
    def files(self) -> list[Path]:
        """Paths of all parts."""
        return [part.path for part in self._parts]

    @property
    def size(self) -> int:
        """Bytes of all parts."""
        return sum(len(part.data) for part in self._parts)

    def fingerprint(self) -> str:
        """xxh3-128 of all bytes, part after part, 32 hex digits. Reads every byte, so it also pages the files in."""
        import xxhash

        digest = xxhash.xxh3_128()
        for part in self._parts:
            for start in range(0, len(part.data), FINGERPRINT_CHUNK):
                digest.update(part.data[start : start + FINGERPRINT_CHUNK].data)
        return digest.hexdigest()

    def matrix(self, name: str, shape: tuple[int, int]) -> Matrix:
        """The matrix of that name and shape. Raises ModelFileError where there is none, or of a type that is not
        supported, or with a bias or a scale beside it."""
        tensor = self._tensor(name, shape)
        for beside in ("bias", "scale"):
            other = self.tensors.get(f"{name.removesuffix('weight')}{beside}")
            if other is not None and other.data.any():
                raise ModelFileError(f"{self.path}: tensor {other.name!r} is there: a {beside} is not supported")
        return matrix_of(f"{self.path}: tensor {name!r}", tensor.type_name, shape, tensor.data)

    def vector(self, name: str, width: int) -> NDArray[np.float32]:
        """The vector of that name and width: float32 [width], of a tensor of floats. Raises as `matrix` does."""
        tensor = self._tensor(name, (width,))
        if tensor.type_name not in WORDS:
            raise ModelFileError(
                f"{self.path}: tensor {name!r} is of type {tensor.type_name}, which is not supported; "
                f"supported here: {', '.join(WORDS)}"
            )
        return whole(matrix_of(f"{self.path}: tensor {name!r}", tensor.type_name, (1, width), tensor.data))[0]

    def _tensor(self, name: str, shape: tuple[int, ...]) -> GGUFTensor:
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelFileError(f"{self.path}: tensor {name!r} is missing")
        if tensor.shape != shape:
            raise ModelFileError(f"{self.path}: tensor {name!r} has shape {tensor.shape}, expected {shape}")
        return tensor

    def encoded_metadata(self) -> dict[str, bytes]:
        """Metadata as `gguf_writer.write_gguf` takes it, types and all; without what is of this file's layout alone."""
        first = self._parts[0]
        return {
            key: first.data[span].tobytes()
            for key, span in first.spans.items()
            if key != "general.alignment" and not key.startswith("split.")
        }


def _count(part: Part) -> int:
    return _number(part, "split.count", 1)


def _number(part: Part, key: str, default: int) -> int:
    value = part.metadata.get(key, default)
    if type(value) is not int or value < 0:
        raise ModelFileError(f"{part.path}: {key} = {value!r:.80}, expected a whole number")
    return value


def _all_parts(opened: Part) -> tuple[Part, ...]:
    """The parts of a split model, of which one is open."""
    count = _count(opened)
    index = _number(opened, "split.no", count)
    match = _PART_NAME.fullmatch(opened.path.name)
    if match is None or (int(match[2]), int(match[3])) != (index + 1, count):
        raise ModelFileError(
            f"{opened.path}: says it is part {index + 1} of {count} of a split model, so its name must end in "
            f"-{index + 1:05d}-of-{count:05d}.gguf, and the other parts must lie beside it"
        )
    parts = []
    for i in range(count):
        path = opened.path.with_name(f"{match[1]}-{i + 1:05d}-of-{count:05d}.gguf")
        if not path.exists():
            raise ModelFileError(f"{path}: no such file; {opened.path.name} needs all of its {count} parts")
        part = opened if i == index else parse(path)
        for key, expected in (("split.no", i), ("split.count", count)):
            if part.metadata.get(key) != expected:
                raise ModelFileError(
                    f"{path}: {key} = {part.metadata.get(key)!r:.80}, expected {expected}: it is not of the same "
                    f"model as {opened.path.name}"
                )
        parts.append(part)
    return tuple(parts)


def _tensors(parts: tuple[Part, ...]) -> dict[str, GGUFTensor]:
    tensors: dict[str, GGUFTensor] = {}
    for part in parts:
        twice = part.tensors.keys() & tensors.keys()
        if twice:
            raise ModelFileError(f"{part.path}: tensor {min(twice)!r} is in an earlier part, too")
        tensors |= part.tensors
    claimed = _number(parts[0], "split.tensors.count", len(tensors))
    if len(parts) > 1 and claimed != len(tensors):
        raise ModelFileError(f"{parts[0].path}: split.tensors.count = {claimed}, but its parts hold {len(tensors)}")
    return tensors
