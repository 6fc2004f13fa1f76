"""Drafts by prompt lookup equal what a search through all of the text would find, however the text came about."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from prolepsis.speculate import ngram
from prolepsis.speculate.drafter import Draft, Draftee
from prolepsis.speculate.ngram import LONGEST, SHORTEST, NgramDrafter

UNUSED: Any = None
TEXT = st.lists(st.integers(0, 3), max_size=60)


def draft(drafter: NgramDrafter, tokens: Sequence[int], limit: int = 8, key: int = 0) -> list[int]:
    drafts = drafter.propose([Draftee(key, tokens, UNUSED, limit, UNUSED)])
    assert drafts == [Draft(drafts[0].tokens, [None] * len(drafts[0].tokens))]
    return drafts[0].tokens


def searched(tokens: Sequence[int], limit: int) -> list[int]:
    """What `draft` should be, by definition: every earlier place compared, token by token."""
    tokens, match, longest = list(tokens), 0, SHORTEST - 1
    for end in range(len(tokens) - 1, 0, -1):
        length = next((i for i in range(end) if tokens[end - 1 - i] != tokens[-1 - i]), end)
        if min(length, LONGEST) > longest:
            match, longest = end, min(length, LONGEST)
    text = tokens[:]
    for i in range(min(limit, longest) if match else 0):
        text.append(text[match + i])
    return text[len(tokens) :]


@pytest.fixture(autouse=True)
def all_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "CANDIDATES", 1000)


@given(TEXT, st.integers(0, 40))
@example([0] * 60, 40)
def test_a_draft_is_what_a_search_finds(tokens: list[int], limit: int) -> None:
    assert draft(NgramDrafter(), tokens, limit) == searched(tokens, limit)


@given(st.lists(st.tuples(st.integers(0, 60), TEXT), max_size=8))
def test_a_sequence_may_grow_and_be_rolled_back_and_go_on_otherwise(changes: list[tuple[int, list[int]]]) -> None:
    drafter, tokens = NgramDrafter(), []
    for kept, new in changes:
        tokens = [*tokens[:kept], *new]
        assert draft(drafter, tokens) == searched(tokens, 8)


def test_a_draft_is_as_long_as_its_match_at_most() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert draft(NgramDrafter(), [*text, 0, 2, 3]) == [4, 5]
    assert draft(NgramDrafter(), [*text, 0, 2, 3, 4]) == [5, 6, 7]
    assert draft(NgramDrafter(), [*text, 0, 2, 3, 4], limit=1) == [5]


def test_a_period_runs_on_into_the_draft() -> None:
    assert draft(NgramDrafter(), [1, 2] * 4) == [1, 2, 1, 2, 1, 2]


def test_of_equal_matches_the_latest_counts() -> None:
    assert draft(NgramDrafter(), [1, 2, 3, 1, 2, 4, 1, 2]) == [4, 1]


def test_few_places_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram, "CANDIDATES", 2)
    far = [5, 1, 2, 3]
    assert draft(NgramDrafter(), [*far, 6, 1, 2, 4, 7, 1, 2, 8, 5, 1, 2], limit=1) == [8]


def test_sequences_do_not_meet() -> None:
    drafter = NgramDrafter()
    assert draft(drafter, [1, 2, 3, 1, 2], key=0) == [3, 1]
    assert draft(drafter, [1, 2], key=1) == []


def test_what_is_forgotten_leaves_nothing() -> None:
    drafter = NgramDrafter()
    draft(drafter, [1, 2, 3, 1, 2])
    drafter.forget(0)
    drafter.forget(0)
    assert drafter._indices == {}


@given(TEXT, TEXT)
def test_a_difference_far_back_does_no_harm(old: list[int], new: list[int]) -> None:
    same = [4] * ngram.COMPARED
    new = (new * len(old))[: len(old)]
    drafter = NgramDrafter()
    draft(drafter, [*old, *same])
    for tokens in ([*new, *same], new, [*new, *same, 5]):
        assert len(draft(drafter, tokens)) <= 8
