from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.stopping import StopChecker


def cut_character_by_character(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: the first stop text to be complete cuts; of two complete at once, the longer."""
    for end in range(1, len(text) + 1):
        complete = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(complete)], True
    return text, False


def feed(checker: StopChecker, pieces: list[str]) -> tuple[str, bool]:
    shown = ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        shown += text
        if stopped:
            return shown + checker.flush(), True
    return shown + checker.flush(), False


@st.composite
def texts_in_pieces(draw):
    alphabet = st.sampled_from("abc")
    text = draw(st.text(alphabet, max_size=24))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=8)))
    bounds = [0, *cuts, len(text)]
    return [text[i:j] for i, j in pairwise(bounds)]


@settings(max_examples=400, deadline=None)
@given(texts_in_pieces(), st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4))
@example(["abcd"], ["abcd", "bc"])
@example(["ab", "ab", "ac"], ["abac"])
@example(["xab", "c"], ["abc", "bc"])
def test_any_split_shows_the_text_up_to_the_first_stop(pieces, stops):
    expected = cut_character_by_character("".join(pieces), stops)
    assert feed(StopChecker(SamplingParams(stop=stops)), pieces) == expected


@given(texts_in_pieces(), st.lists(st.text(st.sampled_from("abc"), min_size=1, max_size=5), max_size=4))
def test_no_more_is_held_back_than_could_begin_a_stop(pieces, stops):
    checker = StopChecker(SamplingParams(stop=stops))
    seen = shown = ""
    for piece in pieces:
        text, stopped = checker.push(piece)
        if stopped:
            return
        seen, shown = seen + piece, shown + text
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_text_after_a_stop_is_dropped():
    checker = StopChecker(SamplingParams(stop="\n\n"))
    assert checker.push("One.\n") == ("One.", False)
    assert checker.push("\nTwo.") == ("", True)
    assert checker.push("Three.") == ("", True)
    assert checker.flush() == ""
    assert checker.finish_reason == "stop"


def test_a_beginning_that_comes_to_nothing_is_shown():
    checker = StopChecker(SamplingParams(stop="<|end|>"))
    assert checker.push("a <|en") == ("a ", False)
    assert checker.push("try|>") == ("<|entry|>", False)
    assert checker.push("<|e") == ("", False)
    assert checker.flush() == "<|e"
    assert checker.finish_reason is None


def test_stop_tokens_and_the_models_own_end():
    params = SamplingParams(stop_token_ids=[7], max_tokens=9)
    checker = StopChecker(params, eos_ids=[2])
    assert not checker.accept(5)
    assert checker.accept(7)
    assert checker.finish_reason == "stop"
    assert StopChecker(params, eos_ids=[2]).accept(2)


def test_ignore_eos_leaves_stop_tokens_in_force():
    checker = StopChecker(SamplingParams(stop_token_ids=[7], ignore_eos=True), eos_ids=[2])
    assert not checker.accept(2)
    assert checker.accept(7)


def test_the_length_ends_it_unless_a_stop_came_with_the_last_token():
    checker = StopChecker(SamplingParams(max_tokens=2, stop="x"))
    checker.accept(1)
    assert checker.finish_reason is None
    checker.accept(1)
    assert checker.finish_reason == "length"
    checker.push("x")
    assert checker.finish_reason == "stop"


@pytest.mark.parametrize("text", ["", "no stop here"])
def test_without_stop_texts_nothing_is_held_back(text):
    assert StopChecker(SamplingParams()).push(text) == (text, False)
