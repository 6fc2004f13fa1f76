"""GGUF files: every type that llama.cpp reads and we write."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from gguf import GGML_QUANT_VERSION, LlamaFileType
from numpy.typing import NDArray

from prolepsis.errors import InputError
from prolepsis.model.config import ROPE_FACTORS_TENSOR, RopeStyle
from prolepsis.model.gguf_writer import TensorEntry, write_gguf
from prolepsis.quant.gguf_types import block_size, encoded
from prolepsis.quant.matrix import Codes, HeldMatrix, Matrix
from prolepsis.quantize.gguf_rounding import rounded_matrix
from prolepsis.quantize.layouts import Floats, row_chunks
from prolepsis.quantize.stored import Stored
from prolepsis.store import replace_file

_COARSE = ("Q2_K", "Q3_K", "Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q5_1", "Q5_K", "IQ4_NL", "IQ4_XS")
TYPES = (*_COARSE, "Q6_K", "Q8_0", "F16", "BF16")
"""What matrices can be written as."""

_FINE = "Q6_K"
"""What the embedding and the head become where the layers have fewer bits, as in llama.cpp's own mixes."""

_SPARE = "Q8_0"  # where rows are no multiple of 256


@dataclass(frozen=True)
class GGUFLayout:
    """type_name: of the layers' matrices; metadata: the file's keys, as `write_gguf` takes them; rope_factors: see
    `RopeConfig.frequency_factors`; importance: of columns of the embedding and the head, where it is known."""

    type_name: str
    metadata: Mapping[str, Any]
    rope_factors: tuple[float, ...] | None = None
    importance: Mapping[str, Floats] = field(default_factory=dict)

    rope_style: ClassVar[RopeStyle] = "interleaved"

    def check(self, shapes: dict[str, tuple[int, int]]) -> None:
        """See `Layout`."""
        per_block, _ = block_size(self.type_name)
        widths = [columns for _, columns in shapes.values()]
        for part, (_, columns) in shapes.items():
            if columns % per_block:
                fit = [name for name in TYPES if not any(each % block_size(name)[0] for each in widths)]
                raise InputError(
                    f"--type {self.type_name} has blocks of {per_block} columns, but {part} has {columns}; choose one "
                    f"of {', '.join(fit)}"
                )

    def matrix(self, name: str, matrix: HeldMatrix) -> list[Stored]:
        """See `Layout`."""
        return [Stored.held(name, matrix.forms[0].kind, matrix.shape, _bytes(matrix))]

    def vector(self, name: str, values: Floats) -> Stored:
        """See `Layout`."""
        return Stored.held(name, "F32", values.shape, values)

    def embedding(self, name: str, matrix: Matrix) -> Stored:
        """See `Layout`."""
        kind = _FINE if self.type_name in _COARSE else self.type_name
        if matrix.shape[1] % block_size(kind)[0]:
            kind = _SPARE
        per_block, block_bytes = block_size(kind)
        rows, columns = matrix.shape
        weights = self.importance.get(name)
        chunks = (_bytes(rounded_matrix(name, kind, each, weights)) for each in row_chunks(matrix))
        return Stored(name, kind, matrix.shape, rows * columns // per_block * block_bytes, chunks)

    def write(self, place: Path, tensors: Sequence[Stored]) -> None:
        """See `Layout`."""
        if self.rope_factors is not None:
            tensors = [self.vector(ROPE_FACTORS_TENSOR, np.array(self.rope_factors, np.float32)), *tensors]
        entries = [TensorEntry(each.name, each.shape, each.dtype, each.chunks) for each in tensors]
        with replace_file(place) as file:
            write_gguf(file, {**self.metadata, **self._type_keys()}, entries)

    def _type_keys(self) -> dict[str, Any]:
        """What the file says of how it is quantised, for those who ask."""
        mixed = {"Q3_K": "Q3_K_M", "Q4_K": "Q4_K_M", "Q5_K": "Q5_K_M"}.get(self.type_name, self.type_name)
        name = f"MOSTLY_{mixed}"
        return {"general.file_type": int(LlamaFileType[name]), "general.quantization_version": GGML_QUANT_VERSION}


def _bytes(matrix: HeldMatrix) -> NDArray[np.uint8]:
    """Rows as the file has them: uint8 [rows, bytes]."""
    (part,) = matrix.parts
    return encoded(matrix.forms[0].kind, part) if isinstance(part, Codes) else part.view(np.uint8)
