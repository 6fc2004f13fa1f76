"""Decoders of GGUF's types of vectors (IQ1, IQ2, IQ3) and of base 3 (TQ): blocks to codes.

A block of an IQ type has numbers of vectors of a table (the `gguf` package's), and signs beside them. The tables hold
two to eight different magnitudes, so that a code is a magnitude with its sign: an index into the book of a kind.

Each decoder takes uint8 [blocks, bytes] and returns arrays of [blocks, values]. Layouts: ggml-common.h of llama.cpp.
"""

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import numpy as np
from gguf import quants
from numpy.typing import NDArray

from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.matrix import Codes

Bytes = NDArray[np.uint8]

_SUPERBLOCK = 256
_NIBBLES = np.array([0, 4], np.uint8)
_PAIRS = np.array([0, 2, 4, 6], np.uint8)
_SEVENS = np.array([0, 7, 14, 21], np.uint32)
_THREES = np.array([0, 3, 6, 9], np.uint16)


class Vectors(NamedTuple):
    """kind, group, exponent: as in `quant.matrix.Form`. decode: of blocks."""

    kind: str
    group: int
    exponent: int
    decode: Callable[[Bytes], Codes]


@cache
def _table(type_name: str) -> Bytes:
    """Vectors of a type whose signs are apart, as codes of positive magnitudes: uint8 [vectors, length]."""
    quant = getattr(quants, type_name)
    quant.init_grid()
    book = np.array(KINDS[DECODERS[type_name].kind].book)
    return np.searchsorted(book, quant.grid.reshape(quant.grid_shape)).astype(np.uint8)


@cache
def _ternary_table() -> Bytes:
    """IQ1's vectors of -1, 0, 1 as 0, 1, 2: uint8 [2048, 8]."""
    quants.IQ1_S.init_grid()
    return (np.asarray(quants.IQ1_S.grid).reshape(quants.IQ1_S.grid_shape) + 1).astype(np.uint8)


def _even_signs(numbers: NDArray[np.integer]) -> Bytes:
    """Eight signs from the seven that are stored: their number is even."""
    return np.frombuffer(quants.IQ2_XXS.ksigns, np.uint8)[numbers]


def _signed(type_name: str, vectors: NDArray[np.integer], signs: Bytes) -> Bytes:
    """Codes [blocks, 256] of vectors with a bit for each sign. Books are symmetric: code i is minus code last - i."""
    last = np.uint8(len(KINDS[DECODERS[type_name].kind].book) - 1)
    blocks = len(vectors)
    positive = _table(type_name)[vectors].reshape(blocks, -1)
    negative = np.unpackbits(np.ascontiguousarray(signs).reshape(blocks, -1), axis=1, bitorder="little")
    return np.where(negative, last - positive, positive)


def _words(blocks: Bytes, at: int, size: int, dtype: str) -> NDArray[np.unsignedinteger]:
    return np.ascontiguousarray(blocks[:, at : at + size]).view(dtype)


def _scales(blocks: Bytes, at: int = 0) -> NDArray[np.float16]:
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2")


def _odd(numbers: NDArray[np.integer]) -> NDArray[np.int8]:
    """Factors of scales, 2 s + 1: int8 [blocks, parts]."""
    return (2 * numbers.reshape(len(numbers), -1) + 1).astype(np.int8)


def _split(values: NDArray[np.unsignedinteger], shifts: NDArray[np.unsignedinteger], bits: int) -> NDArray[np.integer]:
    """Fields of every value, in order: [blocks, values * fields]."""
    return (values[..., None] >> shifts & values.dtype.type(2**bits - 1)).reshape(len(values), -1)


def _iq2_xxs(blocks: Bytes) -> Codes:
    pairs = _words(blocks, 2, 64, "<u4").reshape(len(blocks), 8, 2)
    signs = pairs[..., 1]
    vectors = np.ascontiguousarray(pairs[..., 0]).view(np.uint8)
    codes = _signed("IQ2_XXS", vectors, _even_signs(_split(signs, _SEVENS, 7)))
    return Codes(codes, _scales(blocks), parts=_odd(signs >> 28))


def _iq2_xs(blocks: Bytes) -> Codes:
    words = _words(blocks, 2, 64, "<u2")
    codes = _signed("IQ2_XS", words & 511, _even_signs(words >> 9))
    return Codes(codes, _scales(blocks), parts=_odd(_split(blocks[:, 66:74], _NIBBLES, 4)))


