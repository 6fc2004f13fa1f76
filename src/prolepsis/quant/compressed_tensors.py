"""Checkpoints of the `compressed-tensors` library (vLLM, llm-compressor): integer weights, packed or not.

Format "pack-quantized": `weight_packed` int32 [rows, words], a stream of bits along each row (older versions of the
library: each word 32 // bits codes, and the rest of it empty), each code with 2 ** (bits - 1) added;
`weight_zero_point`, where there is one, the same down the rows, int32 [words, groups] (int8 [rows, groups] in older
files); `weight_scale` [rows, groups]; `weight_g_idx` [columns], where columns were reordered. Format "int-quantized":
`weight` int8 [rows, columns], and zero points int8.

Activations: where a checkpoint means them to be rounded to 8 bits (W8A8), ours are rounded more finely, in every
precision (`docs/quantization.md`).
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import ModelFileError
from prolepsis.quant.bit_words import WORD, unpack_words
from prolepsis.quant.gptq_layout import grouping
from prolepsis.quant.grouped_matrix import GroupedMatrix, Read, Rows, Scales, require_bits

Int32 = NDArray[np.int32]
Int8 = NDArray[np.int8]


def packed_matrix(
    name: str,
    packed: Int32,
    bits: int,
    columns: int,
    scales: Scales,
    zeros: Int32 | Int8 | None,
    g_idx: Int32 | None,
    declared_group: int | None,
) -> GroupedMatrix:
    """The matrix [rows, columns] of a "pack-quantized" layer; `name` of it is for errors.

    Raises:
        ModelFileError: shapes that do not fit together, bits or groups that are not supported, or indices out of range.
    """
    require_bits(name, bits)
    rows, words = packed.shape
    if words not in words_of(columns, bits):
        raise ModelFileError(f"{name}: weight_packed of {words} words does not fit {columns} columns of {bits} bits")
    scales = _checked_scales(name, scales, rows)
    group, order = grouping(name, g_idx, columns, scales.shape[1], declared_group)
    points = _zero_points(name, zeros, rows, scales.shape[1], bits)

    def codes(some: Rows) -> NDArray[np.uint8]:
        return unpack_rows(packed[some], bits, columns)

    title = f"{name} (compressed-tensors, {bits} bits, groups of {group})"
    return GroupedMatrix(title, (rows, columns), bits, group, codes, points, scales, order)


def int8_matrix(
    name: str, weight: Int8, scales: Scales, zeros: Int8 | None, declared_group: int | None
) -> GroupedMatrix:
    """The matrix of an "int-quantized" layer, as `packed_matrix`."""
    rows, columns = weight.shape
    scales = _checked_scales(name, scales, rows)
    group, _ = grouping(name, None, columns, scales.shape[1], declared_group)
    points = _zero_points(name, zeros, rows, scales.shape[1], 8)

    def codes(some: Rows) -> NDArray[np.uint8]:
        return _unsigned(weight[some], 8)

    title = f"{name} (compressed-tensors, 8 bits, groups of {group})"
    return GroupedMatrix(title, weight.shape, 8, group, codes, points, scales)


def words_of(columns: int, bits: int) -> tuple[int, int]:
    """Words that a row may take: as one stream of bits, and as the library's older versions packed it."""
    return -(-columns * bits // WORD), -(-columns // (WORD // bits))


def unpack_rows(packed: Int32, bits: int, columns: int) -> NDArray[np.uint8]:
    """Codes of rows of words: int32 [rows, words] to uint8 [rows, columns]."""
    words = packed.view(np.uint32)
    if words.shape[1] == words_of(columns, bits)[0]:
        period = bits if WORD % bits else 1
        return unpack_words(np.pad(words, ((0, 0), (0, -words.shape[1] % period))), bits)[:, :columns]
    shifts = np.arange(WORD // bits, dtype=np.uint32) * np.uint32(bits)
    codes = words[:, :, None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(len(packed), -1)[:, :columns].astype(np.uint8)


def _checked_scales(name: str, scales: Scales, rows: int) -> Scales:
    """Scales [rows, groups], where a file may have one for a row, or for all."""
    if scales.size == 1:
        return np.broadcast_to(scales.reshape(1, 1), (rows, 1))
    if scales.ndim == 1:
        scales = scales[:, None]
    if scales.ndim != 2 or len(scales) != rows:
        raise ModelFileError(f"{name}: weight_scale has shape {scales.shape}, expected ({rows}, groups)")
    return scales


def _zero_points(name: str, zeros: Int32 | Int8 | None, rows: int, groups: int, bits: int) -> Read | int:
    """Zero points as `GroupedMatrix` takes them. Small, and so unpacked at once."""
    if zeros is None:
        return 1 << bits - 1
    unfit = ModelFileError(f"{name}: weight_zero_point has shape {zeros.shape}, expected {(rows, groups)}")
    if not zeros.size:
        raise unfit
    flat = zeros.reshape(len(zeros) if zeros.ndim else 1, -1)
    points = (
        unpack_rows(np.ascontiguousarray(flat.T), bits, rows).T if flat.dtype == np.int32 else _unsigned(flat, bits)
    )
    if points.size == 1:
        points = np.broadcast_to(points.reshape(1, 1), (rows, groups))
    if points.shape != (rows, groups):
        raise unfit
    if points.max() >> bits:
        raise ModelFileError(f"{name}: a zero point has more than {bits} bits")
    return lambda some: points[some]


def _unsigned(values: NDArray[np.integer[Any]], bits: int) -> NDArray[np.uint8]:
    return (values.view(np.uint8) + np.uint8(1 << bits - 1)).astype(np.uint8)
