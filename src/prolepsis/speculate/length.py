"""How many tokens to draft for each sequence: as many as make the batch as a whole fastest, by what was measured.

A draft of k tokens, each accepted with probability a if those before it are, yields a + a^2 + ... + a^k more tokens
(Leviathan et al. 2022, arXiv:2211.17192, equation 1). Here the first has a probability of its own: a draft by lookup
either follows the right text, and goes on doing so, or fails at once. What a pass takes is measured for each number of
rows. Drafts change the speed and never the tokens, so nothing of this shows in a result.
"""

from collections import deque
from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np
from numpy.typing import NDArray

MOST_PLANNED = 16
"""For one sequence in one pass."""

MOST_ROWS = 256
"""Of a pass with drafts."""

GAIN = 1.02
"""Drafts have to make a pass yield so many times the tokens a second: what is known is never quite right."""

KEPT_OF_SEQUENCE, KEPT_OF_ALL = 0.85, 0.99
"""How much a draft counts when the next one is known: for its own sequence, and for what new ones may expect."""

SUPPOSED, WEIGHT = 0.6, 8.0
"""Acceptance where nothing is known, and how many drafts this, or what is known of other sequences, counts for."""

REVIEWED = 16
"""Passes after which lengths are thought over even though no draft was settled."""

FIRST_WAIT, LONGEST_WAIT = 8, 512
"""Passes without a draft after which one is tried; twice as many after each that failed."""

PATIENT, ASKED = 12, 4
"""Passes in a row without a guess, though one was asked for, after which only each fourth asks: asking takes time."""

TRIED = 0.01
"""What may be spent on trying, as a share of the tokens."""

MOST_CREDIT = 16.0
"""Tokens' worth of trying that can be saved up."""

CHEAPEST = 0.1
"""Tokens that a tried draft costs at least, since what it takes is the difference of two uncertain times."""

RECENT = 15
"""Times that a median is taken of, so that interruptions do not count."""

FLOOR = 4.0
"""A pass is supposed to cost what its rows do, and this many more; what was measured is known relative to that."""

LIKENESS = 12.0
"""What a time tells about a pass of other rows: (fewer / more) ** LIKENESS."""

REMEMBERED = 0.999
"""How much a time weighs one pass later."""


