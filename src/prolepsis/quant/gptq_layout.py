"""GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323), as AutoGPTQ and GPTQModel write them.

Of a linear layer of `columns` inputs and `rows` outputs there are

- `qweight` int32 [columns * bits / 32, rows]: codes, a stream of bits down each column;
- `qzeros` int32 [groups, rows * bits / 32]: zero points, a stream along each row. In version 1 ("gptq") they lack one:
  each word has 1 subtracted from all of its codes at once, so that borrows run into the codes above, and reading adds
  it in the same way. (Of 3 bits the tools add to each code alone.) Version 2 ("gptq_v2") has them as they are;
- `scales` [groups, rows];
- `g_idx` int32 [columns]: the group of each column, in any order where columns were quantised by their activations
  ("desc_act"). Columns are then sorted by group.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.quant.bit_words import WORD, pack_words, take_codes, unpack_words
from prolepsis.quant.grouped_matrix import BITS, GroupedMatrix, Rows, Scales, checked_groups, group_size

Int32 = NDArray[np.int32]


class GptqTensors(NamedTuple):
    """What a checkpoint holds of one layer; see above. Absent ones are None."""

    qweight: Int32
    qzeros: Int32 | None
    scales: Scales
    g_idx: Int32 | None


def gptq_matrix(
    name: str, tensors: GptqTensors, columns: int, declared_group: int | None, version: int
) -> GroupedMatrix:
    """The matrix [rows, columns] of a layer; `name` of it is for errors; `declared_group`: what the configuration says.

    Its bits are found by the shapes, as configurations may have exceptions for some layers.

    Raises:
        ModelFileError: shapes that do not fit together, groups that are not supported, or indices out of range.
    """
    qweight, scales = tensors.qweight.view(np.uint32), tensors.scales
    words, rows = qweight.shape
    bits = words * WORD // columns
    if bits not in BITS or bits * columns != words * WORD:
        raise ModelFileError(f"{name}: qweight of {words} words does not fit {columns} columns of 2, 3, 4 or 8 bits")
    groups = checked_groups(name, scales, rows)
    group, order = grouping(name, tensors.g_idx, columns, groups, declared_group)
    zeros: NDArray[np.uint32] | None = None
    if tensors.qzeros is not None:
        if tensors.qzeros.shape != (groups, -(-rows * bits // WORD)):
            raise ModelFileError(f"{name}: qzeros have shape {tensors.qzeros.shape}, expected {groups} rows of {rows}")
        zeros = tensors.qzeros.view(np.uint32)

    def codes(some: Rows) -> NDArray[np.uint8]:
        return unpack_words(qweight[:, some].T, bits)

    def zero_points(some: Rows) -> NDArray[np.uint8]:
        assert zeros is not None
        return unpack_zeros(zeros, some, bits, version).T

    symmetric = 1 << bits - 1
    return GroupedMatrix(
        f"{name} (GPTQ, {bits} bits, groups of {group})",
        (rows, columns),
        bits,
        group,
        codes,
        symmetric if zeros is None else zero_points,
        scales.T,
        order,
    )


def grouping(
    name: str, g_idx: Int32 | None, columns: int, groups: int, declared: int | None
) -> tuple[int, NDArray[np.int32] | None]:
    """How many columns a group has, and the order that makes groups contiguous (None where they are)."""
    if g_idx is None:
        return group_size(name, columns, groups, declared), None
    if g_idx.shape != (columns,):
        raise ModelFileError(f"{name}: g_idx has shape {g_idx.shape}, expected ({columns},)")
    if g_idx.min() < 0 or g_idx.max() >= groups:
        worst = int(g_idx.min() if g_idx.min() < 0 else g_idx.max())
        raise ModelFileError(f"{name}: g_idx names group {worst}, there are {groups}")
    size = int(np.bincount(g_idx).max())
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], np.arange(columns) // size):
        raise ModelFileError(f"{name}: g_idx does not make groups of {size} columns each, which is not supported")
    return size, None if np.array_equal(order, np.arange(columns)) else order


def unpack_zeros(qzeros: NDArray[np.uint32], rows: Rows, bits: int, version: int) -> NDArray[np.uint8]:
    """Zero points [groups, rows] of some rows. `version`: 1 or 2."""
    if version == 2:
        return take_codes(qzeros, rows, bits)
    if WORD % bits:
        return take_codes(qzeros, rows, bits) + np.uint8(1) & np.uint8((1 << bits) - 1)
    return take_codes(qzeros + _ones(bits), rows, bits)


def pack_gptq(codes: NDArray[np.uint8], zeros: NDArray[np.uint8], bits: int, version: int = 1) -> tuple[Int32, Int32]:
    """`qweight` and `qzeros` of codes [rows, columns] and zero points [rows, groups].

    `columns` and `rows` times `bits` are multiples of 32 (of 3 bits, both are multiples of 32). Codes are as the file
    shall have their columns, whatever their order by group.
    """
    points = zeros
    if version == 1 and WORD % bits:
        points = zeros - np.uint8(1) & np.uint8((1 << bits) - 1)
    words = pack_words(points, bits).T
    if version == 1 and WORD % bits == 0:
        words = words - _ones(bits)
    return pack_words(codes.T, bits).view(np.int32), np.ascontiguousarray(words).view(np.int32)


def _ones(bits: int) -> np.uint32:
    """A word of codes of 1."""
    return np.uint32(((1 << WORD) - 1) // ((1 << bits) - 1))
