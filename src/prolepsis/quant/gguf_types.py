"""Tensors of a GGUF file as matrices of codes, and codes as bytes of a GGUF file: nothing is lost either way.

A type of regular blocks is a table of pieces: which bits of a block's bytes are which bits of its codes, scales and
minimums. The table is read in both directions. Types of vectors and of base 3 are decoded in `quant.gguf_vectors`.

Block layouts: ggml-common.h and ggml-quants.c of llama.cpp. Sizes of blocks come from the `gguf` package.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.kernels.cells import CELL
from prolepsis.kernels.fields import WORD, take_fields
from prolepsis.kernels.kinds import KINDS
from prolepsis.quant import gguf_vectors
from prolepsis.quant.matrix import Codes, Form, Words

Bytes = NDArray[np.uint8]

_SCAN_BLOCKS = 1 << 16


class Piece(NamedTuple):
    """Bytes of a block that hold some bits of some values of a part, such as the codes.

    part: a field of `Codes`. at, size: which bytes. bits: of a field; a byte has `fields` of them, from bit `low` up.
    run: that many bytes in a row hold values in a row, in their lowest fields; then their next fields go on.
    first: which value of the part comes first. to: which bit of the values the field's lowest bit is.
    """

    part: str
    at: int
    size: int
    bits: int
    run: int
    low: int = 0
    fields: int = 0
    first: int = 0
    to: int = 0

    @property
    def number(self) -> int:
        """How many of the part's values this piece has bits of."""
        return self.size * len(self.shifts)

    @property
    def shifts(self) -> Bytes:
        """Where in a byte each field begins: uint8 [fields, 1]."""
        fields = self.fields or (8 - self.low) // self.bits
        return (self.low + self.bits * np.arange(fields, dtype=np.uint8))[:, None]

    def values(self, blocks: Bytes) -> Bytes:
        """What this piece gives to the part's values: uint8 [blocks, count]."""
        source = blocks[:, self.at : self.at + self.size].reshape(len(blocks), -1, 1, self.run)
        fields = source if self.bits == 8 else source >> self.shifts & np.uint8(2**self.bits - 1)
        return (fields << np.uint8(self.to) if self.to else fields).reshape(len(blocks), -1)

    def take(self, blocks: Bytes, out: Bytes, fresh: bool) -> None:
        """Write this piece's bits into the part's values `out`, uint8 [blocks, all values]: where it is not `fresh`, to
        the bits that are there."""
        if self.run % WORD == 0:
            fields = len(self.shifts)
            take_fields(
                blocks.reshape(-1), blocks.shape[1], self.at, self.size, self.run, self.bits, self.low, fields, self.to,
                out.reshape(-1), out.shape[1], self.first, fresh,
            )  # fmt: skip
            return
        mine = out[:, self.first : self.first + self.number]
        mine[:] = self.values(blocks) if fresh else mine | self.values(blocks)

    def put(self, values: Bytes, blocks: Bytes) -> None:
        """The inverse of `values`: set this piece's bits of `blocks`, which are 0."""
        shifts = self.shifts
        mine = values[:, self.first : self.first + self.number] >> np.uint8(self.to) & np.uint8(2**self.bits - 1)
        fields = mine.reshape(len(blocks), -1, len(shifts), self.run) << shifts
        blocks[:, self.at : self.at + self.size] |= np.bitwise_or.reduce(fields, axis=2).reshape(len(blocks), -1)


class Layout(NamedTuple):
    """A type of regular blocks.

    scale, minimum: first bytes of the block's float16 values, -1 if it has none. pieces: of all the rest.
    flip: codes are stored exclusive-or this. parts_bias: factors of scales are stored plus this.
    """

    pieces: tuple[Piece, ...]
    scale: int
    minimum: int = -1
    flip: int = 0
    parts_bias: int = 0


