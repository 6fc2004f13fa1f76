"""Our quantisers: against llama.cpp's own files of the same weights, and near their limits."""

from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from prolepsis.errors import InputError
from prolepsis.kernels.kinds import KINDS
from prolepsis.model.gguf_file import GGUFFile
from prolepsis.quant.gguf_types import encoded, matrix_of
from prolepsis.quant.matrix import Form, dequantised
from prolepsis.quant.rounding import ROUNDED, rounded_codes

DATA = Path(__file__).parents[1] / "data" / "gguf"


def numbers(kind, codes):
    return dequantised(Form(kind, codes.codes.shape[1]), codes)


def error(kind, values, importance=None, weights=1):
    return float(((values - numbers(kind, rounded_codes(kind, values, importance))) ** 2 * weights).sum())


@pytest.fixture(scope="module")
def gaussian():
    return np.random.default_rng(0).standard_normal((40, 512), np.float32) * np.float32(0.05)


@pytest.mark.parametrize(
    ("file", "kind", "tensor", "share"),
    [
        ("Q4_0", "Q4_0", "blk.0.ffn_gate", 0.9),
        ("Q4_1", "Q4_1", "blk.0.ffn_gate", 0.81),
        ("Q8_0", "Q8_0", "blk.0.attn_k", 0.8),
        ("IQ4_XS", "IQ4_XS", "blk.0.ffn_gate", 0.94),
        ("Q3_K_M", "Q3_K", "blk.0.ffn_gate", 0.92),
        ("Q4_K_M", "Q4_K", "blk.0.ffn_gate", 0.975),
        ("Q5_K_M", "Q5_K", "blk.0.ffn_gate", 0.93),
        ("Q6_K", "Q6_K", "blk.0.ffn_gate", 0.87),
    ],
)
def test_squared_error_is_less_than_llama_cpps(file, kind, tensor, share):
    """`share` of it, at most: what was measured, and a little."""
    name = f"{tensor}.weight"
    theirs, exact = (GGUFFile.open(DATA / f"{each}.gguf").tensors[name] for each in (file, "F32"))
    assert theirs.type_name == kind
    values = exact.data.view(np.float32).reshape(exact.shape)
    of_theirs = dequantize(theirs.data.reshape(len(values), -1), GGMLQuantizationType[kind])
    assert error(kind, values) < share * ((values - of_theirs) ** 2).sum()


@pytest.mark.parametrize("kind", ROUNDED)
def test_codes_are_within_the_kind_and_come_back_from_bytes(kind, gaussian):
    codes = rounded_codes(kind, gaussian)
    raw = encoded(kind, codes)
    (read,) = matrix_of("w", kind, gaussian.shape, raw.reshape(-1)).read(np.arange(len(gaussian)))
    for ours, theirs in zip(codes, read, strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or (ours.dtype == theirs.dtype and np.array_equal(ours, theirs))
    # A step of 2 ** -bits of about 6 standard deviations, evenly missed.
    bits = KINDS[kind].bits
    assert np.sqrt(((gaussian - numbers(kind, codes)) ** 2).mean()) < 0.05 * 6 / 2**bits / np.sqrt(12) * 1.1


@pytest.mark.parametrize("kind", ROUNDED)
def test_rows_do_not_depend_on_company(kind, gaussian):
    whole, alone = rounded_codes(kind, gaussian), rounded_codes(kind, gaussian[19:20])
    for all_rows, row in zip(whole, alone, strict=True):
        assert all_rows is None or np.array_equal(all_rows[19:20], row)


@pytest.mark.parametrize("kind", ROUNDED)
def test_importance_moves_errors_to_where_they_count_less(kind, gaussian):
    importance = np.exp(2 * np.random.default_rng(1).standard_normal(512)).astype(np.float32)
    assert error(kind, gaussian, importance, importance) < 0.97 * error(kind, gaussian, None, importance)
    assert np.array_equal(
        rounded_codes(kind, gaussian, np.full(512, 7, np.float32)).codes, rounded_codes(kind, gaussian).codes
    )


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("scale", [0, 1e-30, 1e-6, 1e4])
def test_extreme_weights(kind, scale, gaussian):
    values = np.float32(scale) * gaussian[:3]
    values[1] = np.float32(scale)  # a row of equal numbers
    missed = np.abs(numbers(kind, rounded_codes(kind, values)) - values).max()
    # A float16 has no step below 2 ** -24, and levels of books may lie 24 apart.
    assert missed <= max(scale * 0.2, 12 * 2**-24)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e6])
def test_what_cannot_be_quantised_is_refused(bad, gaussian):
    values = gaussian.copy()
    values[3, 7] = bad
    with pytest.raises(InputError, match=r"^w holds numbers that are not finite or not below 500,000"):
        rounded_codes("Q4_0", values, name="w")


@pytest.mark.parametrize("bad", [np.ones(511), np.full(512, np.nan), -np.ones(512)])
def test_bad_importance_is_refused(bad, gaussian):
    with pytest.raises(InputError, match="importance must be 512 finite numbers"):
        rounded_codes("Q4_0", gaussian, bad.astype(np.float32))


def test_columns_without_importance_do_no_harm(gaussian):
    assert np.array_equal(
        rounded_codes("Q4_K", gaussian, np.zeros(512, np.float32)).codes, rounded_codes("Q4_K", gaussian).codes
    )


@pytest.mark.parametrize(("first", "then"), [("Q4_1", "Q5_1"), ("Q4_0", "Q8_0"), ("Q5_0", "Q8_0"), ("Q4_0", "Q4_0")])
def test_weights_of_an_earlier_grid_are_kept(first, then, gaussian):
    values = numbers(first, rounded_codes(first, gaussian))
    assert error(then, values) < 1e-6 * (values**2).sum()
