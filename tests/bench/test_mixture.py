"""The published residual model: probabilities that sum to 1, tails, and what a fit finds."""

import math

import numpy as np
import pytest

from prolepsis.bench.mixture import Mixture, interval_edges
from prolepsis.coding.cache_dtypes import FORMATS, TOKEN_DTYPES, DType, quantise, to_float, to_scalars
from prolepsis.errors import InputError
from prolepsis.kernels.mixture import between

FLOATS: list[DType] = [dtype for dtype in TOKEN_DTYPES if not FORMATS[dtype].limit]


def _case(dtype: DType, error: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(scalars, predictions) of a layer with 2 heads of 8 channels, one error in ten ten times as wide."""
    rng = np.random.default_rng(seed)
    true = rng.standard_normal((2, 300, 2, 8)).astype(np.float32)
    wide = np.where(rng.random(true.shape) < 0.1, 10, 1)
    means = true + (error * wide * rng.standard_normal(true.shape)).astype(np.float32)
    return to_scalars(quantise(true[None], dtype), dtype)[0], means


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_probabilities_of_all_values_sum_to_1(dtype: DType) -> None:
    scalars, means = _case(dtype, 0.05)
    mixture = Mixture.fitted(scalars, means, dtype)
    largest = FORMATS[dtype].largest
    every = np.concatenate([np.arange(largest + 1), 0x8000 + np.arange(largest + 1)]).astype(np.uint16)
    first = slice(None), slice(1), slice(1)  # channel
    parts = mixture.tight[first], mixture.wide[first], mixture.weights[:, :1], mixture.histogram[:, :1]
    values = np.tile(every, (2, 1)).reshape(2, -1, 1, 1)
    for mean in (0.0, -0.3, 1e-20, 3e4):
        bits = Mixture(dtype, *parts).code_lengths(values, np.full(values.shape, mean, np.float32))
        assert np.exp2(-bits).sum(axis=1) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize(("dtype", "rounded"), [(d, n) for d in FLOATS for n in (1.0, -0.37, 0.013, 250.0)])
def test_an_interval_is_what_is_rounded_to_a_value(dtype: DType, rounded: float) -> None:
    scalar = to_scalars(quantise(np.full((1, 1), rounded, np.float32), dtype), dtype)[0, 0]
    low, high = interval_edges(dtype)[scalar & 0x7FFF :][:2]
    inside, outside = np.array([low, high]) * [1 + 1e-6, 1 - 1e-6], np.array([low, high]) * [1 - 1e-6, 1 + 1e-6]
    values = np.copysign(np.concatenate([inside, outside]), rounded).astype(np.float32)[None]
    again = to_scalars(quantise(values, dtype), dtype)[0]
    assert (again[:2] == scalar).all()
    assert (again[2:] != scalar).all()


def test_integers_have_no_such_intervals() -> None:
    with pytest.raises(InputError, match="for floats, not for int8"):
        interval_edges("int8")


@pytest.mark.parametrize(
    ("a", "b"), [(-1.0, 2.0), (3.0, 3.5), (-9.0, -8.0), (8.0, 40.0), (0.5, 0.5 + 1e-6), (30.0, 31.0)]
)
def test_the_curve_in_its_middle_and_in_its_tails(a: float, b: float) -> None:
    """Against a sum over the density, in the units of its largest value."""
    x = np.linspace(a, b, 200_001)
    peak = min(abs(a), abs(b)) if a * b > 0 else 0.0
    density = np.exp(-0.5 * (x * x - peak * peak)) / math.sqrt(2 * math.pi)
    expected = float(((density[1:] + density[:-1]) / 2).sum() * (b - a) / 200_000) * math.exp(-0.5 * peak * peak)
    assert between(a, b, b - a) == pytest.approx(expected, rel=1e-6)
    assert between(-b, -a, b - a) == pytest.approx(between(a, b, b - a), rel=1e-9)


@pytest.mark.parametrize(("dtype", "error"), [("bf16", 0.03), ("bf16", 1e-3), ("fp8_e4m3", 0.03), ("fp16", 0.003)])
def test_a_fit_finds_the_errors_even_where_they_are_small_against_the_rounding(dtype: DType, error: float) -> None:
    scalars, means = _case(dtype, error)
    mixture = Mixture.fitted(scalars, means, dtype)
    fitted = mixture.code_lengths(*_case(dtype, error, seed=1)).mean() / 16
    wrong = Mixture(dtype, 3 * mixture.tight, 3 * mixture.wide, *mixture[3:])
    assert fitted < wrong.code_lengths(*_case(dtype, error, seed=1)).mean() / 16
    assert np.median(mixture.tight) == pytest.approx(error, rel=0.25)
    assert mixture.weights.sum(axis=-1) == pytest.approx(1)
    assert mixture.weights[..., 0].mean() == pytest.approx(0.9, abs=0.05)


def test_values_that_no_prediction_tells_cost_what_their_own_distribution_says() -> None:
    """Predictions of nothing: not far from the entropy of the values."""
    scalars, _ = _case("fp8_e4m3", 1.0)
    mixture = Mixture.fitted(scalars, np.full(scalars.shape, 1e4, np.float32), "fp8_e4m3")
    _, counts = np.unique(scalars, return_counts=True)
    entropy = -(counts / scalars.size * np.log2(counts / scalars.size)).sum()
    bits = mixture.code_lengths(scalars, np.full(scalars.shape, 1e4, np.float32)).sum() / scalars.size
    assert entropy - 0.1 < bits < entropy + 0.2


def test_nan_and_infinities_cost_bits_and_break_nothing() -> None:
    scalars, means = _case("bf16", 0.01)
    scalars[:, 7, 0], scalars[:, 7, 1] = 0x7F80, 0xFFC1
    mixture = Mixture.fitted(scalars, means, "bf16")
    bits = mixture.code_lengths(scalars, means)
    assert np.isfinite(bits).all()
    assert (bits[:, 7] > np.median(bits)).all()
    assert np.isinf(to_float(scalars[:1, 7, 0, :1], "bf16")).all()