_K_FACTORS = (
    Piece("parts", 4, 4, bits=6, run=4),
    Piece("parts", 12, 4, bits=4, run=4, fields=1, first=4),
    Piece("parts", 4, 4, bits=2, run=4, low=6, first=4, to=4),
    Piece("part_minimums", 8, 4, bits=6, run=4),
    Piece("part_minimums", 12, 4, bits=4, run=4, low=4, first=4),
    Piece("part_minimums", 8, 4, bits=2, run=4, low=6, first=4, to=4),
)
LAYOUTS = {
    "Q4_0": Layout((Piece("codes", 2, 16, bits=4, run=16),), scale=0),
    "Q4_1": Layout((Piece("codes", 4, 16, bits=4, run=16),), scale=0, minimum=2),
    "Q5_0": Layout((Piece("codes", 6, 16, bits=4, run=16), Piece("codes", 2, 4, bits=1, run=1, to=4)), scale=0),
    "Q5_1": Layout(
        (Piece("codes", 8, 16, bits=4, run=16), Piece("codes", 4, 4, bits=1, run=1, to=4)), scale=0, minimum=2
    ),
    "Q8_0": Layout((Piece("codes", 2, 32, bits=8, run=32),), scale=0, flip=0x80),
    "Q2_K": Layout(
        (
            Piece("parts", 0, 16, bits=4, run=16, fields=1),
            Piece("part_minimums", 0, 16, bits=4, run=16, low=4),
            Piece("codes", 16, 64, bits=2, run=32),
        ),
        scale=80,
        minimum=82,
    ),
    "Q3_K": Layout(
        (
            Piece("codes", 32, 64, bits=2, run=32),
            Piece("codes", 0, 32, bits=1, run=32, to=2),
            Piece("parts", 96, 8, bits=4, run=8),
            Piece("parts", 104, 4, bits=2, run=4, to=4),
        ),
        scale=108,
        parts_bias=32,
    ),
    "Q4_K": Layout((*_K_FACTORS, Piece("codes", 16, 128, bits=4, run=32)), scale=0, minimum=2),
    "Q5_K": Layout(
        (*_K_FACTORS, Piece("codes", 48, 128, bits=4, run=32), Piece("codes", 16, 32, bits=1, run=32, to=4)),
        scale=0,
        minimum=2,
    ),
    "Q6_K": Layout(
        (
            Piece("codes", 0, 128, bits=4, run=64),
            Piece("codes", 128, 64, bits=2, run=32, to=4),
            Piece("parts", 192, 16, bits=8, run=16),
        ),
        scale=208,
    ),
    "IQ4_NL": Layout((Piece("codes", 2, 16, bits=4, run=16),), scale=0),
    "IQ4_XS": Layout(
        (
            Piece("codes", 8, 128, bits=4, run=16),
            Piece("parts", 4, 4, bits=4, run=1),
            Piece("parts", 2, 2, bits=2, run=1, to=4),
        ),
        scale=0,
        parts_bias=32,
    ),
}

WORDS = {"F16": np.dtype("<u2"), "BF16": np.dtype("<u2"), "F32": np.dtype("<u4")}


@dataclass
class GGUFMatrix:
    """A `quant.matrix.Matrix` over a tensor's bytes: uint8 [rows, bytes of a row], a view of the file's map."""

    shape: tuple[int, int]
    forms: tuple[Form, ...]
    source: Bytes
    decode: Callable[[Bytes], Codes | Words]
    order: NDArray[np.int32] | None = None

    def read(self, rows: NDArray[np.intp]) -> list[Codes | Words]:
        """Those rows, in that order."""
        return [self.decode(self.source[rows])]


def readable_types() -> list[str]:
    """Names of the types that `matrix_of` takes."""
    return [*LAYOUTS, *gguf_vectors.DECODERS, *WORDS, "MXFP4"]


def matrix_of(name: str, type_name: str, shape: tuple[int, ...], data: Bytes) -> GGUFMatrix:
    """The matrix in the bytes `data` of a GGUF tensor of `shape`, of which nothing is copied.

    `name` is what errors call it: the file and the tensor. Raises ModelFileError for a type that is not supported, a
    shape that is not a matrix, and rows that are not a multiple of 32 columns.
    """
    if len(shape) != 2:
        raise ModelFileError(f"{name}: has shape {shape}, a matrix was expected")
    if type_name not in readable_types():
        raise ModelFileError(
            f"{name}: is of type {type_name}, which is not supported; supported here: {', '.join(readable_types())}"
        )
    rows, columns = shape
    per_block, block_bytes = block_size(type_name)
    if columns % CELL or columns % per_block:
        raise ModelFileError(f"{name}: rows of {columns} are not a multiple of {max(per_block, CELL)} columns")
    source = data.reshape(rows, columns // per_block * block_bytes)
    form, decode = _form(type_name, columns, source)
    return GGUFMatrix((rows, columns), (form,), source, decode)


def block_size(type_name: str) -> tuple[int, int]:
    """Columns and bytes of a block of a type."""
    return GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]


def _form(type_name: str, columns: int, source: Bytes) -> tuple[Form, Callable[[Bytes], Codes | Words]]:
    if type_name in WORDS:
        return Form(type_name, columns), lambda raw: raw.view(WORDS[type_name])
    if type_name == "MXFP4":
        return _mxfp4(columns, source)
    if type_name in LAYOUTS:
        return Form(type_name, columns), lambda raw: decoded(type_name, raw)
    kind, group, exponent, decode = gguf_vectors.DECODERS[type_name]
    return Form(kind, columns, group, exponent), lambda raw: _by_rows(len(raw), decode(_blocks(type_name, raw)))


