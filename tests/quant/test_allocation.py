"""The choice under a budget, against all choices there are."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prolepsis.errors import InputError
from prolepsis.quant.allocation import allocate

OPTION = st.tuples(st.integers(0, 30), st.integers(0, 100))
THINGS = st.lists(st.lists(OPTION, min_size=1, max_size=4), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(THINGS, st.integers(0, 150))
def test_optimum_and_bound(things: list[list[tuple[int, int]]], budget: int) -> None:
    sizes = [[size for size, _ in options] for options in things]
    costs = [[float(cost) for _, cost in options] for options in things]
    fitting = [
        sum(cost for _, cost in choice) for choice in product(*things) if sum(size for size, _ in choice) <= budget
    ]
    if not fitting:
        with pytest.raises(InputError, match="smallest options"):
            allocate(sizes, costs, budget)
        return
    exact, relaxed = allocate(sizes, costs, budget), allocate(sizes, costs, budget, exact_work=0)
    assert exact.cost == exact.bound == min(fitting)
    assert relaxed.bound - 1e-9 <= min(fitting) <= relaxed.cost
    for found in (exact, relaxed):
        assert found.size == sum(each[i] for each, i in zip(sizes, found.choice, strict=True)) <= budget
        assert found.cost == sum(each[i] for each, i in zip(costs, found.choice, strict=True))


def test_many_things_are_near_the_bound() -> None:
    rng = np.random.default_rng(0)
    bits = np.array([2, 3, 4, 5, 6, 8])
    sizes = [(bits * int(weight) * 4096 + 12345).tolist() for weight in rng.integers(1, 20, 300)]
    costs = [(float(scale) * 4.0**-bits).tolist() for scale in rng.lognormal(0, 2, 300)]
    budget = int(0.5 * sum(each[-1] for each in sizes))
    found = allocate(sizes, costs, budget, exact_work=0)
    assert found.size <= budget
    assert found.cost < 1.01 * found.bound
