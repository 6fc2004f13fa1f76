"""Packed codes of checkpoints, both ways, and against decoders written out one code at a time."""

import numpy as np
import pytest
from checkpoints import pack_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.errors import ModelFileError
from prolepsis.quant import awq_layout, compressed_tensors, gptq_layout
from prolepsis.quant.exl2_layout import Exl2Matrix, pack_exl2
from prolepsis.quant.gptq_layout import GptqTensors, gptq_matrix, pack_gptq, unpack_zeros
from prolepsis.quant.grouped_matrix import group_size
from prolepsis.quant.half import half_scales
from prolepsis.quant.matrix import dequantised

SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(max_examples=25, deadline=None)


def bits_of(words, start, bits):
    """A code that begins at bit `start` of words taken as one number, the lowest first."""
    number = sum(int(word) << 32 * i for i, word in enumerate(words.view(np.uint32).tolist()))
    return number >> start & (1 << bits) - 1


def values(matrix, rows=None):
    """float32 [rows, columns], the columns as the file has them."""
    rows = np.arange(matrix.shape[0]) if rows is None else rows
    parts = [dequantised(form, part) for form, part in zip(matrix.forms, matrix.read(rows), strict=True)]
    sorted_values = np.concatenate(parts, axis=1)
    if matrix.order is None:
        return sorted_values
    out = np.empty_like(sorted_values)
    out[:, matrix.order] = sorted_values
    return out


def random_codes(rng, bits, *shape):
    return rng.integers(0, 1 << bits, shape).astype(np.uint8)


