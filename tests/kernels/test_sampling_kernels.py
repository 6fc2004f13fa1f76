import math

import numpy as np

from prolepsis.kernels import sampling


def exp_in_python(x: float) -> float:
    """The kernel's steps in Python floats, which are IEEE doubles that nothing contracts or reorders."""
    if x < -708.0:
        return 0.0
    n = (x * 1.4426950408889634 + 6755399441055744.0) - 6755399441055744.0
    r = (x - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10
    p = 1.0 / math.factorial(13)
    for degree in range(12, 1, -1):
        p = p * r + 1.0 / math.factorial(degree)
    return ((p * r) * r + r + 1.0) * 2.0**n


def test_exponentials_are_the_bits_that_plain_ieee_arithmetic_gives():
    """Wherever the compiler fused or reordered a step, a bit would differ here."""
    logits = -np.concatenate([np.linspace(0, 720, 4001), np.random.default_rng(0).exponential(5, 4000)]).astype(
        np.float32
    )
    weights = np.empty(len(logits))
    sampling.exp_weights(logits, 0.0, 1.0, weights)
    assert weights.tolist() == [exp_in_python(float(x)) for x in logits]


def test_exponentials_are_within_one_ulp_and_exact_at_the_ends():
    logits = -np.linspace(0, 708, 20_001).astype(np.float32)
    weights = np.empty(len(logits))
    sampling.exp_weights(logits, 0.0, 1.0, weights)
    expected = np.exp(logits.astype(np.float64))
    assert np.max(np.abs(weights - expected) / np.spacing(expected)) <= 2
    sampling.exp_weights(np.array([0.0, -708.5, -np.inf], dtype=np.float32), 0.0, 1.0, weights[:3])
    assert weights[:3].tolist() == [1.0, 0.0, 0.0]


def test_bins_never_put_a_heavier_weight_lower():
    weights = np.concatenate(
        [[1.0, 0.0, 2.0**-64, 2.0**-1022], np.exp(-np.random.default_rng(0).exponential(20, 5000))]
    )
    bins = np.empty(len(weights), dtype=np.uint16)
    counts = np.zeros(sampling.NUM_BINS, dtype=np.int64)
    masses = np.zeros(sampling.NUM_BINS)
    sampling.bin_weights(weights, bins, counts, masses)
    assert np.all(np.diff(bins[np.argsort(-weights)].astype(int)) >= 0)
    assert (bins[0], bins[1], bins[2]) == (0, sampling.NUM_BINS - 1, sampling.NUM_BINS - 1)
    expected = np.bincount(bins, minlength=sampling.NUM_BINS)
    assert np.array_equal(counts[:-1], expected[:-1])
    np.testing.assert_allclose(masses[:-1], np.bincount(bins, weights, sampling.NUM_BINS)[:-1], rtol=1e-12)
    assert counts[-1] == masses[-1] == 0


def test_sums_of_every_length_are_right():
    weights = np.random.default_rng(0).random(300)
    for size in (1, 3, 4, 63, 64, 300):
        assert math.isclose(sampling.sum_weights(weights[:size]), math.fsum(weights[:size]), rel_tol=1e-13)
