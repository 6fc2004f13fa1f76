"""Random weight matrices in GGUF's own block formats, for tests of the packing and of the products."""

import gguf
import numpy as np

from prolepsis.kernels.qmatmul import Activations, Weights
from prolepsis.kernels.tile import CELL, CELL_BYTES, KINDS, PLANES, RECORD
from prolepsis.quant.packing import pack, packed_bytes

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
    """`Weights` of [(type name, GGUF bytes)], side by side in the output."""
    table, packed, offset, column = [], [], 0, 0
    for i, (type_name, raw) in enumerate(matrices):
        rows, columns = dequantised(type_name, raw).shape
        out = np.empty(packed_bytes(type_name, rows, columns), np.uint8)
        pack(type_name, raw, rows, columns, orders[i] if orders else None, out)
        padded = -(-rows // 16) * 16
        tile_bytes = columns // CELL * CELL_BYTES[KINDS[type_name]]
        table.append((KINDS[type_name], offset, tile_bytes, columns, padded, column))
        packed.append(out)
        offset += out.size
        column += padded
    return Weights(np.concatenate(packed), np.array(table, np.int64))


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
