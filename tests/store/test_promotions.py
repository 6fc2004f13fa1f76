"""Entries on their way to a faster tier: nobody waits for them, what others write wins, and they are bounded."""

import threading
from collections.abc import Iterator

import pytest
from tier_samples import key

from prolepsis.store import MemoryTier, Tiers, promotions

PATIENCE = 60.0


class Busy(MemoryTier):
    """Takes `key(0)` when it may. `puts`: what it was given; `given`: of which keys, as events."""

    def __init__(self) -> None:
        super().__init__(10_000, "fast")
        self.puts: list[tuple[str, bytes]] = []
        self.given = {key(number): threading.Event() for number in range(10)}
        self.may_take = threading.Event()

    def put(self, key_: str, data: bytes) -> None:
        self.puts.append((key_, data))
        self.given[key_].set()
        if key_ == key(0):
            assert self.may_take.wait(PATIENCE)
        super().put(key_, data)


@pytest.fixture
def fast() -> Busy:
    return Busy()


@pytest.fixture
def tiers(fast: Busy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tiers]:
    """With ten entries in the slower tier, each with a lock of its own; the first is on its way and has not arrived."""
    monkeypatch.setattr("prolepsis.store.tiers.hash", lambda name: int(name[-8:], 16), raising=False)
    slow = MemoryTier(10_000, "slow")
    for number in range(10):
        slow.put(key(number), b"old")
    tiers = Tiers([fast, slow])
    assert tiers.get(key(0)).tier == "slow"  # type: ignore[union-attr]
    assert fast.given[key(0)].wait(PATIENCE)
    yield tiers
    fast.may_take.set()
    tiers.close()


def test_who_reads_does_not_wait_for_the_faster_tier(fast: Busy, tiers: Tiers) -> None:
    assert tiers.get(key(1)).tier == "slow"  # type: ignore[union-attr]
    fast.may_take.set()
    assert tiers.get(key(0)).tier == "fast"  # type: ignore[union-attr]
    assert fast.given[key(1)].wait(PATIENCE)
    assert tiers.get(key(1)).tier == "fast"  # type: ignore[union-attr]


def test_what_is_written_or_deleted_meanwhile_wins(fast: Busy, tiers: Tiers) -> None:
    for number in (1, 2, 3):
        assert tiers.get(key(number)) is not None
    tiers.delete(key(1))
    tiers.put(key(2), b"new")
    fast.may_take.set()
    assert fast.given[key(3)].wait(PATIENCE)  # the last
    assert fast.puts == [(key(0), b"old"), (key(2), b"new"), (key(3), b"old")]
    assert tiers.get(key(1)) is None
    assert tiers.get(key(2)).data == b"new"  # type: ignore[union-attr]


def test_what_is_too_much_is_dropped_and_counted(fast: Busy, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(promotions, "_MOST_BYTES", 6)
    for number in (1, 2, 2, 3, 4):
        assert tiers.get(key(number)).data == b"old"  # type: ignore[union-attr]
    assert tiers.statistics()[0].dropped == 2
    fast.may_take.set()
    assert fast.given[key(2)].wait(PATIENCE)
    assert [name for name, _ in fast.puts] == [key(0), key(1), key(2)]
