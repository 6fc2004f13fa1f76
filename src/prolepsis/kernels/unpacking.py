"""Packed weights back as numbers, one at a time: embedding look-ups, rounding to other kinds, checks of the packing."""

import math

import numpy as np
from numba import njit

from prolepsis.kernels.cells import CELL, cell_bytes, group_bytes, is_float, part_bytes, parts_of, planes_of
from prolepsis.kernels.kinds import FREE, KINDS
from prolepsis.kernels.qmatmul import (
    COLUMNS,
    EXPONENT,
    FIRST_CELL,
    GROUP,
    KIND,
    NATURAL,
    NEXT,
    OFFSET,
    ORDER,
    TILE_BYTES,
    WIDTH,
)

# Columns of a row of _KINDS: what `Kind` says, as numbers. The planes' bits are 0 where there is no further plane.
_FLOAT, _BRAIN, _GROUP, _GROUP_BYTES, _PARTS, _PART_BYTES, _CELL_BYTES, _LOW, _HIGH, _BIAS, _MINIMUMS, _BOOK = range(12)


def _row(kind):
    planes = () if is_float(kind) else planes_of(kind)
    low, high = (*planes, 0, 0)[:2]
    return (
        kind.bits if is_float(kind) else 0, kind.brain, kind.group // CELL, group_bytes(kind), parts_of(kind),
        part_bytes(kind), cell_bytes(kind), low, high, kind.bias, kind.minimums, bool(kind.book),
    )  # fmt: skip


_KINDS = np.array([_row(kind) for kind in KINDS.values()], np.int64)
_BOOKS = np.array([(*kind.book, *[0] * (16 - len(kind.book))) for kind in KINDS.values()], np.int64)
_FREE = np.int64(FREE)


@njit(cache=True)
def _half(bits):
    """Value of IEEE half bits."""
    exponent, mantissa = (bits >> 10) & 31, bits & 1023
    if exponent == 31:
        magnitude = np.inf if mantissa == 0 else np.nan
    elif exponent == 0:
        magnitude = math.ldexp(mantissa, -24)
    else:
        magnitude = math.ldexp(1024 + mantissa, exponent - 25)
    return np.float32(-magnitude if bits & 0x8000 else magnitude)


@njit(cache=True)
def _u16(data, at):
    return np.int64(data[at]) | np.int64(data[at + 1]) << 8


@njit(cache=True)
def _plane(data, at, bits, lane, column):
    """The bits of one code in a plane."""
    vector, place = column // 4, 0
    if bits == 4:
        vector, place = vector % 4, vector // 4
    else:
        each = 8 // bits
        vector, place = vector // each, vector % each
    byte = np.int64(data[at + 64 * vector + 4 * lane + column % 4])
    return byte >> (bits * place) & ((1 << bits) - 1)


@njit(cache=True)
def _float_cell(data, kind, cell, lane, out):
    for column in range(CELL):
        at = 16 * column + lane
        if _KINDS[kind, _FLOAT] == 32:
            bits = _u16(data, cell + 4 * at) | _u16(data, cell + 4 * at + 2) << 16
            out[column] = np.uint32(bits).view(np.float32)
        elif _KINDS[kind, _BRAIN]:
            out[column] = np.uint32(_u16(data, cell + 2 * at) << 16).view(np.float32)
        else:
            out[column] = _half(_u16(data, cell + 2 * at))


@njit(cache=True)
def _value(data, kind, codes, lane, column):
    """What the code of a column stands for, without a zero point."""
    low, high = _KINDS[kind, _LOW], _KINDS[kind, _HIGH]
    code = _plane(data, codes, low, lane, column)
    if high:
        code |= _plane(data, codes + 64 * low, high, lane, column) << low
    return _BOOKS[kind, code] if _KINDS[kind, _BOOK] else code - _KINDS[kind, _BIAS]


@njit(cache=True)
def _quantised_cell(data, kind, group, cell, lane, wide, out):
    """One row of a cell: the steps of `quant.matrix.dequantised`, in float32."""
    parts, minimums = _KINDS[kind, _PARTS], _KINDS[kind, _MINIMUMS] != 0
    codes = cell + _KINDS[kind, _PART_BYTES]
    scale, minimum, zero = _half(_u16(data, group + 2 * lane)) * wide, np.float32(0.0), np.int64(0)
    if minimums:
        minimum = _half(_u16(data, group + 32 + 2 * lane)) * wide
    elif _KINDS[kind, _GROUP] == _FREE:
        zero = np.int64(data[group + 32 + lane])
    for part in range(max(parts, 1)):
        step, least = scale, minimum
        if parts:
            step = scale * np.float32(np.int8(data[cell + 16 * part + lane]))
            if minimums:
                least = -(minimum * np.float32(data[cell + 16 * (parts + part) + lane]))
        width = CELL // max(parts, 1)
        for column in range(part * width, (part + 1) * width):
            value = step * np.float32(_value(data, kind, codes, lane, column) - zero)
            out[column] = value + least if minimums else value


@njit(cache=True)
def _unpack_form(weights, form, row, out, at):
    """out[at : at + columns] = one row of a form, in its own order."""
    kind, wide = form[KIND], np.float32(2.0 ** form[EXPONENT])
    per_group = form[GROUP] if _KINDS[kind, _GROUP] == _FREE else _KINDS[kind, _GROUP]
    header, size = _KINDS[kind, _GROUP_BYTES], _KINDS[kind, _CELL_BYTES]
    tile, lane = form[OFFSET] + row // 16 * form[TILE_BYTES], row % 16
    for c in range(form[COLUMNS] // CELL):
        numbers = out[at + c * CELL : at + (c + 1) * CELL]
        if _KINDS[kind, _FLOAT]:
            _float_cell(weights.data, kind, tile + c * size, lane, numbers)
            continue
        group = tile + c // per_group * (header + per_group * size)
        cell = group + header + c % per_group * size
        _quantised_cell(weights.data, kind, group, cell, lane, wide, numbers)


@njit(cache=True)
def unpack_row(weights, matrix, row, out, at):
    """out[at : at + width] = one row of a matrix as float32, its columns in the activations' order."""
    form, first = weights.matrices[matrix], weights.matrices[matrix]
    _unpack_form(weights, form, row, out, at)
    while form[NEXT] > 0:
        form = weights.matrices[form[NEXT]]
        _unpack_form(weights, form, row, out, at + form[FIRST_CELL] * CELL)
    if first[ORDER] == NATURAL:
        return
    width = first[WIDTH]
    numbers = out[at : at + width].copy()
    for i in range(width):
        out[at + weights.orders[first[ORDER] + i]] = numbers[i]


@njit(cache=True)
def unpack_rows(weights, matrix, rows, out):
    """out[i] = row rows[i] of a matrix. rows: int64 [n]. out: float32 [n, columns]."""
    flat = out.reshape(-1)
    for i in range(len(rows)):
        unpack_row(weights, matrix, rows[i], flat, i * out.shape[1])
