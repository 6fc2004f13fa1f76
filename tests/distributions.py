"""Whether samples come from a given distribution: a test of goodness of fit, for tests that have to be able to fail."""

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

TOO_UNLIKELY = 1e-4
"""A p-value below it fails. Seeds are fixed, so a test that passes once passes always."""

EXPECTED = 10.0
"""Outcomes are pooled up to about this many expected samples."""


def assert_same_distribution(
    sample: Callable[[int], NDArray[np.integer]], exact: NDArray[np.float64], samples: int
) -> None:
    """Fail unless sequences of tokens are distributed as they should be, jointly.

    sample(n): n sequences, integers [n, length], each value below the size of its axis in `exact`. exact: the joint
    probabilities, float64 [vocab, ...], one axis for each token of a sequence.
    """
    tokens = np.asarray(sample(samples)).reshape(samples, exact.ndim)
    outcomes = np.ravel_multi_index(tuple(tokens.T), exact.shape)
    p_value = g_test(np.bincount(outcomes, minlength=exact.size), exact.ravel())
    assert p_value > TOO_UNLIKELY, f"p-value {p_value:.2g} for {samples} samples"


def g_test(counts: NDArray[np.integer], probabilities: NDArray[np.float64]) -> float:
    """The p-value of Wilks' likelihood ratio (G-test): how likely counts at least so unlikely are.

    counts, probabilities: [outcomes]. Rare outcomes are pooled with others that are as rare.
    """
    if counts[probabilities == 0].any():
        return 0.0
    expected = probabilities * (counts.sum() / probabilities.sum())
    order = np.argsort(expected, kind="stable")
    first = np.cumsum(expected[order]) - expected[order]
    _, pool = np.unique(first // EXPECTED, return_inverse=True)
    observed = np.bincount(pool, weights=counts[order])
    expected = np.bincount(pool, weights=expected[order])
    seen = observed > 0
    statistic = 2 * float(np.sum(observed[seen] * np.log(observed[seen] / expected[seen])))
    return chi_squared_tail(max(statistic, 0.0), len(expected) - 1)


def chi_squared_tail(statistic: float, degrees: int) -> float:
    """Probability of at least `statistic` in a chi-squared distribution: the incomplete gamma function's recurrence
    Q(a + 1, x) = Q(a, x) + x^a e^-x / gamma(a + 1) (DLMF 8.8.6), from a = 1 or 1/2 on."""
    x = statistic / 2
    if x == 0.0:
        return 1.0
    a, tail = (0.5, math.erfc(math.sqrt(x))) if degrees % 2 else (1.0, math.exp(-x))
    while a < degrees / 2:
        tail += math.exp(a * math.log(x) - x - math.lgamma(a + 1))
        a += 1
    return tail
