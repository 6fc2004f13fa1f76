import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import IQ4_NL, MXFP4, dequantize

from prolepsis.errors import ModelFileError
from prolepsis.kernels.kinds import IQ4_BOOK, KINDS, MXFP4_BOOK
from prolepsis.quant.gguf_types import LAYOUTS, WORDS, block_size, encoded, matrix_of, readable_types
from prolepsis.quant.matrix import dequantised

ROWS, COLUMNS = 6, 512


def raw_rows(type_name, seed=0):
    per_block, block_bytes = block_size(type_name)
    shape = (ROWS, COLUMNS // per_block * block_bytes)
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def matrix(type_name, raw):
    return matrix_of("tensor 'w'", type_name, (len(raw), COLUMNS), raw.reshape(-1))


@pytest.mark.parametrize("type_name", readable_types())
@pytest.mark.parametrize("seed", range(3))
def test_numbers_are_those_of_the_gguf_package(type_name, seed):
    """Random bytes: among the scales are NaN, infinities and numbers below float16's normal ones."""
    raw = raw_rows(type_name, seed)
    rows = np.random.default_rng(seed).permutation(ROWS)[:4]
    read = matrix(type_name, raw)
    (form,), (part,) = read.forms, read.read(rows)
    with np.errstate(all="ignore"):
        expected = dequantize(raw[rows], GGMLQuantizationType[type_name])
        numbers = dequantised(form, part)
    assert np.array_equal(numbers, expected, equal_nan=True)


@pytest.mark.parametrize("type_name", readable_types())
@pytest.mark.parametrize("byte", [0, 255])
def test_blocks_of_equal_bytes(type_name, byte):
    raw = np.full_like(raw_rows(type_name), byte)
    read = matrix(type_name, raw)
    with np.errstate(all="ignore"):
        expected = dequantize(raw, GGMLQuantizationType[type_name])
        numbers = dequantised(read.forms[0], read.read(np.arange(ROWS))[0])
    assert np.array_equal(numbers, expected, equal_nan=True)


@pytest.mark.parametrize("type_name", [name for name in readable_types() if name not in WORDS])
def test_parts_are_as_the_kind_says(type_name):
    read = matrix(type_name, raw_rows(type_name))
    (form,), (part,) = read.forms, read.read(np.arange(ROWS))
    if form.kind == "F32":
        assert type_name == "MXFP4"
        return
    kind = KINDS[form.kind]
    groups = COLUMNS // (kind.group or form.group)
    assert part.codes.shape == (ROWS, COLUMNS)
    assert part.codes.max() < (len(kind.book) or 2**kind.bits)
    assert part.scales.shape == (ROWS, groups)
    assert part.scales.dtype == np.float16
    assert (part.minimums is not None) == kind.minimums
    assert (part.zeros is not None) == (not kind.group)
    assert (part.parts is not None) == bool(kind.part)
    if kind.part:
        assert part.parts.shape == (ROWS, COLUMNS // kind.part)


@pytest.mark.parametrize("type_name", LAYOUTS)
def test_bytes_come_back(type_name):
    raw = raw_rows(type_name)
    (part,) = matrix(type_name, raw).read(np.arange(ROWS))
    assert np.array_equal(encoded(type_name, part), raw)


def test_books_are_those_of_the_gguf_package():
    assert IQ4_NL.kvalues == IQ4_BOOK
    assert MXFP4.kvalues == MXFP4_BOOK


@pytest.mark.parametrize(("least", "most", "kind"), [(100, 139, "MXFP4"), (0, 39, "MXFP4"), (99, 139, "F32")])
def test_mxfp4_scales_span_what_float16_spans(least, most, kind):
    raw = raw_rows("MXFP4")
    raw[:, ::17] = np.random.default_rng(0).integers(least, most + 1, (ROWS, COLUMNS // 32))
    raw[:2, 0] = least, most
    raw[3, 17:34] = 0  # a block of zeros: its scale does not count
    read = matrix("MXFP4", raw)
    assert read.forms[0].kind == kind
    assert np.array_equal(
        dequantised(read.forms[0], read.read(np.arange(ROWS))[0]), dequantize(raw, GGMLQuantizationType.MXFP4)
    )


def test_what_is_not_supported_is_named():
    with pytest.raises(ModelFileError, match=r"tensor 'w': is of type NVFP4, .* supported here: Q4_0"):
        matrix_of("tensor 'w'", "NVFP4", (2, 64), np.zeros(72, np.uint8))
    with pytest.raises(ModelFileError, match="tensor 'w': rows of 16 are not a multiple of 32"):
        matrix_of("tensor 'w'", "F16", (2, 16), np.zeros(64, np.uint8))
    with pytest.raises(ModelFileError, match=r"tensor 'w': has shape \(2, 2, 32\)"):
        matrix_of("tensor 'w'", "F16", (2, 2, 32), np.zeros(256, np.uint8))
