import math

import numpy as np
import pytest

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


@pytest.mark.parametrize("size", [1, 3, 4, 63, 64, 65, 300, 1000])
def test_sums_of_every_length_are_right(size):
    logits = -np.random.default_rng(0).exponential(5, size).astype(np.float32)
    weights = np.empty(size)
    total = sampling.exp_weights(logits, 0.0, 1.0, weights)
    assert math.isclose(total, math.fsum(weights), rel_tol=1e-13)
    assert sampling.exp_sum(logits, 0.0, 1.0) == total


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_the_largest_logit_of_each_block(size):
    logits = np.random.default_rng(0).normal(size=size).astype(np.float32)
    largest = np.empty(-(-size // sampling.BLOCK), np.float32)
    assert sampling.largest_logits(logits, largest) == logits.max()
    assert largest.tolist() == [logits[i : i + sampling.BLOCK].max() for i in range(0, size, sampling.BLOCK)]
    for position in range(size):
        broken = logits.copy()
        broken[position] = np.nan
        assert math.isnan(sampling.largest_logits(broken, largest))
        assert np.isnan(largest).tolist() == [block == position // sampling.BLOCK for block in range(len(largest))]


def test_only_the_blocks_that_count_are_read():
    weights = np.full(300, np.nan)
    weights[64:128], weights[256:] = 0.0, 0.0
    weights[70], weights[299] = 1.0, 3.0
    blocks = np.array([1, 4], np.int32)
    assert [sampling.draw(weights, 0.25, blocks, uniform) for uniform in (0.0, 0.2499, 0.25, 0.999)] == [
        70,
        70,
        299,
        299,
    ]