class DraftLength:
    """Decides for one engine. The same observations lead to the same decisions."""

    def __init__(self) -> None:
        self._passes = _PassTimes()
        self._steps: deque[float] = deque(maxlen=RECENT)
        """Seconds of drafting a token for all that are drafted for."""
        self._steady = False
        """Whether all that are drafted for were in the pass before. For others a draft model has tokens to catch up
        with, which is not what a step takes."""
        self._all = _Rates(KEPT_OF_ALL)
        self._sequences: dict[int, _Sequence] = {}
        self._credit = 0.0
        self._price = 1.0
        """What a tried draft costs, in tokens."""
        self._can_pay = True
        """Whether drafts would make these sequences faster if all were right."""
        self._worth: list[int] = []
        """What would be planned if nothing were tried."""
        self._asked: list[int] = []
        """The sequences and rows this is true of; empty when there is news."""
        self._age = 0

    def plan(self, keys: Sequence[int], rows_available: int) -> list[int]:
        """How many tokens to draft for each sequence of the next pass, together at most `rows_available`."""
        rows = min(rows_available, MOST_ROWS - len(keys), MOST_PLANNED * len(keys))
        if rows <= 0:
            return [0] * len(keys)
        sequences = [self._sequences.setdefault(key, _Sequence()) for key in keys]
        asked = [*keys, rows]
        if asked != self._asked or self._age >= REVIEWED:
            self._think(sequences, rows)
            self._asked, self._age = asked, 0
        self._age += 1
        lengths = self._worth.copy()
        self._credit = min(self._credit + TRIED * len(keys), MOST_CREDIT)
        waited = [each.waits(length) for each, length in zip(sequences, lengths, strict=True)]
        if self._can_pay and any(waited):
            self._try(sequences, waited, lengths, rows)
        lengths = [length if length and each.asks() else 0 for each, length in zip(sequences, lengths, strict=True)]
        self._steady = True
        for sequence, length in zip(sequences, lengths, strict=True):
            self._steady &= not length or sequence.drafting
            sequence.drafting = length > 0
        return lengths

    def observe_pass(self, rows: int, seconds: float) -> None:
        """What a pass of so many rows took that held no prompts, sampling included and drafting not."""
        self._passes.observe(rows, seconds)

    def observe_draft(self, steps: int, seconds: float) -> None:
        """What it took to draft, where the longest draft had `steps` tokens."""
        if steps and self._steady:
            self._steps.append(seconds / steps)

    def observe(self, key: int, drafted: int, accepted: int) -> None:
        """How many tokens were drafted for a sequence, possibly none for want of a guess, and how many accepted."""
        sequence = self._sequences.get(key)
        if sequence is not None:
            sequence.guessed(drafted)
        if not drafted:
            return
        self._asked = []
        self._all.observe(drafted, accepted)
        if sequence is not None:
            sequence.rates.observe(drafted, accepted)
            if sequence.waiting:
                self._credit -= drafted * self._price - accepted
                sequence.tried(drafted, accepted)

    def forget(self, key: int) -> None:
        """The sequence has ended. Unknown keys are fine."""
        self._sequences.pop(key, None)
        self._asked = []

    def _think(self, sequences: Sequence["_Sequence"], rows: int) -> None:
        count = len(sequences)
        passes = self._passes.estimate(count, count + rows)
        step = median(self._steps) if self._steps else 0.0
        self._worth = self._most_worth(sequences, passes, step)
        self._price = max((passes[1] - passes[0] + step) * count / passes[0], CHEAPEST)
        self._can_pay = _can_pay(count, passes, step)

    def _most_worth(self, sequences: Sequence["_Sequence"], passes: NDArray[np.float64], step: float) -> list[int]:
        """The lengths with the most expected tokens a second: drafts are added in the order of what they yield.

        passes: seconds of a pass with no drafts, one, and so on. step: seconds of drafting a token for all.
        """
        count, rows = len(sequences), len(passes) - 1
        supposed = self._all.estimate(SUPPOSED)
        rates = np.array([each.rates.estimate(*supposed) for each in sequences])
        gains = (rates[:, :1] * rates[:, 1:] ** np.arange(MOST_PLANNED)).ravel()
        order = (-gains).argsort(kind="stable")[:rows]
        tokens, seconds = np.full(rows + 1, float(count)), passes.copy()
        tokens[1:] += gains[order].cumsum()
        seconds[1:] += step * np.maximum.accumulate(order % MOST_PLANNED + 1)
        worth = tokens / seconds
        best = int(worth.argmax())
        if worth[best] < GAIN * worth[0]:
            return [0] * count
        return np.bincount(order[:best] // MOST_PLANNED, minlength=count).tolist()

    def _try(self, sequences: Sequence["_Sequence"], waited: list[bool], lengths: list[int], rows: int) -> None:
        """Set the lengths of those that have waited, as far as there are rows and credit."""
        left = max(min(rows - sum(lengths), int(self._credit / self._price)), 0)
        for i, sequence in enumerate(sequences):
            if waited[i]:
                lengths[i] = min(sequence.trial, left)
                left -= lengths[i]


def _can_pay(count: int, passes: NDArray[np.float64], step: float) -> bool:
    """Whether drafts for `count` sequences would make them faster if all were right."""
    drafts = np.arange(len(passes))
    worth = (count + drafts) / (passes + step * -(-drafts // count))
    return bool(worth.max() >= GAIN * worth[0])


class _Rates:
    """How often the first token of a draft is accepted, and how often one is that comes after an accepted one."""

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._first = self._first_known = self._later = self._later_known = 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        self._first = self._kept * self._first + (accepted > 0)
        self._first_known = self._kept * self._first_known + 1
        self._later = self._kept * self._later + max(accepted - 1, 0)
        self._later_known = self._kept * self._later_known + min(accepted, drafted - 1)

    def estimate(self, first: float, later: float | None = None) -> tuple[float, float]:
        """Both rates, where `first` and `later` are supposed; if the latter is not, it is like the first."""
        first = (self._first + WEIGHT * first) / (self._first_known + WEIGHT)
        later = first if later is None else later
        return first, (self._later + WEIGHT * later) / (self._later_known + WEIGHT)


class _Sequence:
    """What is known of one sequence, and when to try a draft although none seems to be worth it."""

    def __init__(self) -> None:
        self.rates = _Rates(KEPT_OF_SEQUENCE)
        self.drafting = False
        """Whether it was to be drafted for in the last pass."""
        self._idle = 0
        self._wait = FIRST_WAIT
        self._hits = 0
        self._misses = self._skipped = 0

    def asks(self) -> bool:
        """Whether to ask for a guess in this pass, where one is wanted."""
        self._skipped += 1
        if self._misses >= PATIENT and self._skipped < ASKED:
            return False
        self._skipped = 0
        return True

    def guessed(self, drafted: int) -> None:
        """What came of asking."""
        self._misses = 0 if drafted else self._misses + 1

    @property
    def waiting(self) -> bool:
        """Whether it has been without drafts for long enough."""
        return self._idle > self._wait

    @property
    def trial(self) -> int:
        """How many tokens to try: more after those that were right."""
        return min(1 + self._hits, MOST_PLANNED)

    def waits(self, worth: int) -> bool:
        """Count a pass, where drafts of `worth` tokens seem to be worth it. Returns `waiting`."""
        if worth:
            self._idle, self._wait, self._hits = 0, FIRST_WAIT, 0
        else:
            self._idle += 1
        return self.waiting

    def tried(self, drafted: int, accepted: int) -> None:
        """A draft that was right is followed by another at once."""
        if accepted == drafted:
            self._hits, self._wait = self._hits + accepted, FIRST_WAIT
        else:
            self._hits, self._idle, self._wait = 0, 0, min(2 * self._wait, LONGEST_WAIT)


class _PassTimes:
    """What a pass takes, by its rows: the median of recent ones at each number, smoothed over numbers that are near."""

    def __init__(self) -> None:
        self._recent: dict[int, deque[float]] = {}
        """Seconds for each number of rows, in units of the supposed cost."""
        self._known = np.zeros((MOST_ROWS + 1, 2))
        """For each number of rows: weight times median, and weight."""
        self._new: set[int] = set()
        self._passes = 0
        """Observed since `_known` was right."""

    def observe(self, rows: int, seconds: float) -> None:
        if rows <= MOST_ROWS:
            self._recent.setdefault(rows, deque(maxlen=RECENT)).append(seconds / (FLOOR + rows))
            self._new.add(rows)
            self._passes += 1

    def _update(self) -> None:
        self._known *= REMEMBERED**self._passes
        for rows in self._new:
            recent = self._recent[rows]
            self._known[rows] = len(recent) * median(recent), len(recent)
        self._new.clear()
        self._passes = 0

    def estimate(self, first: int, last: int) -> NDArray[np.float64]:
        """Seconds for first, first + 1, ... last rows, never falling; of any unit before the first was observed."""
        supposed = np.arange(FLOOR + first, FLOOR + last + 1, dtype=np.float64)
        if not self._recent:
            return supposed
        self._update()
        known = _likeness()[first : last + 1] @ self._known
        return np.maximum.accumulate(supposed * known[:, 0] / known[:, 1])


@cache
def _likeness() -> NDArray[np.float64]:
    """What the time of a pass with so many rows (second axis) tells about others (first axis): float64 [rows, rows]."""
    rows = np.maximum(np.arange(MOST_ROWS + 1), 1)
    return (np.minimum.outer(rows, rows) / np.maximum.outer(rows, rows)) ** LIKENESS
