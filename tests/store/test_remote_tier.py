"""A remote tier: damage, hanging calls, what other processes do, whole files only."""

import threading
from pathlib import Path
from typing import Any

import pytest
from tier_samples import key

from prolepsis.errors import TierDamagedError, TierError, TierTimeoutError
from prolepsis.store import remote_tier
from prolepsis.store.remote_tier import RemoteTier
from prolepsis.store.tier import path_of


@pytest.fixture
def tier(tmp_path: Path) -> RemoteTier:
    return RemoteTier(f"file://{tmp_path}/shared", "shared")


@pytest.mark.parametrize("damage", [b"", b"x", b"PLS1" + bytes(100), None])
def test_damage_is_told_and_deleted(damage: bytes | None, tier: RemoteTier, tmp_path: Path) -> None:
    tier.put(key(1), b"abc")
    tier.put(key(2), b"other")
    files = tmp_path / "shared"
    (files / path_of(key(1))).write_bytes((files / path_of(key(2))).read_bytes() if damage is None else damage)
    with pytest.raises(TierDamagedError):
        tier.get(key(1))
    assert tier.get(key(1)) is None
    assert tier.get(key(2)) == b"other"


def test_two_processes_share_a_directory(tier: RemoteTier, tmp_path: Path) -> None:
    other = RemoteTier(f"file://{tmp_path}/shared", "other")
    assert list(tier.keys()) == []
    other.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"
    assert list(tier.keys("segment")) == [key(1)]
    tier.delete(key(1))
    assert other.size(key(1)) is None


def test_no_file_is_seen_before_it_is_whole(tier: RemoteTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = tier._files.pipe_file

    def half(path: str, data: bytes) -> None:
        write(path, data[:10])
        raise OSError("connection lost")

    monkeypatch.setattr(tier._files, "pipe_file", half)
    tier._files.makedirs(str(tmp_path / "shared" / "segment" / "01"))
    with pytest.raises(TierError, match="shared: OSError: connection lost"):
        tier.put(key(1), b"abc")
    assert tier.get(key(1)) is None
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_call_that_hangs_costs_a_bounded_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_tier, "_SECONDS", 0.05)
    tier = RemoteTier(f"file://{tmp_path}/shared", "shared")
    tier.put(key(1), b"abc")
    answer, read = threading.Event(), tier._files.cat_file

    def hang(*arguments: Any, **options: Any) -> bytes:
        answer.wait()
        return read(*arguments, **options)

    monkeypatch.setattr(tier._files, "cat_file", hang)
    try:
        for _ in range(20):  # more than may hang at once
            with pytest.raises(TierTimeoutError, match="shared"):
                tier.get(key(1))
    finally:
        answer.set()
    monkeypatch.setattr(remote_tier, "_SECONDS", 10)
    assert RemoteTier(f"file://{tmp_path}/shared", "shared").get(key(1)) == b"abc"


@pytest.fixture
def strange(tier: RemoteTier, monkeypatch: pytest.MonkeyPatch) -> RemoteTier:
    """Of a package whose errors are its own."""

    class StrangeError(Exception):
        pass

    def fail(*arguments: Any, **options: Any) -> None:
        raise StrangeError("no such bucket")

    for name in ("cat_file", "pipe_file", "info", "rm_file", "find"):
        monkeypatch.setattr(tier._files, name, fail)
    return tier


def test_errors_of_any_kind_are_tier_errors(strange: RemoteTier) -> None:
    calls = [
        strange.get,
        strange.size,
        strange.delete,
        lambda name: strange.put(name, b""),
        lambda _: list(strange.keys()),
    ]
    for call in calls:
        with pytest.raises(TierError, match="StrangeError: no such bucket"):
            call(key(1))
