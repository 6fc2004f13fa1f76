"""Work spread over threads: as many as were asked for."""

import threading

import pytest

from prolepsis.coding.threads import for_each, limited_to, thread_count


def test_all_threads_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each item waits for the others, so that they would never end one after the other."""
    monkeypatch.setenv("PROLEPSIS_THREADS", "3")
    together = threading.Barrier(3, timeout=30)
    for_each(3, lambda _: together.wait())


def test_a_block_may_ask_for_fewer_or_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "2")
    together = threading.Barrier(4, timeout=30)
    with limited_to(4):
        for_each(4, lambda _: together.wait())
        with limited_to(1):
            used: list[int] = []
            for_each(20, lambda _: used.append(threading.get_ident()))
            assert set(used) == {threading.get_ident()}
        assert thread_count() == 4
    assert thread_count() == 2


def test_a_limit_ends_with_its_block_and_is_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", "5")
    seen: list[int] = []

    def look_and_fail() -> None:
        with limited_to(1):
            other = threading.Thread(target=lambda: seen.append(thread_count()))
            other.start()
            other.join()
            raise ValueError("broken off")

    with pytest.raises(ValueError, match="broken off"):
        look_and_fail()
    assert seen == [5]
    assert thread_count() == 5
