"""Random weight matrices of every kind, for tests of the packing and of the products."""

import gguf
import numpy as np
from numba import njit

from prolepsis.kernels.cells import CELL, PLANES, RECORD
from prolepsis.kernels.kinds import KINDS
from prolepsis.kernels.products import need
from prolepsis.kernels.qmatmul import KIND, NATURAL, ROWS, Activations, count_tiles, multiply_tiles, quantise
from prolepsis.quant.gguf_types import matrix_of
from prolepsis.quant.matrices import Placed, packed
from prolepsis.quant.matrix import Codes, Form, HeldMatrix, dequantised

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


def gguf_values(type_name, raw):
    """The matrix by the gguf package, float64 [rows, columns]."""
    if type_name in ("F16", "F32"):
        return raw.view(np.float16 if type_name == "F16" else np.float32).astype(np.float64)
    return gguf.quants.dequantize(raw, gguf.GGMLQuantizationType[type_name]).astype(np.float64)


def random_matrix(name, rows, columns, rng, group=0, scale=0.01, order=None):
    """A matrix of one kind. group: of a kind that leaves it free, by default 96 columns."""
    return random_forms([Form(name, columns, group or 96)], rows, rng, scale, order)


def random_forms(forms, rows, rng, scale=0.01, order=None):
    """A matrix of several forms; what a kind fixes itself is left out of them."""
    forms = tuple(form._replace(group=0) if KINDS[form.kind].group else form for form in forms)
    shape = rows, sum(form.columns for form in forms)
    return HeldMatrix(shape, forms, tuple(_random_part(form, rows, rng, scale) for form in forms), order)


def _is_float(form):
    return KINDS[form.kind].group == 1


def _random_part(form, rows, rng, scale):
    kind, columns = KINDS[form.kind], form.columns
    if _is_float(form):
        values = (rng.standard_normal((rows, columns)) * 10 * scale).astype(np.float32)
        if kind.brain:
            return (values.view(np.uint32) >> 16).astype(np.uint16)
        return values.astype(np.float16).view(np.uint16) if kind.bits == 16 else values.view(np.uint32)
    groups = -(-columns // (kind.group or form.group))
    parts = columns // kind.part if kind.part else 0

    def halves():
        return (rng.standard_normal((rows, groups)) * scale).astype(np.float16)

    return Codes(
        codes=rng.integers(0, len(kind.book) or 1 << kind.bits, (rows, columns), dtype=np.uint8),
        scales=halves(),
        minimums=halves() if kind.minimums else None,
        zeros=None if kind.group else rng.integers(0, (1 << kind.bits) + 1, (rows, groups)).astype(np.uint8),
        parts=rng.integers(-128, 128, (rows, parts), dtype=np.int8) if parts else None,
        part_minimums=rng.integers(0, 256, (rows, parts), dtype=np.uint8) if parts and kind.minimums else None,
    )


def magnitudes(matrix):
    """|w| as the kernels add it up: |step * value| + |minimum| of each weight, which may cancel in w. float64."""
    sizes = []
    for form, part in zip(matrix.forms, matrix.parts, strict=True):
        sizes.append(np.abs(dequantised(form, part)).astype(np.float64))
        if isinstance(part, Codes) and part.minimums is not None:
            only = dequantised(form, part._replace(codes=np.zeros_like(part.codes)))
            product = part._replace(minimums=np.zeros_like(part.minimums))
            sizes[-1] = np.abs(only.astype(np.float64)) + np.abs(dequantised(form, product))
    held = np.concatenate(sizes, axis=1)
    if matrix.order is None:
        return held
    out = np.empty_like(held)
    out[:, matrix.order] = held
    return out


def pack_weights(matrices, orders=None):
    """`Weights` of [(type name, GGUF bytes)], side by side in the output; orders: of the rows of each."""
    shapes = [gguf_values(*one).shape for one in matrices]
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
