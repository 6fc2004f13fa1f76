"""Which option to take for each of many things, when together they may not be larger than a budget.

ExLlamaV2 chooses bits of matrices so; anything that has a size and a cost for each option can be chosen alike. It is
the multiple-choice knapsack problem (Kellerer, Pferschy and Pisinger 2004, "Knapsack Problems", chapter 11). Where
sizes are few whole units, dynamic programming finds the optimum. Else the options on the lower convex hull of each
thing are taken in the order of what they save for their size: that is the optimum of Lagrange's relaxation, up to the
one step that does not fit any more, and what is left is filled with whatever helps. `Allocation.bound` says how far
that can be off.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.errors import InputError

EXACT_WORK = 100_000_000
"""Up to how many comparisons the optimum is searched."""


def least_bits(sizes: Sequence[Sequence[int]], weights: int, bits: float) -> float | None:
    """The fewest bits a weight, in hundredths, with which `allocate` has a choice: of a budget `int(bits * weights)`.

    None where `bits` are enough. sizes: in bits, as `allocate` takes them.
    """
    least = sum(min(each) for each in sizes)
    if bits * weights >= least:
        return None
    hundredths = -(-100 * least // max(1, weights))
    # A float just below the hundredth that it stands for may be a bit short.
    return next(each for each in (hundredths / 100, (hundredths + 1) / 100) if int(each * weights) >= least)


class Allocation(NamedTuple):
    """choice: for each thing, the number of its option. size, cost: of all of them.

    bound: no choice within the budget costs less; the same as cost where the optimum is known.
    """

    choice: list[int]
    size: int
    cost: float
    bound: float


class _Step(NamedTuple):
    """From an option of a thing to the next one on its hull."""

    saving: float
    thing: int
    option: int


def allocate(
    sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int, exact_work: int = EXACT_WORK
) -> Allocation:
    """Choose so that the sum of costs is small and the sum of sizes at most `budget`.

    sizes, costs: for each thing, of each of its options. Raises InputError where the smallest options are too large
    together.
    """
    least = sum(min(each) for each in sizes)
    if least > budget:
        raise InputError(f"the budget is {budget}, and the smallest options together take {least}")
    extra = [np.array(each, np.int64) - min(each) for each in sizes]
    unit = int(np.gcd.reduce(np.concatenate(extra))) or 1
    cells = (budget - least) // unit
    cells = min(cells, sum(int(each.max()) for each in extra) // unit)
    if (cells + 1) * sum(map(len, sizes)) <= exact_work:
        choice = _exact([each // unit for each in extra], costs, cells)
        return _allocation(sizes, costs, choice, None)
    choice, bound = _by_hulls(sizes, costs, budget)
    return _allocation(sizes, costs, choice, bound)


def _allocation(
    sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], choice: list[int], bound: float | None
) -> Allocation:
    size = sum(each[option] for each, option in zip(sizes, choice, strict=True))
    cost = float(sum(each[option] for each, option in zip(costs, choice, strict=True)))
    return Allocation(choice, size, cost, cost if bound is None else min(bound, cost))


def _exact(sizes: list[NDArray[np.int64]], costs: Sequence[Sequence[float]], cells: int) -> list[int]:
    """The optimum by dynamic programming: `best[c]` is the least cost of the things so far in c cells."""
    best = np.zeros(cells + 1)
    taken = []
    for own, cost in zip(sizes, costs, strict=True):
        tried = np.full((len(own), cells + 1), np.inf)
        for row, size, price in zip(tried, own, cost, strict=True):
            if size <= cells:
                row[size:] = best[: cells + 1 - size] + price
        taken.append(tried.argmin(axis=0).astype(np.uint16))
        best = tried.min(axis=0)
    choice, left = [], cells
    for own, options in zip(reversed(sizes), reversed(taken), strict=True):
        choice.append(int(options[left]))
        left -= int(own[choice[-1]])
    return choice[::-1]


def _by_hulls(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], budget: int) -> tuple[list[int], float]:
    """Options by Lagrange's relaxation, and its bound."""
    hulls = [_hull(*pair) for pair in zip(sizes, costs, strict=True)]
    choice = [hull[0] for hull in hulls]
    left = budget - sum(own[option] for own, option in zip(sizes, choice, strict=True))
    cost = sum(own[option] for own, option in zip(costs, choice, strict=True))
    bound, full = None, set()
    for saving, thing, option in sorted(_steps(hulls, sizes, costs), reverse=True):
        more = sizes[thing][option] - sizes[thing][choice[thing]]
        if more > left and bound is None:
            bound = cost - saving * left
        if more > left or thing in full:
            full.add(thing)
            continue
        left -= more
        cost += costs[thing][option] - costs[thing][choice[thing]]
        choice[thing] = option
    _fill(sizes, costs, choice, left)
    return choice, cost if bound is None else bound


def _hull(sizes: Sequence[int], costs: Sequence[float]) -> list[int]:
    """Options on the lower convex hull of (size, cost), from the smallest to the cheapest."""
    hull: list[int] = []
    for option in sorted(range(len(sizes)), key=lambda i: (sizes[i], costs[i])):
        if hull and costs[option] >= costs[hull[-1]]:
            continue
        while len(hull) > 1 and _saving(sizes, costs, hull[-2], hull[-1]) <= _saving(sizes, costs, hull[-1], option):
            hull.pop()
        hull.append(option)
    return hull


def _saving(sizes: Sequence[int], costs: Sequence[float], one: int, other: int) -> float:
    """What going from an option to a larger one saves for each unit of size; from one that is no smaller, anything."""
    more = sizes[other] - sizes[one]
    return (costs[one] - costs[other]) / more if more else np.inf


def _steps(hulls: list[list[int]], sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]]) -> list[_Step]:
    return [
        _Step(_saving(sizes[thing], costs[thing], one, other), thing, other)
        for thing, hull in enumerate(hulls)
        for one, other in pairwise(hull)
    ]


def _fill(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]], choice: list[int], left: int) -> None:
    """Use what is `left` for single changes, the one that saves most first."""
    while True:
        changes = [
            (costs[thing][now] - cost, thing, option)
            for thing, now in enumerate(choice)
            for option, (size, cost) in enumerate(zip(sizes[thing], costs[thing], strict=True))
            if size - sizes[thing][now] <= left and cost < costs[thing][now]
        ]
        if not changes:
            return
        _, thing, option = max(changes)
        left -= sizes[thing][option] - sizes[thing][choice[thing]]
        choice[thing] = option
