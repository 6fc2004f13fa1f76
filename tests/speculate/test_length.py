"""Adaptive draft length on made-up machines and texts: near the best fixed length, never much slower than none."""

import random
from collections.abc import Callable
from itertools import count, pairwise
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prolepsis.speculate.length import ASKED, MOST_PLANNED, MOST_ROWS, PATIENT, DraftLength

Text = Callable[[int, int], float]
"""Probability that a draft is right, by sequence and position in it."""


def high(rows: int) -> float:
    """Seconds of a pass, as measured with 16-bit activations: 1 row 3.7 ms, 4 rows 5.5, 16 rows 19."""
    return (3.7 + 0.6 * (rows - 1) if rows <= 4 else 5.5 + 1.125 * (rows - 4)) * 1e-3


def fast(rows: int) -> float:
    """With 8-bit activations: 1 row 3.5 ms, 16 rows 12."""
    return (3.5 + 0.567 * (rows - 1)) * 1e-3


class Machine(NamedTuple):
    rows: Callable[[int], float]
    """Seconds of a pass."""
    step: float = 0.0
    """Seconds of a step of drafting."""
    noise: float = 0.02
    """Spread of times, and twice the share of those that take half as long again."""


def speed(machine: Machine, text: Text, batch: int = 1, tokens: int = 300, fixed: int | None = None) -> float:
    """Tokens a second for three times `batch` sequences, that many at a time, with adaptive or fixed lengths."""
    random_, control, numbers = random.Random(5), DraftLength(), count()
    live = {next(numbers): 0 for _ in range(batch)}
    waiting, seconds = 2 * batch, 0.0
    while live:
        planned = control.plan(list(live), 255) if fixed is None else [fixed] * len(live)
        lengths = [min(length, tokens - done - 1) for length, done in zip(planned, live.values(), strict=True)]
        rows = len(live) + sum(lengths)
        pass_ = (
            machine.rows(rows) * random_.gauss(1, machine.noise) * (1.5 if random_.random() < machine.noise / 2 else 1)
        )
        seconds += pass_ + max(lengths) * machine.step
        if max(lengths):
            control.observe_draft(max(lengths), max(lengths) * machine.step)
        for key, length in zip(list(live), lengths, strict=True):
            right = 0
            while right < length and random_.random() < text(key, live[key] + right):
                right += 1
            live[key] += right + 1
            if length:  # as the engine: who was not asked tells nothing
                control.observe(key, length, right)
            if live[key] == tokens:
                control.forget(key)
                del live[key]
                if waiting:
                    waiting, live[next(numbers)] = waiting - 1, 0
        control.observe_pass(rows, pass_)
    return 3 * batch * tokens / seconds


def best_fixed(machine: Machine, rate: float, batch: int) -> float:
    """Tokens a second of the best fixed length, expected where every draft is right at the same rate."""

    def expected(length: int) -> float:
        tokens = sum(rate**i for i in range(length + 1))
        return batch * tokens / (machine.rows(batch * (1 + length)) + length * machine.step)

    return max(map(expected, range(MOST_PLANNED + 1)))


MACHINES = [Machine(high), Machine(fast), Machine(high, step=8e-4), Machine(fast, step=8e-4)]
NAMES = ["high", "fast", "high, model", "fast, model"]


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
@pytest.mark.parametrize("batch", [1, 16])
def test_where_drafts_never_hit_less_than_3_percent_is_lost(machine: Machine, batch: int) -> None:
    def never(key: int, at: int) -> float:
        return 0.0

    assert speed(machine, never, batch) > 0.97 * speed(machine, never, batch, fixed=0)


@pytest.mark.parametrize("machine", MACHINES, ids=NAMES)
@pytest.mark.parametrize(("rate", "share"), [(0.5, 0.93), (0.9, 0.95)])
def test_where_drafts_hit_it_is_nearly_as_fast_as_the_best_fixed_length(
    machine: Machine, rate: float, share: float
) -> None:
    assert speed(machine, lambda key, at: rate, tokens=1000) > share * best_fixed(machine, rate, 1)


def test_a_batch_is_worth_fewer_drafts() -> None:
    assert speed(Machine(fast), lambda key, at: 0.9, batch=4) > 0.95 * best_fixed(Machine(fast), 0.9, 4)
    assert speed(Machine(high), lambda key, at: 0.9, batch=16) > 0.95 * best_fixed(Machine(high), 0.9, 16)


def test_a_text_that_changes_is_followed() -> None:
    def changing(key: int, at: int) -> float:
        return 0.95 if at // 100 % 2 else 0.0

    adaptive, *fixed = (speed(Machine(fast), changing, tokens=800, fixed=length) for length in (None, 0, 1, 2, 3, 4))
    assert adaptive > max(fixed)


def test_interruptions_do_not_count() -> None:
    def interrupted(rows: int) -> float:
        return fast(rows) * (20 if next(passes) % 10 == 0 else 1)

    passes = count()
    control = DraftLength()
    for _ in range(100):
        [length] = control.plan([0], 255)
        control.observe(0, length, length)
        control.observe_pass(1 + length, interrupted(1 + length))
    assert control.plan([0], 255) == [MOST_PLANNED]


