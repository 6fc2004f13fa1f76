"""Packed tiles hold the very numbers that `quant.matrix` says a matrix stands for, row by row."""

import numpy as np
import pytest
from weight_cases import (
    HALF_FIELDS,
    gguf_values,
    pack_weights,
    random_blocks,
    random_forms,
    random_matrix,
    side_by_side,
)

from prolepsis.kernels.kinds import KINDS
from prolepsis.quant.matrices import NaturalFloats, kept, packed, unpacked
from prolepsis.quant.matrix import Form, HeldMatrix, whole
from prolepsis.quant.packing import packed_bytes

pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")


def same_bits(left, right):
    """Equal as patterns, but for the sign of zero and the payload of a NaN, which the formats do not promise."""
    left, right = left.astype(np.float32), right.astype(np.float32)
    return np.array_equal(left, right, equal_nan=True)


def widths(name):
    return (256, 768) if KINDS[name].group == 256 else (32, 96, 544)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_rows_come_back_exactly(name, rows):
    rng = np.random.default_rng(rows)
    for columns in widths(name):
        matrix = random_matrix(name, rows, columns, rng)
        back = unpacked(side_by_side([matrix]), 0)
        assert same_bits(back[:rows], whole(matrix))
        assert not back[rows:].any()


@pytest.mark.parametrize("name", [name for name, kind in KINDS.items() if not kind.group])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 320, 1024])
def test_every_size_of_groups(name, group):
    """The last is shorter, and may be the only one."""
    matrix = random_matrix(name, 20, 320, np.random.default_rng(group), group)
    assert same_bits(unpacked(side_by_side([matrix]), 0)[:20], whole(matrix))


def test_exponents():
    rng = np.random.default_rng(0)
    for exponent in (-40, -1, 3, 100):
        matrix = random_forms([Form("INT4", 96, 32, exponent), Form("MXFP4", 64, 0, exponent)], 5, rng)
        assert same_bits(unpacked(side_by_side([matrix]), 0)[:5], whole(matrix))


@pytest.mark.parametrize("name", KINDS)
def test_rows_in_another_order(name):
    rng = np.random.default_rng(1)
    matrix, order = random_matrix(name, 21, 256, rng), rng.permutation(21)
    assert same_bits(unpacked(side_by_side([matrix], [order]), 0)[:21], whole(matrix)[order])


def several_forms(rng, order=None):
    return random_forms([Form("INT6", 64, 64), Form("INT4", 160, 96), Form("INT2", 32, 32)], 40, rng, order=order)


def test_forms_and_orders_beside_others():
    rng = np.random.default_rng(2)
    first, second = rng.permutation(256).astype(np.int32), rng.permutation(256).astype(np.int32)
    matrices = [random_matrix(name, 16 * i + 3, 256, rng) for i, name in enumerate(KINDS)]
    matrices += [several_forms(rng, first), several_forms(rng), several_forms(rng, second), several_forms(rng, first)]
    weights = side_by_side(matrices)
    for i, matrix in enumerate(matrices):
        assert same_bits(unpacked(weights, i)[: matrix.shape[0]], whole(matrix))
    assert len(weights.orders) == 512, "each order is kept once"


def test_natural_floats_are_the_same_numbers():
    matrix = several_forms(np.random.default_rng(3), np.random.default_rng(4).permutation(256).astype(np.int32))
    weights = side_by_side([NaturalFloats(matrix)])
    assert same_bits(unpacked(weights, 0)[:40], whole(matrix))
    assert not len(weights.orders)


def test_what_is_kept_is_packed_as_it_was():
    rng = np.random.default_rng(5)
    ordered = several_forms(rng, rng.permutation(256).astype(np.int32))
    weights = side_by_side([random_matrix("Q4_K", 40, 512, rng), ordered])
    again = packed([kept(weights, 0), kept(weights, 1)])
    assert all(np.array_equal(left, right) for left, right in zip(weights, again, strict=True))


@pytest.mark.parametrize("type_name", HALF_FIELDS)
def test_every_half_pattern_as_a_scale(type_name):
    """Subnormal, zero, infinite and NaN scales mean what the gguf package says they mean."""
    columns = 256 if type_name == "Q6_K" else 32
    patterns = np.arange(0, 1 << 16, 7).astype(np.uint16)
    raw = random_blocks(type_name, len(patterns), columns, np.random.default_rng(3))
    at = HALF_FIELDS[type_name][0]
    raw[:, at : at + 2] = patterns[:, None].view(np.uint8)
    assert same_bits(unpacked(pack_weights([(type_name, raw)]), 0)[: len(raw)], gguf_values(type_name, raw))


@pytest.mark.parametrize("name", ["F16", "BF16"])
def test_every_16_bit_pattern_as_a_weight(name):
    words = np.arange(1 << 16).astype(np.uint16).reshape(64, -1)
    matrix = HeldMatrix((64, 1024), (Form(name, 1024),), (words,))
    assert same_bits(unpacked(side_by_side([matrix]), 0), whole(matrix))


@pytest.mark.parametrize("type_name", ["Q4_0", "Q4_1", "Q8_0", "Q6_K", "F16", "F32"])
def test_size_is_that_of_the_file_and_padding(type_name):
    """Packing costs nothing but rows up to a multiple of 16."""
    raw = random_blocks(type_name, 16, 256, np.random.default_rng(4))
    form = Form(type_name, 256)
    assert packed_bytes(form, 16) == raw.size
    assert packed_bytes(form, 17) == 2 * packed_bytes(form, 16)
