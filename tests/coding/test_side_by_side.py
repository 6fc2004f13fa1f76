"""Segments side by side: in order, bounded, and with errors in their turn."""

import threading
from dataclasses import dataclass

import pytest

from prolepsis.coding.side_by_side import in_order, segments_at_once


@pytest.mark.parametrize("threads", ["1", "2", "8"])
@pytest.mark.parametrize("at_once", [1, 3, 8])
def test_results_come_in_order_and_no_more_than_asked_are_made_ahead(
    threads: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", threads)
    made: list[int] = []

    def work(i: int) -> int:
        made.append(i)
        return i * i

    for i, result in enumerate(in_order(10, at_once, work)):
        assert result == i * i
        assert len(made) <= i // at_once * at_once + at_once
    assert sorted(made) == list(range(10))


def test_what_work_raises_comes_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "4")

    def work(i: int) -> int:
        if i in (2, 3):
            raise ValueError(str(i))
        return i

    results = in_order(8, 4, work)
    assert [next(results), next(results)] == [0, 1]
    with pytest.raises(ValueError, match="2"):
        next(results)


def test_work_is_done_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each waits for the others, so that they would never end one after the other."""
    monkeypatch.setenv("PROLEPSIS_THREADS", "3")
    together = threading.Barrier(3, timeout=30)
    assert len(list(in_order(3, 3, lambda _: together.wait()))) == 3


@dataclass
class Size:
    """A header, as far as its size counts."""

    raw_bits: int


def test_large_segments_are_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "16")
    for bytes_per_token, expected in ((1 << 10, 16), (1 << 17, 8), (1 << 19, 2), (1 << 22, 1)):
        assert segments_at_once(Size(8 * bytes_per_token)) == expected  # type: ignore[arg-type]