def learned(control: DraftLength, rates: dict[int, float], rows: Callable[[int], float] = fast) -> None:
    """Let `control` know passes and sequences well."""
    random_ = random.Random(6)
    for _ in range(200):
        lengths = control.plan(list(rates), 255)
        for key, length in zip(rates, lengths, strict=True):
            right = 0
            while right < length and random_.random() < rates[key]:
                right += 1
            control.observe(key, length, right)
        control.observe_pass(len(rates) + sum(lengths), rows(len(rates) + sum(lengths)))


def test_rows_go_where_they_are_worth_most() -> None:
    control = DraftLength()
    learned(control, {0: 0.0, 1: 0.95, 2: 0.6})
    never, often, sometimes = control.plan([0, 1, 2], 255)
    assert never == 0
    assert often > sometimes
    assert control.plan([0, 1, 2], 2) == [0, 2, 0]


def test_what_was_learned_of_some_is_expected_of_others() -> None:
    bad, good = DraftLength(), DraftLength()
    learned(bad, {0: 0.0, 1: 0.0})
    learned(good, {0: 0.95, 1: 0.95})
    assert good.plan([2], 255)[0] > 2
    assert bad.plan([2], 255)[0] <= 1


def trials(control: DraftLength, passes: int, proposed: bool = True) -> list[int]:
    """The passes in which drafts are planned for a sequence that is never right."""
    found = []
    for at in range(passes):
        [length] = control.plan([9], 255)
        if length:
            found.append(at)
            control.observe(9, length if proposed else 0, 0)
    return found


def test_a_draft_is_tried_ever_more_seldom() -> None:
    control = DraftLength()
    learned(control, {0: 0.0})
    tried = trials(control, 2000)
    waits = [later - earlier for earlier, later in pairwise(tried)]
    assert waits[-1] == 513
    assert sorted(waits) == waits


def test_a_trial_waits_until_there_is_something_to_draft() -> None:
    control = DraftLength()
    learned(control, {0: 0.0})
    first, *rest = trials(control, 100, proposed=False)
    patient = list(range(first + 1, first + PATIENT))
    assert rest == patient + list(range(patient[-1] + ASKED, 100, ASKED))


def test_nothing_is_tried_where_it_could_not_pay() -> None:
    control = DraftLength()
    learned(control, {0: 0.0})
    for _ in range(20):
        for rows in range(1, 2 + MOST_PLANNED):
            control.observe_pass(rows, 1e-3 * rows)
    assert control.plan([9], 255) == [0]
    assert trials(control, 1000) == []


def test_what_a_draft_model_reads_first_is_no_step() -> None:
    control = DraftLength()
    for seconds in (1.0, 1e-3, 1e-3):
        [length] = control.plan([0], 255)
        assert length > 0
        control.observe_draft(length, length * seconds)
        control.observe(0, length, length)
        control.observe_pass(1 + length, fast(1 + length))


def test_nothing_is_left_of_what_has_ended() -> None:
    control = DraftLength()
    control.plan([0, 1], 255)
    control.forget(0)
    control.forget(1)
    control.observe(1, 3, 2)
    control.forget(7)
    assert control._sequences == {}


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(-1, 300), st.floats(1e-6, 10), st.integers(0, 16)), max_size=30),
)
def test_limits_hold_and_the_same_news_lead_to_the_same_plan(news: list[tuple[int, int, float, int]]) -> None:
    controls = DraftLength(), DraftLength()
    for keys, rows, seconds, right in news:
        plans = [control.plan(range(keys), rows) for control in controls]
        assert plans[0] == plans[1]
        assert sum(plans[0]) <= max(rows, 0)
        assert all(0 <= length <= MOST_PLANNED for length in plans[0])
        for control in controls:
            control.observe_draft(max(plans[0]), seconds / 10)
            for key, length in enumerate(plans[0]):
                control.observe(key, length, min(length, right))
            control.observe_pass(keys + sum(plans[0]), seconds)


def test_more_rows_than_a_pass_has_are_not_planned() -> None:
    control = DraftLength()
    learned(control, dict.fromkeys(range(3), 0.95), rows=lambda rows: 1e-3)
    assert sum(control.plan(range(250), 1000)) <= MOST_ROWS - 250
    assert control.plan(range(300), 1000) == [0] * 300
    assert control.plan([], 100) == []


def test_who_has_no_guess_is_asked_less_often():
    control = DraftLength()
    control.observe_pass(1, 4e-3)

    def asked(passes, drafted):
        """In which passes it was asked, where each time it drafts and all is accepted, or has no guess."""
        found = []
        for number in range(passes):
            [length] = control.plan([0], 255)
            control.observe_pass(1 + drafted, 4e-3)
            if length:
                control.observe(0, drafted, drafted)
                found.append(number)
        return found

    first = asked(PATIENT + 40, 0)
    assert first[:PATIENT] == list(range(PATIENT))
    assert len(first[PATIENT:]) == 40 // ASKED
    assert len(asked(40, 2)) >= 40 - ASKED
