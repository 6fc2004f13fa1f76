"""GGUF tensors to the tiles that `kernels.tile` multiplies, bit for bit the same weights at the same size.

A tile is 16 rows, a cell 32 columns of it. Within a cell the rows are the lanes of a vector: 16 float16 scales (and for
Q4_1 minimums), then byte vectors of 16 rows x 4 columns. Two nibble vectors share bytes, as in GGUF, columns j and
j + 16. Q8_0's weights get 128 added, so that they are unsigned; Q6_K's cell holds its scales per 16 columns and splits
the six bits into nibbles and pairs.

GGUF block layouts: ggml-common.h of llama.cpp (block_q4_0, block_q4_1, block_q8_0, block_q6_K).
"""

from collections.abc import Callable

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from prolepsis.kernels.llvm import LANES
from prolepsis.kernels.tile import CELL, CELL_BYTES, KINDS

_CHUNK = 1 << 22  # weights rearranged at a time, so that temporaries stay small
_SUPERBLOCK = 256  # columns of a Q6_K block

Bytes = NDArray[np.uint8]


def packed_bytes(type_name: str, rows: int, columns: int) -> int:
    """Size of a packed matrix; its rows are padded to a multiple of 16."""
    return -(-rows // LANES) * (columns // CELL) * CELL_BYTES[KINDS[type_name]]


def pack(type_name: str, raw: Bytes, rows: int, columns: int, order: NDArray[np.intp] | None, out: Bytes) -> None:
    """Rearrange `rows` x `columns` weights of GGUF bytes `raw` into `out` uint8[packed_bytes].

    `order`, if given, picks the rows: packed row i is GGUF row order[i]. `columns` is a multiple of 32 (and of 256 for
    Q6_K, which GGUF grants).
    """
    per_block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
    source = raw.reshape(rows, columns // per_block * block_bytes)
    cells = columns // CELL
    target = out.reshape(-1, cells, CELL_BYTES[KINDS[type_name]])
    step = max(1, _CHUNK // (columns * LANES))
    for tile in range(0, len(target), step):
        part = slice(tile * LANES, min((tile + step) * LANES, rows))
        block = source[part] if order is None else source[order[part]]
        block = _padded(block)
        _PACKERS[type_name](block.reshape(-1, LANES, block.shape[1]), target[tile : tile + step])


def _padded(block: Bytes) -> Bytes:
    missing = -len(block) % LANES
    return block if not missing else np.concatenate([block, np.zeros((missing, block.shape[1]), np.uint8)])


def _lanes(values: NDArray[np.generic], target: Bytes) -> None:
    """Write values [tiles, 16, cells, n] as [tiles, cells, n, 16] into the bytes of target."""
    moved = np.ascontiguousarray(values.transpose(0, 2, 3, 1))
    target[...] = moved.view(np.uint8).reshape(target.shape)


def _halves(block: Bytes, at: int) -> NDArray[np.uint16]:
    return np.ascontiguousarray(block[..., at : at + 2]).view(np.uint16)


def _quads(values: NDArray[np.integer]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values).view(np.uint32)


def _pack_q4_0(block: Bytes, target: Bytes) -> None:
    blocks = block.reshape(*block.shape[:2], -1, 18)
    _lanes(_halves(blocks, 0), target[..., :32])
    _lanes(_quads(blocks[..., 2:]), target[..., 32:])


def _pack_q4_1(block: Bytes, target: Bytes) -> None:
    blocks = block.reshape(*block.shape[:2], -1, 20)
    _lanes(_halves(blocks, 0), target[..., :32])
    _lanes(_halves(blocks, 2), target[..., 32:64])
    _lanes(_quads(blocks[..., 4:]), target[..., 64:])


def _pack_q8_0(block: Bytes, target: Bytes) -> None:
    blocks = block.reshape(*block.shape[:2], -1, 34)
    _lanes(_halves(blocks, 0), target[..., :32])
    _lanes(_quads(blocks[..., 2:] ^ 0x80), target[..., 32:])


def _pack_q6_k(block: Bytes, target: Bytes) -> None:
    tiles, lanes = block.shape[:2]
    blocks = block.reshape(tiles, lanes, -1, 210)
    # Each half of a superblock: 64 bytes of low nibbles and 32 of bit pairs hold four runs of 32 columns.
    low = blocks[..., :128].reshape(tiles, lanes, -1, 2, 2, 32)
    nibbles = np.stack([low & 15, low >> 4], axis=-3).reshape(tiles, lanes, -1, CELL)
    high = blocks[..., 128:192].reshape(tiles, lanes, -1, 2, 1, 32)
    pairs = (high >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & np.uint8(3)).reshape(tiles, lanes, -1, CELL)
    per_block = _SUPERBLOCK // CELL
    scale = np.repeat(_halves(blocks, 208), per_block, axis=2)
    _lanes(scale, target[..., :32])
    _lanes(blocks[..., 192:208].reshape(tiles, lanes, -1, 2), target[..., 32:64])
    _lanes(_quads(nibbles[..., :16] | nibbles[..., 16:] << 4), target[..., 64:320])
    # Byte i of half h carries the pairs of columns 16 h + i, + 4, + 8 and + 12.
    quads = pairs.reshape(*pairs.shape[:3], 2, 4, 4)
    planes = quads[..., 0, :] | quads[..., 1, :] << 2 | quads[..., 2, :] << 4 | quads[..., 3, :] << 6
    _lanes(_quads(planes.reshape(*pairs.shape[:3], 8)), target[..., 320:])


def _pack_words(word: type[np.unsignedinteger]) -> Callable[[Bytes, Bytes], None]:
    def pack_floats(block: Bytes, target: Bytes) -> None:
        values = np.ascontiguousarray(block).view(word)
        _lanes(values.reshape(*values.shape[:2], -1, CELL), target)

    return pack_floats


_PACKERS = {
    "Q4_0": _pack_q4_0,
    "Q4_1": _pack_q4_1,
    "Q8_0": _pack_q8_0,
    "Q6_K": _pack_q6_k,
    "F16": _pack_words(np.uint16),
    "BF16": _pack_words(np.uint16),
    "F32": _pack_words(np.uint32),
}
