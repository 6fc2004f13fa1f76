"""Cache dtypes: exact values, KV taken in every form, and quantised as engines do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from prolepsis.coding.cache_dtypes import (
    FORMATS,
    TOKEN_DTYPES,
    Geometry,
    QuantisedKV,
    are_scalars,
    as_stored,
    from_scalars,
    moderate_values,
    quantise,
    to_float,
    to_scalars,
)
from prolepsis.errors import InputError

DTYPES = TOKEN_DTYPES
FLOATS = [d for d in DTYPES if not FORMATS[d].limit]
SHAPE = (1, 2, 3, 1, 4)
X = np.linspace(-2, 2, 24, dtype=np.float32).reshape(SHAPE)


def every_pattern(dtype: str) -> np.ndarray | QuantisedKV:
    """Every pattern a value can have, once or more."""
    if FORMATS[dtype].bits == 16:
        return np.arange(1 << 16, dtype=np.uint16).reshape(1, 2, -1, 1, 64)
    patterns = np.arange(256, dtype=np.uint8).reshape(1, 2, -1, 1, 16)
    if not FORMATS[dtype].limit:
        return patterns
    return QuantisedKV(patterns.view(np.int8) if dtype == "int8" else patterns, np.ones((1, 2, 8, 1), np.uint16))


def torch_type(dtype: str) -> object:
    torch = pytest.importorskip("torch")
    return {
        "bf16": torch.bfloat16,
        "fp16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
    }[dtype]


def to_torch(array: np.ndarray) -> object:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(array.view(np.int16) if array.dtype == np.uint16 else array.copy())


@pytest.mark.parametrize("dtype", DTYPES)
def test_scalars_hold_every_pattern_in_the_order_of_its_value(dtype: str) -> None:
    kv = every_pattern(dtype)
    scalars = to_scalars(kv, dtype)
    assert are_scalars(scalars, dtype)
    assert len(np.unique(scalars)) == 1 << FORMATS[dtype].bits
    back = from_scalars(scalars, getattr(kv, "steps", None), dtype)
    assert all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in zip(back, kv, strict=True))
    sizes = to_float(np.arange(FORMATS[dtype].largest + 1, dtype=np.uint16), dtype)
    numbers = sizes[~np.isnan(sizes)]
    assert (np.diff(numbers) > 0).all()
    negative = to_float(0x8000 | np.arange(len(numbers), dtype=np.uint16), dtype)
    assert np.array_equal(negative, -numbers - bool(FORMATS[dtype].limit))


def test_scalars_of_another_dtype_are_told() -> None:
    assert not are_scalars(np.array([1, 0x8008], np.uint16), "int4")
    assert not are_scalars(np.array([0x80], np.uint16), "fp8_e5m2")
    assert are_scalars(np.array([0x80], np.uint16), "bf16")


def test_integers_are_twos_complement() -> None:
    scalars = to_scalars(QuantisedKV(np.array([[0x7F, 0x80, 0xF1]], np.uint8), np.zeros(1, np.uint16)), "int4")
    assert to_float(scalars, "int4").tolist() == [[-1, 7, 0, -8, 1, -1]]
    scalars = to_scalars(QuantisedKV(np.array([[0, -1, 127, -128]], np.int8), np.zeros(1, np.uint16)), "int8")
    assert to_float(scalars, "int8").tolist() == [[0, -1, 127, -128]]


@pytest.mark.parametrize("dtype", FLOATS)
def test_values_are_exact(dtype: str) -> None:
    patterns = every_pattern(dtype)
    assert isinstance(patterns, np.ndarray)
    expected = to_torch(patterns).view(torch_type(dtype)).float().numpy()
    assert np.array_equal(to_float(to_scalars(patterns, dtype), dtype), expected, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_see_moderate_values(dtype: str) -> None:
    seen, values = moderate_values(dtype), to_float(np.arange(1 << 16, dtype=np.uint16), dtype)
    assert np.isfinite(seen).all()
    moderate = np.abs(values) <= 2.0**99
    assert np.array_equal(seen[moderate], values[moderate])


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_taken_in_every_form(dtype: str) -> None:
    tensor = to_torch(X).to(torch_type(dtype))
    stored, name = as_stored(tensor, None)
    assert isinstance(stored, np.ndarray)
    assert (name, stored.dtype, stored.shape) == (dtype, f"uint{FORMATS[dtype].bits}", SHAPE)
    assert np.array_equal(to_float(to_scalars(stored, dtype), dtype), tensor.float().numpy())
    for form in (stored, to_torch(stored) if stored.dtype == np.uint8 else stored):
        assert np.array_equal(as_stored(form, dtype)[0], stored)
    turned = as_stored(tensor.transpose(2, 4), dtype)[0]
    assert np.array_equal(turned, stored.swapaxes(2, 4))


def test_arrays_of_numpy_and_of_types_added_to_it() -> None:
    half = X.astype(np.float16)
    assert as_stored(half.swapaxes(2, 4), None)[0].tolist() == half.view(np.uint16).swapaxes(2, 4).tolist()
    ml_dtypes = pytest.importorskip("ml_dtypes")
    for kind, dtype in (("bfloat16", "bf16"), ("float8_e4m3fn", "fp8_e4m3"), ("float8_e5m2", "fp8_e5m2")):
        array = X.astype(getattr(ml_dtypes, kind))
        stored, name = as_stored(array, None)
        assert name == dtype
        assert np.array_equal(to_float(to_scalars(stored, dtype), dtype), array.astype(np.float32))


@pytest.mark.parametrize(("dtype", "kind"), [("int8", np.int8), ("int4", np.uint8)])
def test_integers_are_taken_in_every_form(dtype: str, kind: type) -> None:
    torch = pytest.importorskip("torch")
    values, steps = np.arange(24).astype(kind).reshape(SHAPE), np.arange(6).astype(np.float16).reshape(SHAPE[:4])
    stored, name = as_stored(QuantisedKV(values, steps), None)
    assert name == dtype
    assert (stored.values.dtype, stored.steps.dtype) == (kind, np.uint16)
    assert Geometry.of(stored, dtype) == (dtype, 1, 1, 4 if dtype == "int8" else 8)
    for form in (stored, QuantisedKV(torch.from_numpy(values), torch.from_numpy(steps))):
        again = as_stored(form, dtype)[0]
        assert np.array_equal(again.values, values)
        assert np.array_equal(again.steps.view(np.float16), steps)


QUANTISED = QuantisedKV(np.zeros(SHAPE, np.int8), np.zeros(SHAPE[:4], np.float16))


@pytest.mark.parametrize(
    ("array", "dtype", "message"),
    [
        (X, None, "float32 cannot be coded"),
        (X.astype(np.uint16), None, "uint16 bit patterns need dtype='bf16' or dtype='fp16'"),
        (X.astype(np.uint16), "fp8_e4m3", "uint16 bit patterns need dtype='bf16' or dtype='fp16'"),
        (X.astype(np.uint8), "int4", "uint8 bit patterns need dtype='fp8_e4m3' or dtype='fp8_e5m2'"),
        (X.astype(np.uint16), "fp8", "'fp8' is not supported; choose one of bf16, fp16, fp8_e4m3"),
        (X.astype(np.float16), "bf16", "float16, which is fp16, but dtype='bf16'"),
        (X.astype(np.int8), "int8", "int8 cannot be coded.*QuantisedKV"),
        ([1, 2], "bf16", "type list"),
        (X.astype(np.float16)[0], None, r"shape \(2, 3, 1, 4\), expected \(layers, 2, tokens"),
        (X.astype(np.float16)[:, :1], None, "expected \\(layers, 2, tokens"),
        (QUANTISED, "int4", "int8, which is int8, but dtype='int4'"),
        (QuantisedKV(X, QUANTISED.steps), None, "QuantisedKV of float32 with steps of float16"),
        (QuantisedKV(QUANTISED.values, X[..., 0]), None, "QuantisedKV of int8 with steps of float32"),
        (QuantisedKV(QUANTISED.values, QUANTISED.steps[:, :1]), None, r"steps of shape \(1, 1, 3, 1\)"),
    ],
)
def test_other_arrays_are_refused(array: object, dtype: str | None, message: str) -> None:
    with pytest.raises(InputError, match=message):
        as_stored(array, dtype)


def neighbourhood(dtype: str) -> np.ndarray:
    """Every finite value of a dtype, what lies half way between two, and a little above and below that."""
    sizes = to_float(np.arange(FORMATS[dtype].largest + 1, dtype=np.uint16), dtype)
    sizes = sizes[np.isfinite(sizes)].astype(np.float64)
    halves = ((sizes[1:] + sizes[:-1]) / 2).astype(np.float32)
    with np.errstate(over="ignore"):
        beyond = np.array([sizes[-1] + (sizes[-1] - sizes[-2]) / 2, 2 * sizes[-1], 3e38]).astype(np.float32)
    above, below = np.nextafter(halves, np.float32(np.inf)), np.nextafter(halves, np.float32(0))
    positive = np.concatenate([sizes.astype(np.float32), halves, above, below, beyond, np.float32([np.inf])])
    return np.concatenate([positive, -positive])


def assert_quantised_as_torch_does(values: np.ndarray, dtype: str) -> None:
    expected = to_torch(values).to(torch_type(dtype)).float().numpy()
    stored = quantise(values[None], dtype)
    found = to_float(to_scalars(stored, dtype), dtype)[0]
    assert np.array_equal(found, expected, equal_nan=True)
    numbers = ~np.isnan(expected)
    assert np.array_equal(np.signbit(found)[numbers], np.signbit(expected)[numbers])


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_rounded_to_nearest_even(dtype: str) -> None:
    assert_quantised_as_torch_does(neighbourhood(dtype), dtype)
    assert_quantised_as_torch_does(to_float(np.arange(1 << 16, dtype=np.uint16), "bf16"), dtype)


@given(hnp.arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32)), st.sampled_from(FLOATS))
def test_any_float_is_rounded_as_torch_does(values: np.ndarray, dtype: str) -> None:
    assert_quantised_as_torch_does(values, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_bits_are_quantised_as_their_values(dtype: str) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, (2, 2, 3, 2, 8)).astype(np.uint16)
    for a, b in zip(quantise(bits, dtype), quantise(to_float(bits, "bf16"), dtype), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize(("dtype", "limit"), [("int8", 127), ("int4", 7)])
def test_integers_are_steps_of_the_largest_magnitude(dtype: str, limit: int) -> None:
    torch = pytest.importorskip("torch")
    x = (np.random.default_rng(0).normal(size=(2, 2, 50, 3, 16)) * 3).astype(np.float32)
    x[0, 0, 0, 0] = 0
    x[0, 0, 0, 1, 2] = np.nan
    x[0, 0, 0, 2, :2] = np.inf, -np.inf
    kv = quantise(x, dtype)
    assert as_stored(kv, None)[1] == dtype
    tensor = torch.nan_to_num(torch.from_numpy(x), 0, 0, 0)
    steps = (tensor.abs().amax(-1) / limit).half()
    assert np.array_equal(kv.steps, steps.numpy().view(np.uint16))
    integers = torch.clamp(torch.round(tensor / steps.float()[..., None]), -limit, limit).nan_to_num(0).numpy()
    assert np.array_equal(to_float(to_scalars(kv, dtype), dtype), integers)
    assert kv.steps[0, 0, 0, 0] == 0
    assert np.abs(integers).max() == limit


def test_steps_that_fp16_does_not_hold() -> None:
    kv = quantise(np.array([3e38, 1e-9], np.float32).reshape(1, 1, 2, 1, 1).repeat(2, 1), "int8")
    assert kv.steps[0, :, :, 0].tolist() == [[0x7C00, 0]] * 2
    assert not kv.values.any()


def test_int4_needs_an_even_head() -> None:
    with pytest.raises(InputError, match="which 3 channels do not fill"):
        quantise(np.zeros((1, 2, 1, 1, 3), np.float32), "int4")
