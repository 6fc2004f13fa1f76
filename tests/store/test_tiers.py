"""Tiers as one: write-through, promotion, pins, failures that stay inside, statistics."""

import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from tier_samples import key

from prolepsis.errors import InputError, TierDamagedError, TierError, TierTimeoutError
from prolepsis.store import Found, MemoryTier, Tiers
from prolepsis.store.breaker import FIRST_PAUSE, LONGEST_PAUSE, Breaker


class Failing(MemoryTier):
    """A tier that raises `error` while there is one."""

    error: TierError | None = None

    def _check(self) -> None:
        if self.error is not None:
            raise self.error

    def put(self, key: str, data: bytes) -> None:
        self._check()
        super().put(key, data)

    def get(self, key: str) -> bytes | None:
        self._check()
        return super().get(key)

    def size(self, key: str) -> int | None:
        self._check()
        return super().size(key)

    def delete(self, key: str) -> None:
        self._check()
        super().delete(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        self._check()
        return super().keys(kind)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """One number: the time that breakers see."""
    now = [1000.0]
    monkeypatch.setattr(Breaker.__init__, "__defaults__", (lambda: now[0],))
    return now


def test_what_is_put_is_in_every_tier_and_found_in_the_fastest() -> None:
    tiers = Tiers([MemoryTier(10_000, "fast"), MemoryTier(10_000, "slow")])
    assert tiers.put(key(1), b"abc").tiers == ("fast", "slow")
    found = tiers.get(key(1))
    assert found is not None
    assert (found.data, found.tier) == (b"abc", "fast")
    located = tiers.locate(key(1))
    assert located is not None
    assert (located.tier, located.size) == ("fast", 3)
    tiers.delete(key(1))
    assert tiers.get(key(1)) is None
    assert tiers.locate(key(1)) is None
    assert [tier.entries for tier in tiers.statistics()] == [0, 0]


def promoted(tiers: Tiers, name: str) -> Found:
    """What is there once it is in the faster tier, too."""
    found = tiers.get(name)
    for thread in threading.enumerate():
        if thread.name == "prolepsis-promote":
            thread.join()
    assert found is not None
    return found


def test_what_a_slow_tier_has_is_promoted() -> None:
    slow = MemoryTier(10_000, "slow")
    slow.put(key(1), b"abc")
    tiers = Tiers([MemoryTier(10_000, "fast"), slow])
    assert [promoted(tiers, key(1)).tier for _ in range(2)] == ["slow", "fast"]
    fast, slow_statistics = tiers.statistics()
    assert (fast.gets, fast.hits, fast.puts, fast.put_bytes) == (2, 1, 1, 3)
    assert (slow_statistics.gets, slow_statistics.hits, slow_statistics.get_bytes) == (1, 1, 3)


def test_keys_come_once_and_by_kind() -> None:
    fast, slow = MemoryTier(10_000), MemoryTier(10_000)
    tiers = Tiers([fast, slow])
    tiers.put(key(1), b"")
    tiers.put(key(2, "session"), b"")
    slow.put(key(3), b"")
    assert sorted(tiers.keys()) == [key(1), key(3), key(2, "session")]
    assert list(tiers.keys("session")) == [key(2, "session")]
    assert list(tiers.keys("sess")) == []


@pytest.mark.parametrize("bad", ["", "segment", "../etc-" + "0" * 64, key(10).upper(), key(1) + "\n", key(1)[:-1]])
def test_a_bad_key_is_refused(bad: str) -> None:
    tiers = Tiers([MemoryTier(10_000)])
    for verb in (tiers.get, tiers.locate, tiers.delete, tiers.pin, tiers.unpin, lambda key: tiers.put(key, b"")):
        with pytest.raises(InputError, match="no key of the store"):
            verb(bad)


def test_a_pin_is_kept_by_the_slowest_tier_that_can() -> None:
    fast, slow = MemoryTier(1000, "fast"), MemoryTier(10_000, "slow")
    tiers = Tiers([fast, slow])
    assert tiers.put(key(0), b"abc", pinned=True).pinned
    for number in range(1, 100):
        tiers.put(key(number), bytes(100))
    assert fast.get(key(0)) is None
    assert slow.get(key(0)) == b"abc"
    tiers.unpin(key(0))
    for number in range(1, 100):
        tiers.put(key(number), bytes(100))
    assert slow.get(key(0)) is None
    assert not tiers.pin(key(0))


def test_an_entry_that_fits_nowhere_is_stored_nowhere_and_counted() -> None:
    tiers = Tiers([MemoryTier(1000)])
    tiers.put(key(1), b"old")
    stored = tiers.put(key(1), bytes(2000), pinned=True)
    assert stored.tiers == ()
    assert not stored.pinned
    assert tiers.get(key(1)) is None
    (statistics,) = tiers.statistics()
    assert statistics.failures == {"full": 1}
    assert statistics.available


def test_a_failing_tier_is_counted_left_alone_and_tried_again(clock: list[float]) -> None:
    failing = Failing(10_000, "failing")
    tiers = Tiers([failing, MemoryTier(10_000, "sound")])
    failing.error = TierTimeoutError("no answer")
    for _ in range(3):
        assert tiers.put(key(1), b"abc").tiers == ("sound",)
    statistics = tiers.statistics()[0]
    assert statistics.failures == {"timeout": 1}
    assert statistics.skipped > 0
    assert not statistics.available
    failing.error = None
    assert tiers.get(key(1)).tier == "sound"  # type: ignore[union-attr]
    clock[0] += FIRST_PAUSE
    assert tiers.put(key(2), b"").tiers == ("failing", "sound")
    assert tiers.statistics()[0].available


def test_a_tier_that_is_left_alone_is_closed_too() -> None:
    failing = Failing(10_000, "failing")
    tiers = Tiers([failing])
    tiers.put(key(1), b"abc")
    failing.error = TierError("gone")
    tiers.get(key(1))
    tiers.close()
    assert failing.usage().entries == 0


@pytest.mark.parametrize("overwritten", [False, True])
def test_what_was_deleted_or_overwritten_while_a_tier_was_away_never_comes_back(
    overwritten: bool, clock: list[float]
) -> None:
    failing = Failing(10_000, "failing")
    sound = MemoryTier(10_000, "sound")
    tiers = Tiers([sound, failing])
    tiers.put(key(1), b"old")
    failing.error = TierError("gone")
    if overwritten:
        tiers.put(key(1), b"new")
        sound.delete(key(1))  # as if evicted
    else:
        tiers.delete(key(1))
    failing.error = None
    clock[0] += FIRST_PAUSE
    assert tiers.get(key(1)) is None
    assert tiers.locate(key(1)) is None
    assert list(tiers.keys()) == []
    tiers.put(key(2), b"")
    assert failing.get(key(1)) is None
    tiers.put(key(1), b"newest")
    assert failing.get(key(1)) == b"newest"


def test_what_a_key_stands_for_outlasts_an_outage(clock: list[float]) -> None:
    failing = Failing(10_000, "failing")
    tiers = Tiers([failing, MemoryTier(10_000, "sound")])
    tiers.put(key(1), b"abc", pinned=True)
    failing.pin(key(1))
    failing.error = TierError("gone")
    assert tiers.put(key(1), b"abc", final=True).tiers == ("sound",)
    assert tiers.get(key(1)).tier == "sound"  # type: ignore[union-attr]
    failing.error = None
    clock[0] += FIRST_PAUSE
    tiers.put(key(2), b"")
    assert tiers.get(key(1)).tier == "failing"  # type: ignore[union-attr]
    assert failing.pinned() == [key(1)]
    assert tiers.pinned() == {key(1)}


def test_who_asks_learns_whether_all_tiers_answer(clock: list[float]) -> None:
    failing = Failing(10_000, "failing")
    tiers = Tiers([MemoryTier(10_000, "sound"), failing])
    tiers.put(key(1), b"abc")
    assert tiers.answer(key(1))
    failing.error = TierError("gone")
    assert not tiers.answer(key(1))
    assert not tiers.delete(key(1))
    failing.error = None
    clock[0] += FIRST_PAUSE
    assert tiers.answer(key(2))
    assert tiers.delete(key(1))


def test_why_a_tier_fails_is_told_once_a_minute_and_without_secrets(
    clock: list[float], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(
        "prolepsis.store.watched_tier.time", SimpleNamespace(monotonic=lambda: clock[0], perf_counter=float)
    )
    failing = Failing(10_000, "failing")
    tiers = Tiers([failing])
    failing.error = TierError("failing: no answer\nof ftp://me:secret@secret@host/path?signature=secret")
    for _ in range(100):
        tiers.get(key(1))
        clock[0] += 1
    assert [record.getMessage() for record in caplog.records] == [
        "a tier of the store fails, and is left alone for a while: failing: no answer of ftp://host/path"
    ] * 2


def test_damage_in_one_tier_is_mended_from_the_next() -> None:
    damaged = Failing(10_000, "damaged")
    tiers = Tiers([damaged, MemoryTier(10_000, "sound")])
    tiers.put(key(1), b"abc")
    tiers.statistics()
    damaged.delete(key(1))
    get = damaged.get
    damaged.get = lambda key: (_ for _ in ()).throw(TierDamagedError("not what was put"))  # type: ignore[method-assign]
    assert promoted(tiers, key(1)).tier == "sound"
    damaged.get = get  # type: ignore[method-assign]
    assert tiers.get(key(1)).tier == "damaged"  # type: ignore[union-attr]
    assert tiers.statistics()[0].failures == {"damaged": 1}


def test_the_pause_of_a_breaker_doubles_up_to_a_minute(clock: list[float]) -> None:
    breaker = Breaker()
    pauses = []
    for _ in range(8):
        assert breaker.allows()
        breaker.failed()
        breaker.failed()  # of a call that began before: not counted
        start = clock[0]
        while not breaker.allows():
            clock[0] += FIRST_PAUSE
        pauses.append(clock[0] - start)
        assert not breaker.allows()  # one at a time
        clock[0] += pauses[-1]  # the one that may try does not come back: another may
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    assert LONGEST_PAUSE == 60
    breaker.succeeded()
    assert breaker.closed


def test_eight_threads_at_once() -> None:
    tiers = Tiers([MemoryTier(5_000, "fast"), MemoryTier(50_000, "slow")])
    wrong: list[object] = []

    def work(seed: int) -> None:
        for step in range(300):
            number = (seed * 7 + step * 13) % 40
            data = bytes([number]) * (number * 10)
            if step % 3 == 0:
                tiers.put(key(number), data, pinned=number < 2)
            elif step % 11 == 0:
                tiers.delete(key(number))
            elif (found := tiers.get(key(number))) and found.data != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    for statistics in tiers.statistics():
        assert statistics.budget is not None
        assert statistics.bytes is not None
        assert statistics.bytes <= statistics.budget
        assert not statistics.failures
    for number in range(40):
        tiers.delete(key(number))
    assert [statistics.bytes for statistics in tiers.statistics()] == [0, 0]