def _iq2_s(blocks: Bytes) -> Codes:
    high = _split(blocks[:, 66:74], _PAIRS, 2).astype(np.uint16)
    codes = _signed("IQ2_S", blocks[:, 2:34] | high << 8, blocks[:, 34:66])
    return Codes(codes, _scales(blocks), parts=_odd(_split(blocks[:, 74:82], _NIBBLES, 4)))


def _iq3_xxs(blocks: Bytes) -> Codes:
    signs = _words(blocks, 66, 32, "<u4")
    codes = _signed("IQ3_XXS", blocks[:, 2:66], _even_signs(_split(signs, _SEVENS, 7)))
    return Codes(codes, _scales(blocks), parts=_odd(signs >> 28))


def _iq3_s(blocks: Bytes) -> Codes:
    high = np.unpackbits(blocks[:, 66:74], axis=1, bitorder="little").astype(np.uint16)
    codes = _signed("IQ3_S", blocks[:, 2:66] | high << 8, blocks[:, 74:106])
    return Codes(codes, _scales(blocks), parts=_odd(_split(blocks[:, 106:110], _NIBBLES, 4)))


def _shifted(low: Bytes, high: NDArray[np.integer], below: NDArray[np.bool_]) -> Bytes:
    """IQ1's codes [blocks, 256] of vectors' numbers (low bytes, high bits) from which 1/8 is taken, or else added."""
    vectors = _ternary_table()[low | high.astype(np.uint16) << 8]
    above = np.repeat(~below.reshape(len(low), -1), vectors[0].size // below[0].size, axis=1)
    return (2 * vectors.reshape(len(low), -1) + above).astype(np.uint8)


def _iq1_s(blocks: Bytes) -> Codes:
    words = _words(blocks, 34, 16, "<u2")
    codes = _shifted(blocks[:, 2:34], _split(words, _THREES, 3), words >= 0x8000)
    return Codes(codes, _scales(blocks), parts=_odd(words >> 12 & 7))


def _iq1_m(blocks: Bytes) -> Codes:
    words = _words(blocks, 48, 8, "<u2")
    scale = (words & 0xF000) >> np.array([12, 8, 4, 0], np.uint16)
    high = _split(blocks[:, 32:48], _NIBBLES, 4)
    codes = _shifted(blocks[:, :32], high & 7, high >= 8)
    scales = np.bitwise_or.reduce(scale, axis=1, keepdims=True).astype("<u2").view("<f2")
    return Codes(codes, scales, parts=_odd(_split(words, _THREES, 3)))


def _ternary(codes: NDArray[np.integer], scales: NDArray[np.float16]) -> Codes:
    return Codes(codes.astype(np.uint8), scales, zeros=np.ones_like(scales, np.uint8))


def _tq1_0(blocks: Bytes) -> Codes:
    """Five digits to the byte, the highest first; a byte holds ceil(number * 256 / 243)."""
    runs = [(0, 32, 5), (32, 16, 5), (48, 4, 4)]
    digits = [
        (blocks[:, None, at : at + size] * np.array([1, 3, 9, 27, 81][:count], np.uint8)[:, None]).reshape(
            len(blocks), -1
        )
        for at, size, count in runs
    ]
    codes = np.concatenate(digits, axis=1).astype(np.uint16) * np.uint16(3) >> 8
    return _ternary(codes, _scales(blocks, 52))


def _tq2_0(blocks: Bytes) -> Codes:
    runs = blocks[:, :64].reshape(len(blocks), 2, 1, 32)
    return _ternary((runs >> _PAIRS[:, None] & 3).reshape(len(blocks), -1), _scales(blocks, 64))


DECODERS = {
    "IQ3_XXS": Vectors("IQ3_XXS", 0, -2, _iq3_xxs),
    "IQ3_S": Vectors("IQ3_S", 0, 0, _iq3_s),
    "IQ2_XXS": Vectors("IQ2_32", 0, -3, _iq2_xxs),
    "IQ2_XS": Vectors("IQ2_16", 0, -3, _iq2_xs),
    "IQ2_S": Vectors("IQ2_16", 0, -3, _iq2_s),
    "IQ1_S": Vectors("IQ1_32", 0, -3, _iq1_s),
    "IQ1_M": Vectors("IQ1_16", 0, -3, _iq1_m),
    "TQ1_0": Vectors("INT2", _SUPERBLOCK, 0, _tq1_0),
    "TQ2_0": Vectors("INT2", _SUPERBLOCK, 0, _tq2_0),
}