@FEW
@given(SEEDS, st.sampled_from([2, 3, 4, 8]), st.sampled_from([1, 2]), st.booleans())
def test_gptq(seed, bits, version, shuffled):
    rng = np.random.default_rng(seed)
    rows, columns, group = 32 * int(rng.integers(1, 3)), 32 * int(rng.integers(1, 6)), 32 * int(rng.integers(1, 4))
    groups = -(-columns // group)
    codes, zeros = random_codes(rng, bits, rows, columns), random_codes(rng, bits, rows, groups)
    scales = rng.uniform(-0.1, 0.1, (groups, rows)).astype(np.float16)
    g_idx = (np.arange(columns) // group).astype(np.int32)
    if shuffled:
        rng.shuffle(g_idx)
    qweight, qzeros = pack_gptq(codes, zeros, bits, version)
    matrix = gptq_matrix("t", GptqTensors(qweight, qzeros, scales, g_idx), columns, group, version)
    some = rng.permutation(rows)[:7]
    row = int(some[0])
    for column in rng.integers(0, columns, 8).tolist():
        assert bits_of(qweight[:, row], column * bits, bits) == codes[row, column]
    expected = scales.T.astype(np.float32)[:, g_idx] * (codes.astype(np.float32) - zeros[:, g_idx])
    np.testing.assert_array_equal(values(matrix, some), expected[some])


@FEW
@given(SEEDS, st.sampled_from([2, 3, 4, 8]))
def test_version_1_stores_one_less_than_any_zero_point_but_zero(seed, bits):
    rng = np.random.default_rng(seed)
    zeros = np.maximum(random_codes(rng, bits, 64, 3), 1)
    _, stored = pack_gptq(np.zeros((64, 32), np.uint8), zeros, bits, 1)
    np.testing.assert_array_equal(unpack_zeros(stored.view(np.uint32), np.arange(64), bits, 2), zeros.T - 1)


@FEW
@given(SEEDS, st.booleans())
def test_awq(seed, with_zeros):
    rng = np.random.default_rng(seed)
    rows, columns, groups = 8 * int(rng.integers(1, 5)), 64 * int(rng.integers(1, 4)), 2
    codes, zeros = random_codes(rng, 4, rows, columns), random_codes(rng, 4, rows, groups)
    scales = rng.uniform(0, 1, (groups, rows)).astype(np.float32)
    qweight = awq_layout.pack_awq(codes)
    qzeros = awq_layout.pack_awq(zeros) if with_zeros else None
    matrix = awq_layout.awq_matrix("t", qweight, qzeros, scales, columns // groups)
    for row in rng.integers(0, rows, 8).tolist():
        # AutoAWQ: output ORDER[i] of eight is at bits 4 i.
        at = [0, 2, 4, 6, 1, 3, 5, 7].index(row % 8)
        assert bits_of(qweight[3, row // 8 : row // 8 + 1], 4 * at, 4) == codes[row, 3]
    subtracted = np.repeat(zeros if with_zeros else np.full_like(zeros, 8), columns // groups, axis=1)
    expected = np.repeat(scales.T, columns // groups, axis=1) * (codes.astype(np.float32) - subtracted)
    np.testing.assert_allclose(values(matrix), expected, rtol=2**-11)


@FEW
@given(SEEDS, st.sampled_from([2, 3, 4, 5, 6, 8]), st.sampled_from([None, np.int8, np.int32]), st.booleans())
def test_compressed_tensors(seed, bits, zeros_type, shuffled):
    rng = np.random.default_rng(seed)
    rows, columns, groups = int(rng.integers(1, 20)), 64 * int(rng.integers(1, 4)), 2
    codes, zeros = random_codes(rng, bits, rows, columns), random_codes(rng, bits, rows, groups)
    scales = rng.uniform(0, 1, (rows, groups)).astype(np.float16)
    packed = pack_rows(codes, bits)
    g_idx = np.repeat(np.arange(groups, dtype=np.int32), columns // groups)
    if shuffled:
        rng.shuffle(g_idx)
    points = None
    if zeros_type is np.int8:
        points = (zeros.astype(np.int16) - (1 << bits - 1)).astype(np.int8)
    elif zeros_type is np.int32:
        points = np.ascontiguousarray(pack_rows(np.ascontiguousarray(zeros.T), bits).T)
    matrix = compressed_tensors.packed_matrix("t", packed, bits, columns, scales, points, g_idx, columns // groups)
    for column in rng.integers(0, columns, 8).tolist():
        assert bits_of(packed[0], column * bits, bits) == codes[0, column]
    subtracted = (zeros if zeros_type else np.full_like(zeros, 1 << bits - 1))[:, g_idx]
    expected = scales.astype(np.float32)[:, g_idx] * (codes.astype(np.float32) - subtracted)
    np.testing.assert_array_equal(values(matrix), expected)


@FEW
@given(SEEDS, st.sampled_from([3, 5, 6]))
def test_compressed_tensors_as_older_versions_pack_them(seed, bits):
    codes = random_codes(np.random.default_rng(seed), bits, 3, 64)
    per_word = 32 // bits
    packed = np.zeros((3, -(-64 // per_word)), np.uint32)
    for column in range(64):
        packed[:, column // per_word] |= codes[:, column].astype(np.uint32) << np.uint32(column % per_word * bits)
    np.testing.assert_array_equal(compressed_tensors.unpack_rows(packed.view(np.int32), bits, 64), codes)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), (3,), (2, 3)])
@pytest.mark.parametrize("kind", [np.int8, np.int32])
def test_zero_points_of_another_shape_are_told(shape, kind):
    packed, scales = np.zeros((8, 8), np.int32), np.ones((8, 2), np.float16)
    with pytest.raises(ModelFileError, match="layer: weight_zero_point has shape"):
        compressed_tensors.packed_matrix("layer", packed, 4, 64, scales, np.zeros(shape, kind), None, 32)


@pytest.mark.parametrize("scales", [(8, 1), (8,), (1,), (8, 2)])
def test_int8_weights(scales):
    rng = np.random.default_rng(3)
    weight = rng.integers(-128, 128, (8, 64)).astype(np.int8)
    steps = rng.uniform(0, 1, scales).astype(np.float16)
    matrix = compressed_tensors.int8_matrix("t", weight, steps, None, None)
    spread = np.broadcast_to(steps.reshape(-1, steps.shape[-1] if steps.ndim == 2 else 1), (8, scales[-1] % 8 or 1))
    expected = np.repeat(spread.astype(np.float32), 64 // spread.shape[1], axis=1) * weight.astype(np.float32)
    np.testing.assert_array_equal(values(matrix), expected)


@FEW
@given(SEEDS)
def test_exl2(seed):
    rng = np.random.default_rng(seed)
    groups = sorted(((int(b), 32 * int(n)) for b, n in rng.choice([2, 3, 4, 5, 6, 8], (6, 2)) // (1, 2)), reverse=True)
    rows, columns = 8 * int(rng.integers(1, 4)), sum(size for _, size in groups)
    codes = np.concatenate([random_codes(rng, bits, rows, size) for bits, size in groups], axis=1)
    scale_codes, most = random_codes(rng, 4, rows, len(groups)), rng.uniform(0.1, 1, len(groups)).astype(np.float16)
    order = rng.permutation(columns).astype(np.int32)
    tensors = pack_exl2(codes, groups, scale_codes, most, order)
    matrix = Exl2Matrix("t", tensors, columns)
    assert len(matrix.forms) <= len(groups)
    expected, start, word = np.empty((rows, columns), np.float32), 0, 0
    for index, (bits, size) in enumerate(groups):
        for at in rng.integers(0, size, 4).tolist():
            assert bits_of(tensors.q_weight[word:, 1], at * bits, bits) == codes[1, start + at]
        scale = (scale_codes[:, index].astype(np.float32) + 1) ** 2 * float(most[index]) / 256
        span = codes[:, start : start + size].astype(np.float32) - (1 << bits - 1)
        expected[:, order[start : start + size]] = scale[:, None] * span
        start, word = start + size, word + size * bits // 32
    np.testing.assert_allclose(values(matrix), expected, rtol=2**-11)


@given(st.lists(st.integers(-120, 100), min_size=1, max_size=9), SEEDS)
def test_scales_of_bfloat16_are_kept_exactly_within_a_wide_range(exponents, seed):
    near = [min(exponents) + (each - min(exponents)) % 28 for each in exponents if each > -80] or [0]
    mantissas = np.random.default_rng(seed).integers(128, 256, len(near)) / 128
    scales = np.ldexp(mantissas, near).astype(np.float32)
    if scales.min() > 2.0**-80:
        halves, exponent = half_scales(scales)
        np.testing.assert_array_equal(np.ldexp(halves.astype(np.float64), exponent), scales)


def gptq_tensors(**changed):
    codes, zeros = np.zeros((32, 64), np.uint8), np.ones((32, 2), np.uint8)
    qweight, qzeros = pack_gptq(codes, zeros, 4)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": np.ones((2, 32), np.float16), "g_idx": None}
    return GptqTensors(**(parts | changed))


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"g_idx": np.array([0] * 32 + [1] * 31 + [2], np.int32)}, "g_idx names group 2"),
        ({"g_idx": np.array([0] * 32 + [1] * 31 + [-1], np.int32)}, "g_idx names group -1"),
        ({"g_idx": np.array([0] * 20 + [1] * 44, np.int32)}, "does not make groups of 44"),
        ({"g_idx": np.zeros(63, np.int32)}, "g_idx has shape"),
        ({"scales": np.ones((4, 32), np.float16), "qzeros": None}, "groups of 16 of 64 columns"),
        ({"scales": np.ones((3, 32), np.float16), "qzeros": None}, "3 groups of scales do not fit"),
        ({"scales": np.ones((2, 31), np.float16)}, "scales have shape"),
        ({"scales": np.ones((), np.float16)}, r"scales have shape \(\), expected \(groups, 32\)"),
        ({"qzeros": np.ones((2, 5), np.int32)}, "qzeros have shape"),
        ({"qweight": np.zeros((9, 32), np.int32)}, "qweight of 9 words"),
    ],
)
def test_gptq_that_cannot_be_is_told(changed, said):
    with pytest.raises(ModelFileError, match=f"layer.*{said}"):
        gptq_matrix("layer", gptq_tensors(**changed), 64, 32, 1)


def test_a_scale_that_is_no_number_is_told():
    scales = np.ones((2, 32), np.float16)
    scales[1, 5] = np.nan
    matrix = gptq_matrix("layer", gptq_tensors(scales=scales), 64, 32, 1)
    with pytest.raises(ModelFileError, match=r"layer \(GPTQ, 4 bits, groups of 32\): a scale is not a finite number"):
        matrix.read(np.arange(32))


def test_symmetric_gptq_needs_no_zero_points():
    matrix = gptq_matrix("layer", gptq_tensors(qzeros=None), 64, 32, 1)
    np.testing.assert_array_equal(values(matrix), -8)


@pytest.mark.parametrize(
    ("part", "value", "said"),
    [
        ("q_invperm", np.zeros(64, np.int32), "q_invperm is not an order"),
        ("q_groups", np.array([4, 0, 7, 4], np.int16), "not pairs of bits"),
        ("q_groups", np.array([4, 0, 4, -1], np.int16), "do not divide 64 columns"),
        ("q_groups", np.array([4, 0, 4, 2], np.int16), "groups of 16"),
        ("q_scale_max", np.array([np.inf, 1], np.float16), "not a finite number"),
        ("q_scale", np.zeros((1, 1), np.int32), "q_scale and q_scale_max have shapes"),
    ],
)
def test_exl2_that_cannot_be_is_told(part, value, said):
    codes, scales = np.zeros((8, 64), np.uint8), np.zeros((8, 2), np.uint8)
    order = np.arange(64, dtype=np.int32)
    tensors = pack_exl2(codes, [(4, 32), (4, 32)], scales, np.ones(2, np.float16), order)
    with pytest.raises(ModelFileError, match=rf"layer \(EXL2\).*{said}"):
        Exl2Matrix("layer", tensors._replace(**{part: value}), 64)


def test_layouts_name_shapes_that_do_not_fit():
    words, scales = np.zeros((64, 4), np.int32), np.ones((2, 32), np.float16)
    with pytest.raises(ModelFileError, match=r"layer: qzeros have shape \(3, 4\)"):
        awq_layout.awq_matrix("layer", words, np.zeros((3, 4), np.int32), scales, 32)
    with pytest.raises(ModelFileError, match="weight_packed of 4 words"):
        compressed_tensors.packed_matrix("layer", words, 4, 64, scales, None, None, 32)
    with pytest.raises(ModelFileError, match="layer: codes of 7 bits are not supported"):
        compressed_tensors.packed_matrix("layer", words, 7, 16, scales, np.zeros((16, 2), np.int32), None, 32)
    assert gptq_layout.BITS == (2, 3, 4, 5, 6, 8)


@pytest.mark.parametrize("declared", [-1, 64, 96, 1 << 62, 10**30])
def test_a_group_is_no_larger_than_a_row(declared):
    assert group_size("layer", 64, 1, declared) == 64
