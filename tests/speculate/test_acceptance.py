"""Tokens that come out of speculation are distributed as the target's, and the tests of that can tell."""

import math
from bisect import bisect
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import numpy as np
import pytest
from distributions import assert_same_distribution, chi_squared_tail, g_test

from prolepsis.speculate.acceptance import Probabilities, residual, settle

Settle = Callable[..., int]
Bonus = Callable[[Probabilities, Probabilities], Probabilities]


def draw(probabilities: Probabilities, uniform: float) -> int:
    return bisect(list(accumulate(probabilities.tolist())), uniform)


def spread(vocab: int, seed: int, concentration: float = 0.7) -> Probabilities:
    return np.random.default_rng(seed).dirichlet(np.full(vocab, concentration))


def only(probabilities: Probabilities, tokens: slice) -> Probabilities:
    kept = np.zeros(len(probabilities))
    kept[tokens] = probabilities[tokens]
    return kept / kept.sum()


P = spread(12, 1)
PAIRS = {
    "equal": (P, P),
    "equal up to rounding": (P, P * (1 + 1e-16)),
    "close": (P, 0.9 * P + 0.1 * spread(12, 2)),
    "far": (P, spread(12, 3, 0.2)),
    "bad on purpose": (P, P[np.argsort(np.argsort(-P))]),
    "zeros where the target has mass": (P, only(spread(12, 4), slice(0, 5))),
    "mass where the target has zeros": (only(P, slice(3, 9)), spread(12, 5)),
    "disjoint": (only(P, slice(0, 6)), only(P, slice(6, 12))),
    "one-hot draft": (P, only(P, slice(4, 5))),
    "one-hot target": (only(P, slice(4, 5)), spread(12, 6)),
    "wider": (spread(20, 7), spread(20, 8)),
}


@pytest.mark.parametrize(("p", "q"), PAIRS.values(), ids=PAIRS)
def test_a_settled_token_has_the_distribution_of_the_target(p: Probabilities, q: Probabilities) -> None:
    def sample(count: int) -> np.ndarray:
        uniforms = np.random.default_rng(9).random((count, 3)).tolist()
        drafts = np.searchsorted(np.cumsum(q / q.sum()), [u[2] for u in uniforms], side="right")
        return np.array([settle(p, q, x, u[0], u[1], draw) for x, u in zip(drafts, uniforms, strict=True)])

    assert_same_distribution(sample, p, 50_000)


def test_what_the_target_agrees_with_is_always_accepted() -> None:
    assert all(settle(P, P, token, math.nextafter(1, 0), 0.5, draw) == token for token in range(len(P)))


@pytest.mark.parametrize(("p", "q"), PAIRS.values(), ids=PAIRS)
def test_the_residual_is_a_distribution_of_tokens_that_the_target_has(p: Probabilities, q: Probabilities) -> None:
    rest = residual(p, q)
    assert rest.sum() == pytest.approx(1, abs=1e-12)
    assert np.all(rest >= 0)
    assert not rest[p == 0].any()


def test_the_residual_never_holds_a_token_that_was_rejected() -> None:
    p, q = PAIRS["far"]
    assert not residual(p, q)[p < q].any()


def test_the_residual_of_the_smallest_difference_is_whole() -> None:
    p, q = np.array([1.0, 5e-324]), np.array([1.0, 0.0])
    assert residual(p, q).tolist() == [0.0, 1.0]


