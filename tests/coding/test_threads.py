"""Work shared among threads: everything is done once, also within itself, and what goes wrong is said."""

import threading
import weakref

import pytest

from prolepsis.coding.threads import for_each, pause, pausing


@pytest.fixture(params=["1", "2", "7"], autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROLEPSIS_THREADS", request.param)


@pytest.mark.parametrize("count", [0, 1, 2, 100])
def test_each_item_once(count: int) -> None:
    done: list[int] = []
    for_each(count, done.append)
    assert sorted(done) == list(range(count))


def test_within_itself() -> None:
    done: list[tuple[int, int]] = []
    for_each(5, lambda i: for_each(4, lambda j: done.append((i, j))))
    assert sorted(done) == [(i, j) for i in range(5) for j in range(4)]


def test_inner_items_stay_in_their_thread() -> None:
    names: list[set[str]] = []

    def work(_: int) -> None:
        seen = {threading.current_thread().name}
        for_each(20, lambda _: seen.add(threading.current_thread().name))
        names.append(seen)

    for_each(7, work)
    assert [len(seen) for seen in names] == [1] * 7


def test_the_first_failure_is_raised_and_ends_the_rest() -> None:
    done: list[int] = []

    def work(i: int) -> None:
        done.append(i)
        if i == 3:
            raise KeyError(i)

    with pytest.raises(KeyError, match="3"):
        for_each(1000, work)
    assert len(done) < 1000
    for_each(10, done.append)  # and nothing is left behind of it


def test_callers_in_several_threads() -> None:
    done: list[list[int]] = [[], [], [], []]
    callers = [threading.Thread(target=for_each, args=(50, items.append)) for items in done]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [sorted(items) for items in done] == [list(range(50))] * 4


def test_nothing_of_the_work_is_held_when_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the pool may still have to look at a share that nobody needed."""
    monkeypatch.setenv("PROLEPSIS_THREADS", "4")

    class Buffer:
        pass

    def use(buffer: Buffer) -> None:
        for_each(4, lambda _: setattr(buffer, "used", True))

    for _ in range(50):
        buffer = Buffer()
        held = weakref.ref(buffer)
        use(buffer)
        del buffer
        assert held() is None


def test_who_rests_does_so_alone_after_every_item_and_nobody_else_does() -> None:
    seen: list[str] = []

    def work(item: int) -> None:
        seen.append(f"{item} {threading.current_thread().name}")

    name = threading.current_thread().name
    with pausing(lambda: seen.append("rest")):
        for_each(2, work)
        other = threading.Thread(target=pause)
        other.start()
        other.join()
        pause()
    assert seen == [f"0 {name}", "rest", f"1 {name}", "rest", "rest"]
    pause()
    assert len(seen) == 5
