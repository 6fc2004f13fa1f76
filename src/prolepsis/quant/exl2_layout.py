"""EXL2 checkpoints (ExLlamaV2): columns sorted so that those of equal bits lie together, 2 to 8 bits in one matrix.

Of a linear layer of `columns` inputs and `rows` outputs there are

- `q_weight` int32 [words, rows]: codes of the sorted columns, a stream of bits down each column of it, one group after
  another;
- `q_groups` int16 [2 * groups]: bits of each group, and the word where it begins;
- `q_scale` int32 [groups, rows / 8]: 4 bits of a scale, a stream along each row, and `q_scale_max` float16 [groups]:
  a scale is (code + 1) ** 2 * q_scale_max / 256, here rounded once, to 11 bits;
- `q_invperm` int32 [columns]: where each column went. Weights are scale * (code - 2 ** (bits - 1)).
"""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.quant.bit_words import WORD, pack_words, take_codes, unpack_words
from prolepsis.quant.grouped_matrix import BITS, Rows, require_groups
from prolepsis.quant.half import half_scales
from prolepsis.quant.matrix import Codes, Form, Words

SCALE_BITS = 4
SCALE_UNIT = 256
Int32 = NDArray[np.int32]


class Exl2Tensors(NamedTuple):
    """What a checkpoint holds of one layer; see above."""

    q_weight: Int32
    q_groups: NDArray[np.int16]
    q_scale: Int32
    q_scale_max: NDArray[np.float16]
    q_invperm: Int32


@dataclass
class _Run:
    """Neighbouring groups of equal bits and size."""

    bits: int
    group: int
    first_group: int
    first_word: int
    sizes: list[int] = field(default_factory=list)

    @property
    def columns(self) -> int:
        return sum(self.sizes)


class Exl2Matrix:
    """The matrix [rows, columns] of a layer: a form for each run of groups of equal bits and size."""

    def __init__(self, name: str, tensors: Exl2Tensors, columns: int) -> None:
        """`name` is for errors.

        Raises:
            ModelFileError: shapes that do not fit together, groups that are not supported, or indices out of range.
        """
        self.name = f"{name} (EXL2)"
        self._words = tensors.q_weight.view(np.uint32)
        self.shape = (self._words.shape[1], columns)
        self.order: NDArray[np.int32] | None = self._checked_order(tensors.q_invperm)
        groups = self._checked_groups(tensors.q_groups.view(np.uint16))
        self._runs = _runs(groups)
        for run in self._runs:
            for size in (run.group, *run.sizes):
                require_groups(self.name, run.bits, size, columns)
        self._scales, exponent = self._all_scales(tensors, len(groups))
        self.forms = tuple(Form(f"INT{run.bits}", run.columns, run.group, exponent) for run in self._runs)

    def read(self, rows: Rows) -> list[Codes | Words]:
        """See `Matrix.read`."""
        parts: list[Codes | Words] = []
        for run in self._runs:
            end = run.first_word + run.columns * run.bits // WORD
            codes = unpack_words(self._words[run.first_word : end, rows].T, run.bits)
            scales = self._scales[run.first_group : run.first_group + len(run.sizes), rows].T
            zeros = np.full(scales.shape, 1 << run.bits - 1, np.uint8)
            parts.append(Codes(codes, np.ascontiguousarray(scales), zeros=zeros))
        return parts

    def _checked_order(self, inverse: Int32) -> NDArray[np.int32]:
        columns = self.shape[1]
        order = np.argsort(inverse, kind="stable").astype(np.int32)
        if inverse.shape != (columns,) or not np.array_equal(inverse[order], np.arange(columns)):
            raise ModelFileError(f"{self.name}: q_invperm is not an order of {columns} columns")
        return order

    def _checked_groups(self, pairs: NDArray[np.uint16]) -> list[tuple[int, int, int]]:
        """Bits, first word and columns of each group."""
        bits, starts = pairs[::2].tolist(), pairs[1::2].tolist()
        if not bits or len(bits) != len(starts) or any(each not in BITS for each in bits):
            raise ModelFileError(f"{self.name}: q_groups are not pairs of bits ({', '.join(map(str, BITS))}) and words")
        ends = [*starts[1:], len(self._words)]
        sizes = [(end - start) * WORD // each for each, start, end in zip(bits, starts, ends, strict=True)]
        spans = zip(bits, starts, ends, sizes, strict=True)
        if starts[0] or sum(sizes) != self.shape[1] or any(n <= 0 or n * b != (e - s) * WORD for b, s, e, n in spans):
            raise ModelFileError(f"{self.name}: q_groups do not divide {self.shape[1]} columns")
        return list(zip(bits, starts, sizes, strict=True))

    def _all_scales(self, tensors: Exl2Tensors, groups: int) -> tuple[NDArray[np.float16], int]:
        """[groups, rows], and their exponent."""
        rows = self.shape[0]
        expected = (groups, -(-rows * SCALE_BITS // WORD))
        if tensors.q_scale.shape != expected or tensors.q_scale_max.shape != (groups,):
            raise ModelFileError(
                f"{self.name}: q_scale and q_scale_max have shapes {tensors.q_scale.shape} and "
                f"{tensors.q_scale_max.shape}, expected {expected} and ({groups},)"
            )
        codes = take_codes(tensors.q_scale.view(np.uint32), np.arange(rows), SCALE_BITS)
        scales = (codes.astype(np.float32) + 1) ** 2 * tensors.q_scale_max.astype(np.float32)[:, None] / SCALE_UNIT
        halves, exponent = half_scales(scales)
        if not np.isfinite(halves).all():
            raise ModelFileError(f"{self.name}: a scale is not a finite number")
        return halves, exponent


def _runs(groups: list[tuple[int, int, int]]) -> list[_Run]:
    """Groups of equal bits and size beside each other; the last of a run may be shorter."""
    runs: list[_Run] = []
    for index, (bits, word, size) in enumerate(groups):
        run = runs[-1] if runs else None
        if run is None or run.bits != bits or run.sizes[-1] != run.group or size > run.group:
            run = _Run(bits, size, index, word)
            runs.append(run)
        run.sizes.append(size)
    return runs


def pack_exl2(
    codes: NDArray[np.uint8],
    groups: list[tuple[int, int]],
    scale_codes: NDArray[np.uint8],
    scale_max: NDArray[np.float16],
    order: NDArray[np.int32],
) -> Exl2Tensors:
    """The tensors of sorted codes [rows, columns]: `groups` are (bits, columns), `scale_codes` [rows, groups] below 16,
    `order` as `Matrix.order`. Rows are a multiple of 8, a group's columns of 32."""
    words: list[NDArray[np.uint32]] = []
    pairs: list[int] = []
    start = 0
    for bits, size in groups:
        pairs += [bits, sum(len(each) for each in words)]
        words.append(pack_words(codes[:, start : start + size].T, bits))
        start += size
    scales = np.ascontiguousarray(pack_words(scale_codes, SCALE_BITS).T)
    inverse = np.empty(len(order), np.int32)
    inverse[order] = np.arange(len(order), dtype=np.int32)
    starts = np.array(pairs, np.uint16).view(np.int16)
    return Exl2Tensors(np.concatenate(words).view(np.int32), starts, scales.view(np.int32), scale_max, inverse)
