"""Packed tiles hold the very weights the gguf package dequantises, row by row."""

import numpy as np
import pytest
from weight_cases import HALF_FIELDS, dequantised, pack_weights, random_blocks

from prolepsis.kernels.unpacking import unpack_row
from prolepsis.quant.matrix import Form
from prolepsis.quant.packing import packed_bytes

KINDS = ("Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "BF16", "F32")

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

WIDTHS = {name: (256, 768) if name == "Q6_K" else (32, 96, 576) for name in KINDS}


def unpacked(weights, matrix, rows, columns):
    """Rows 0 .. rows of a packed matrix, float32."""
    out = np.full((rows, columns), np.nan, np.float32)
    for row in range(rows):
        unpack_row(weights, matrix, row, out.reshape(-1), row * columns)
    return out


def same_bits(left, right):
    """Equal as patterns, but for the sign of zero and the payload of a NaN, which the formats do not promise."""
    left, right = left.astype(np.float32), right.astype(np.float32)
    return np.array_equal(left, right, equal_nan=True)


@pytest.mark.parametrize("type_name", KINDS)
@pytest.mark.parametrize("rows", [1, 15, 16, 17, 50])
def test_rows_come_back_exactly(type_name, rows):
    rng = np.random.default_rng(rows)
    for columns in WIDTHS[type_name]:
        raw = random_blocks(type_name, rows, columns, rng)
        assert same_bits(unpacked(pack_weights([(type_name, raw)]), 0, rows, columns), dequantised(type_name, raw))


@pytest.mark.parametrize("type_name", KINDS)
def test_row_order_and_padding(type_name):
    rng = np.random.default_rng(1)
    columns = WIDTHS[type_name][-1]
    raw = random_blocks(type_name, 21, columns, rng)
    order = rng.permutation(21)
    weights = pack_weights([(type_name, raw)], [order])
    back = unpacked(weights, 0, 32, columns)
    assert same_bits(back[:21], dequantised(type_name, raw)[order])
    assert not back[21:].any()


def test_matrices_side_by_side_keep_to_their_own_bytes():
    rng = np.random.default_rng(2)
    matrices = [(name, random_blocks(name, 16 * i + 3, 256, rng)) for i, name in enumerate(KINDS)]
    weights = pack_weights(matrices)
    for i, (name, raw) in enumerate(matrices):
        assert same_bits(unpacked(weights, i, len(raw), 256), dequantised(name, raw))


@pytest.mark.parametrize("type_name", HALF_FIELDS)
def test_every_half_pattern_as_a_scale(type_name):
    """Subnormal, zero, infinite and NaN scales mean what the gguf package says they mean."""
    rng = np.random.default_rng(3)
    columns = 256 if type_name == "Q6_K" else 32
    patterns = np.arange(0, 1 << 16, 7).astype(np.uint16)
    raw = random_blocks(type_name, len(patterns), columns, rng)
    at = HALF_FIELDS[type_name][0]
    raw[:, at : at + 2] = patterns[:, None].view(np.uint8)
    assert same_bits(unpacked(pack_weights([(type_name, raw)]), 0, len(raw), columns), dequantised(type_name, raw))


@pytest.mark.parametrize("type_name", ["F16", "BF16"])
def test_every_16_bit_pattern_as_a_weight(type_name):
    raw = np.arange(1 << 16).astype(np.uint16).view(np.uint8).reshape(64, -1)
    assert same_bits(unpacked(pack_weights([(type_name, raw)]), 0, 64, 1024), dequantised(type_name, raw))


@pytest.mark.parametrize("type_name", KINDS)
def test_size_is_that_of_the_file_and_padding(type_name):
    """Packing costs nothing but rows up to a multiple of 16."""
    raw = random_blocks(type_name, 16, 256, np.random.default_rng(4))
    form = Form(type_name, 256)
    assert packed_bytes(form, 16) == raw.size
    assert packed_bytes(form, 17) == 2 * packed_bytes(form, 16)