def _blocks(type_name: str, raw: Bytes) -> Bytes:
    return raw.reshape(-1, block_size(type_name)[1])


def _by_rows(rows: int, part: Codes) -> Codes:
    """Arrays of [blocks, values] as [rows, values]."""
    return Codes(*(None if values is None else values.reshape(rows, -1) for values in part))  # type: ignore[arg-type]


def decoded(type_name: str, raw: Bytes) -> Codes:
    """Rows of a type of `LAYOUTS`, uint8 [rows, bytes], as codes."""
    layout, kind, blocks = LAYOUTS[type_name], KINDS[type_name], _blocks(type_name, raw)
    columns = block_size(type_name)[0]
    parts: dict[str, Bytes] = {}
    for piece in layout.pieces:
        width = columns if piece.part == "codes" else columns // kind.part
        fresh = piece.part not in parts
        if fresh:
            parts[piece.part] = (np.empty if piece.number == width else np.zeros)((len(blocks), width), np.uint8)
        piece.take(blocks, parts[piece.part], fresh and piece.number == width)
    factors = parts.get("parts")
    codes = Codes(
        codes=parts["codes"] ^ np.uint8(layout.flip) if layout.flip else parts["codes"],
        scales=_halves(blocks, layout.scale),
        minimums=None if layout.minimum < 0 else _halves(blocks, layout.minimum),
        parts=None if factors is None else (factors - np.uint8(layout.parts_bias)).view(np.int8),
        part_minimums=parts.get("part_minimums"),
    )
    return _by_rows(len(raw), codes)


def encoded(type_name: str, part: Codes) -> Bytes:
    """The inverse of `decoded`: rows of codes as uint8 [rows, bytes]."""
    layout, kind = LAYOUTS[type_name], KINDS[type_name]
    per_block, block_bytes = block_size(type_name)
    rows, columns = part.codes.shape
    blocks = np.zeros((rows * columns // per_block, block_bytes), np.uint8)
    values: dict[str, Bytes] = {"codes": part.codes ^ np.uint8(layout.flip)}
    if part.parts is not None:
        values["parts"] = part.parts.view(np.uint8) + np.uint8(layout.parts_bias)
    if kind.part and part.part_minimums is not None:
        values["part_minimums"] = part.part_minimums
    for piece in layout.pieces:
        piece.put(values[piece.part].reshape(len(blocks), -1), blocks)
    for at, halves in ((layout.scale, part.scales), (layout.minimum, part.minimums)):
        if halves is not None:
            blocks[:, at : at + 2] = halves.astype("<f2").reshape(-1, 1).view(np.uint8)
    return blocks.reshape(rows, -1)


def _halves(blocks: Bytes, at: int) -> NDArray[np.float16]:
    """The float16 at byte `at`, which is even as all sizes of these blocks are: [blocks, 1]."""
    return np.ascontiguousarray(blocks.view("<f2")[:, at // 2, None])


def _mxfp4(columns: int, source: Bytes) -> tuple[Form, Callable[[Bytes], Codes | Words]]:
    """MXFP4's scales are powers of two, 2 ** -128 to 2 ** 127: float16 times a power that the matrix has, which spans
    2 ** 39. A block of zeros may have any scale. A matrix that spans more becomes float32."""
    exponents = source.reshape(-1, 17)[:, 0]
    least = max(int(exponents.max(initial=0)) - 39, 0)

    def outliers(blocks: Bytes) -> bool:
        low = blocks[blocks[:, 0] < least]
        return bool((low[:, 1:] & 0x77).any())

    blocks = source.reshape(-1, 17)
    if any(outliers(blocks[start : start + _SCAN_BLOCKS]) for start in range(0, len(blocks), _SCAN_BLOCKS)):
        return Form("F32", columns), _mxfp4_floats

    def decode(raw: Bytes) -> Codes:
        blocks = _blocks("MXFP4", raw)
        powers = np.ldexp(np.float32(1), np.maximum(blocks[:, :1], least).astype(np.int32) - least - 24)
        codes = Piece("codes", 1, 16, bits=4, run=16).values(blocks)
        return _by_rows(len(raw), Codes(codes, powers.astype(np.float16)))

    return Form("MXFP4", columns, exponent=least + 24 - 128), decode


def _mxfp4_floats(raw: Bytes) -> Words:
    with np.errstate(over="ignore"):  # of scales that no float32 can hold times a code
        return dequantize(raw, GGMLQuantizationType.MXFP4).view(np.uint32)