class Toy:
    """A target and a drafter of 8 tokens for sequences of three; each distribution depends on all tokens before."""

    VOCAB, LENGTH, DRAFTS = 8, 3, 2

    def __init__(self, nearness: float) -> None:
        """nearness: how much of the drafter is the target."""
        random = np.random.default_rng(11)
        shapes = [(self.VOCAB,) * depth for depth in range(self.LENGTH)]
        self.target = [random.dirichlet(np.full(self.VOCAB, 0.6), shape) for shape in shapes]
        others = [random.dirichlet(np.full(self.VOCAB, 0.6), shape) for shape in shapes]
        self.drafter = [nearness * p + (1 - nearness) * q for p, q in zip(self.target, others, strict=True)]

    @property
    def joint(self) -> Probabilities:
        """Exact probabilities of all sequences of the target."""
        first, second, third = self.target
        return first[:, None, None] * second[:, :, None] * third

    def sample(self, count: int, settle: Settle = settle, bonus: Bonus = lambda p, q: p) -> np.ndarray:
        """Sequences by speculation: rounds of two drafts, one more token from `bonus(p, q)` where both are accepted."""
        uniforms = np.random.default_rng(12).random((count, 32)).tolist()
        return np.array([self._sequence(iter(own).__next__, settle, bonus) for own in uniforms])

    def _sequence(self, uniform: Callable[[], float], settle: Settle, bonus: Bonus) -> list[int]:
        tokens: list[int] = []
        while len(tokens) < self.LENGTH:
            drafts: list[int] = []
            while len(drafts) < self.DRAFTS and len(tokens) + len(drafts) < self.LENGTH:
                drafts.append(draw(self._next(self.drafter, [*tokens, *drafts]), uniform()))
            for draft in drafts:
                p, q = self._next(self.target, tokens), self._next(self.drafter, tokens)
                tokens.append(settle(p, q, draft, uniform(), uniform(), draw))
                if tokens[-1] != draft:
                    break
            else:
                if len(tokens) < self.LENGTH:
                    p, q = self._next(self.target, tokens), self._next(self.drafter, tokens)
                    tokens.append(draw(bonus(p, q), uniform()))
        return tokens

    @staticmethod
    def _next(model: list[Probabilities], tokens: list[int]) -> Probabilities:
        return model[len(tokens)][tuple(tokens)]


@pytest.mark.parametrize("nearness", [0.8, 0.0])
def test_three_tokens_have_the_joint_distribution_of_the_target(nearness: float) -> None:
    toy = Toy(nearness)
    assert_same_distribution(toy.sample, toy.joint, 50_000)


def accept_always(p: Probabilities, q: Probabilities, draft: int, accept: float, redraw: float, draw: Settle) -> int:
    return draft


def accept_by_the_inverse(p, q, draft, accept, redraw, draw):
    return draft if accept * p[draft] < q[draft] else draw(residual(p, q), redraw)


def redraw_from_the_target(p, q, draft, accept, redraw, draw):
    return draft if accept * q[draft] < p[draft] else draw(p, redraw)


def redraw_with_the_same_number(p, q, draft, accept, redraw, draw):
    return settle(p, q, draft, accept, accept, draw)


BROKEN = [accept_always, accept_by_the_inverse, redraw_from_the_target, redraw_with_the_same_number]


@pytest.mark.parametrize("broken", BROKEN)
def test_a_broken_rule_is_found_out(broken: Settle) -> None:
    toy = Toy(0.5)
    with pytest.raises(AssertionError, match="p-value"):
        assert_same_distribution(partial(toy.sample, settle=broken), toy.joint, 20_000)


def test_a_token_after_the_drafts_from_the_drafter_is_found_out() -> None:
    toy = Toy(0.5)
    with pytest.raises(AssertionError, match="p-value"):
        assert_same_distribution(partial(toy.sample, bonus=lambda p, q: q), toy.joint, 20_000)


@pytest.mark.parametrize(
    ("statistic", "degrees", "tail"),
    [(3.841459, 1, 0.05), (10.827566, 1, 0.001), (5.991465, 2, 0.05), (16.918978, 9, 0.05), (149.4493, 100, 0.001)],
)
def test_the_tail_of_chi_squared(statistic: float, degrees: int, tail: float) -> None:
    """Critical values as printed in tables."""
    assert chi_squared_tail(statistic, degrees) == pytest.approx(tail, rel=1e-4)


def test_p_values_of_true_samples_are_uniform() -> None:
    random, probabilities = np.random.default_rng(13), spread(200, 14)
    p_values = [g_test(random.multinomial(5000, probabilities), probabilities) for _ in range(2000)]
    counts, _ = np.histogram(p_values, bins=5, range=(0, 1))
    assert np.all(np.abs(counts / 400 - 1) < 0.25)


def test_what_cannot_happen_and_does_is_found_out() -> None:
    assert g_test(np.array([10_000, 1]), np.array([1.0, 0.0])) == 0.0
