"""Hugging Face directories."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, ClassVar

from prolepsis.errors import InputError
from prolepsis.model.config import RopeStyle
from prolepsis.quant.matrix import HeldMatrix, Matrix
from prolepsis.quantize.layouts import Floats, halves, row_chunks
from prolepsis.quantize.names import checkpoint_name
from prolepsis.quantize.packings import Packing
from prolepsis.quantize.stored import Stored, write_safetensors
from prolepsis.store import replace_file

SHARD_BYTES = 4 << 30


@dataclass(frozen=True)
class CheckpointLayout:
    """packing: of the layers' matrices. files: the text files beside the tensors, by name, of which "config.json" gets
    the quantisation's keys."""

    packing: Packing
    files: Mapping[str, str | bytes]

    rope_style: ClassVar[RopeStyle] = "half"

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        unit = self.packing.rows
        for part, (rows, _) in shapes.items():
            if rows % unit:
                raise InputError(
                    f"{part} has {rows} rows, and this format needs a multiple of {unit}; choose other --bits, or "
                    "--format gguf"
                )

    def matrix(self, name: str, matrix: HeldMatrix) -> list[Stored]:
        """See `Layout`."""
        stem = checkpoint_name(name).removesuffix("weight")
        return [Stored.of(stem + key, values) for key, values in self.packing.tensors(matrix).items()]

    def vector(self, name: str, values: Floats) -> Stored:
        """See `Layout`."""
        return Stored.of(checkpoint_name(name), halves(name, values))

    def embedding(self, name: str, matrix: Matrix) -> Stored:
        """See `Layout`."""
        chunks = (halves(name, rows) for rows in row_chunks(matrix))
        return Stored(checkpoint_name(name), "F16", matrix.shape, 2 * prod(matrix.shape), chunks)

    def write(self, place: Path, tensors: Sequence[Stored]) -> None:
        """See `Layout`."""
        place.mkdir()
        shards = _shards(tensors)
        names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        if len(shards) == 1:
            names = ["model.safetensors"]
        for name, shard in zip(names, shards, strict=True):
            with replace_file(place / name) as file:
                write_safetensors(file, shard)
        files = dict(self.files)
        if len(shards) > 1:
            where = {tensor.name: name for name, shard in zip(names, shards, strict=True) for tensor in shard}
            total = sum(tensor.nbytes for tensor in tensors)
            files["model.safetensors.index.json"] = _text({"metadata": {"total_size": total}, "weight_map": where})
        quantization = self.packing.config()
        files["config.json"] = _text({**json.loads(files["config.json"]), "quantization_config": quantization})
        files["quantize_config.json"] = _text(quantization)
        for name, text in files.items():
            with replace_file(place / name) as file:
                file.write(text.encode() if isinstance(text, str) else text)


def _text(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False) + "\n"


def _shards(tensors: Sequence[Stored]) -> list[list[Stored]]:
    """Tensors in their order, of not much more than `SHARD_BYTES` together."""
    shards: list[list[Stored]] = [[]]
    size = 0
    for tensor in tensors:
        if size + tensor.nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    return shards
