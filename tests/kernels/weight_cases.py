"""Random weight matrices in GGUF's own block formats, for tests of the packing and of the products."""

import gguf
import numpy as np
from numba import njit

from prolepsis.kernels.cells import CELL, PLANES, RECORD
from prolepsis.kernels.products import need
from prolepsis.kernels.qmatmul import KIND, NATURAL, ROWS, Activations, count_tiles, multiply_tiles, quantise
from prolepsis.quant.gguf_types import matrix_of
from prolepsis.quant.matrices import Placed, packed

# Byte offsets of the float16 fields of a block: the scale and, for Q4_1, the minimum.
HALF_FIELDS = {"Q4_0": (0,), "Q4_1": (0, 2), "Q8_0": (0,), "Q6_K": (208,)}


def random_blocks(type_name, rows, columns, rng, scale=0.01):
    """GGUF bytes uint8 [rows, bytes] of a random matrix; float16 fields are normal numbers around `scale`."""
    if type_name in HALF_FIELDS:
        per_block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[type_name]]
        blocks = rng.integers(0, 256, (rows, columns // per_block, size), dtype=np.uint8)
        for at in HALF_FIELDS[type_name]:
            halves = (rng.standard_normal(blocks.shape[:2]) * scale).astype(np.float16)
            blocks[..., at : at + 2] = halves[..., None].view(np.uint8)
        return blocks.reshape(rows, -1)
    values = (rng.standard_normal((rows, columns)) * 10 * scale).astype(np.float32)
    return gguf.quants.quantize(values, gguf.GGMLQuantizationType[type_name]).view(np.uint8).reshape(rows, -1)


def dequantised(type_name, raw):
    """The matrix by the gguf package, float64 [rows, columns]."""
    if type_name in ("F16", "F32"):
        return raw.view(np.float16 if type_name == "F16" else np.float32).astype(np.float64)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]).astype(np.float64)


def magnitudes(type_name, raw):
    """|w| as the kernels add it up: for Q4_1 the |step * q| + |minimum| of each weight, which may cancel in w."""
    weights = dequantised(type_name, raw)
    if type_name != "Q4_1":
        return np.abs(weights)
    minimum = raw.reshape(len(raw), -1, 20)[..., 2:4].copy().view(np.float16).astype(np.float64)
    minimum = np.repeat(minimum[..., 0], 32, axis=1)
    return np.abs(weights - minimum) + np.abs(minimum)


def pack_weights(matrices, orders=None):
    """`Weights` of [(type name, GGUF bytes)], side by side in the output; orders: of the rows of each."""
    shapes = [dequantised(*one).shape for one in matrices]
    read = [matrix_of("a matrix", name, shape, raw) for (name, raw), shape in zip(matrices, shapes, strict=True)]
    return side_by_side(read, orders)


def side_by_side(matrices, orders=None):
    """`Weights` of matrices, one beside the other in the output."""
    placed, column = [], 0
    for i, matrix in enumerate(matrices):
        placed.append(Placed(matrix, column, orders[i] if orders else None))
        column += -(-matrix.shape[0] // 16) * 16
    return packed(placed)


def multiplied(weights, first, count, held, rows, in_bytes=False, order=NATURAL):
    """Product of `count` matrices with rows of `activations`, which it quantises: float32 [rows, columns]."""
    need(weights.matrices[:, KIND], in_bytes)
    columns = len(held.x) // rows
    for row in range(rows):
        quantise(held, row, columns, in_bytes, weights.orders, order)
    stride = int(weights.matrices[first : first + count, ROWS].sum())
    out = np.full((rows, stride), np.nan, np.float32)
    tiles = count_tiles(weights, first, count)
    cut = tiles // 2  # in two shares, as two threads would
    for begin, share in ((0, cut), (cut, tiles - cut)):
        _multiply(weights, first, count, begin, share, held, rows, out.reshape(-1), stride, in_bytes)
    return out


@njit(cache=True)
def _multiply(weights, first, count, begin, share, held, rows, out, stride, in_bytes):
    multiply_tiles(weights, first, count, begin, share, held, rows, out, stride, in_bytes)


def activations(x):
    """Room for the rows of x float32 [rows, columns], with x filled in."""
    return Activations(
        np.ascontiguousarray(x, np.float32).reshape(-1).copy(),
        np.zeros(PLANES * x.size, np.int8),
        np.zeros(x.size // CELL * RECORD, np.int32),
    )


def joined(quants):
    """The 16-bit quants of int8 planes, int32 [cells, 32]."""
    planes = quants.reshape(-1, PLANES, CELL).astype(np.int32)
    return 256 * planes[:, 0] + planes[:, 1]
