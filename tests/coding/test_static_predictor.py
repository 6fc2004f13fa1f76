"""The static predictor turns means exactly as RoPE turns K, to the bit the same everywhere."""

import hashlib

import numpy as np
import pytest
from kv_samples import turn

from prolepsis.coding import RopeSpec
from prolepsis.coding.predictors import Prediction, Predictor, Segment
from prolepsis.coding.predictors.static import StaticPredictor

MEANS = np.random.default_rng(0).normal(size=(2, 2, 3, 24)).astype(np.float32)
SCALES = np.full(MEANS.shape, 1016, np.int32)
NOTHING = np.empty((0, 2, 40, 3, 24), np.uint16)


@pytest.mark.parametrize("style", ["half", "interleaved"])
def test_k_is_turned_and_v_is_not(style: str) -> None:
    rope = RopeSpec(10_000.0, 16, style)  # type: ignore[arg-type]
    predictor: Predictor = StaticPredictor(MEANS, SCALES, rope)
    prediction = predictor.begin(Segment(70, 40)).predict(range(1, 2))
    assert isinstance(prediction, Prediction)
    assert prediction.shifts is None
    means = prediction.turned_means(40)
    assert means.shape == (1, 2, 40, 3, 24)
    expected = turn(np.repeat(MEANS[1, 0][None].astype(np.float64), 40, axis=0), 70, rope)
    assert np.allclose(means[0, 0], expected, atol=1e-5)
    assert (means[0, 1] == MEANS[1, 1]).all()
    assert np.array_equal(means[0, 0, :, :, 16:], np.repeat(MEANS[1, 0, None, :, 16:], 40, axis=0))
    assert np.array_equal(prediction.scales, SCALES[1:])


def test_same_bits_everywhere() -> None:
    """A changed bit here would make saved files undecodable. Plain NumPy, one rounding an operation, agrees."""
    rope = RopeSpec(10_000.0, 24, "half")
    means = StaticPredictor(MEANS, SCALES, rope).begin(Segment(0, 300)).predict(range(2)).turned_means(300)
    cos, sin = (t[:, None] for t in rope.table(0, 300))
    a, b = MEANS[:, 0, None, :, :12], MEANS[:, 0, None, :, 12:]
    assert np.array_equal(means[:, 0, ..., :12], a * cos - b * sin)
    assert np.array_equal(means[:, 0, ..., 12:], a * sin + b * cos)
    assert hashlib.sha256(means.tobytes()).hexdigest() == GOLDEN


def test_without_rope_nothing_is_turned() -> None:
    means = StaticPredictor(MEANS, SCALES, None).begin(Segment(5, 4)).predict(range(2)).turned_means(4)
    assert np.array_equal(means, np.broadcast_to(MEANS[:, :, None], means.shape))


def test_scaling_slows_the_turning() -> None:
    slow = RopeSpec(10_000.0, 8, "half", scaling_factor=4.0, frequency_factors=(1.0, 1.0, 1.0, 2.0))
    plain = RopeSpec(10_000.0, 8, "half")
    assert np.allclose(slow.table(400, 1)[0][:, :3], plain.table(100, 1)[0][:, :3])
    assert np.allclose(slow.table(400, 1)[0][:, 3], plain.table(50, 1)[0][:, 3])


GOLDEN = "6a6823a22c9e98481d57b4a5da2243aeaa13c3b8af796f5b2dc67d55b4a6e01a"
