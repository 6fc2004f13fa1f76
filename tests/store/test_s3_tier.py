"""A remote tier on a server that speaks S3: damage, other processes, and what servers and credentials do wrong."""

import os

import pytest
from s3_server import LISTED_AT_ONCE, S3Server
from tier_samples import key

from prolepsis.errors import InputError, TierDamagedError, TierError, TierTimeoutError
from prolepsis.store import open_tiers
from prolepsis.store.remote_tier import RemoteTier
from prolepsis.store.tier import path_of

URL = "s3://bucket/prefix"
_OPENED: list[RemoteTier] = []


@pytest.fixture
def tier(s3: S3Server) -> RemoteTier:
    """One for all tests: it takes a second until it has read how S3 is spoken."""
    if not _OPENED:
        _OPENED.append(RemoteTier(URL, URL))
    return _OPENED[0]


@pytest.mark.parametrize("damage", [b"", b"x", b"PLS1" + bytes(100), "cut short", "the other's"])
def test_damage_is_told_and_deleted(damage: bytes | str, tier: RemoteTier, s3: S3Server) -> None:
    tier.put(key(1), b"abc")
    tier.put(key(2), b"other")
    path, other = (f"bucket/prefix/{path_of(key(number))}" for number in (1, 2))
    if isinstance(damage, str):
        damage = s3.get(path)[:-1] if damage == "cut short" else s3.get(other)
    s3.put(path, damage)
    with pytest.raises(TierDamagedError):
        tier.get(key(1))
    assert tier.get(key(1)) is None
    assert tier.get(key(2)) == b"other"


def test_what_others_do_is_seen_at_once(tier: RemoteTier) -> None:
    other = RemoteTier(URL, "other")
    assert key(3) not in list(tier.keys())
    other.put(key(3), b"abc")
    assert key(3) in list(tier.keys())
    assert tier.size(key(3)) == 3
    other.put(key(3), b"longer")
    assert (tier.size(key(3)), tier.get(key(3))) == (6, b"longer")
    other.delete(key(3))
    assert (tier.size(key(3)), tier.get(key(3))) == (None, None)
    assert key(3) not in list(tier.keys())


def test_more_keys_than_one_answer_lists(tier: RemoteTier, s3: S3Server) -> None:
    keys = {key(number, "many") for number in range(3 * LISTED_AT_ONCE)}
    for each in keys:
        s3.put(f"bucket/prefix/{path_of(each)}", b"x")
    s3.put("bucket/prefix/many/00/strange", b"x")
    assert set(tier.keys("many")) == keys
    assert list(tier.keys("man")) == []
    assert keys <= set(tier.keys())


def test_a_bucket_that_is_missing_is_told_and_not_made(s3: S3Server) -> None:
    tier = RemoteTier("s3://missing/prefix", "s3://missing/prefix")
    calls = [tier.get, tier.size, tier.pin, lambda name: tier.put(name, b""), lambda _: list(tier.keys())]
    for call in calls:
        with pytest.raises(TierError, match="s3://missing/prefix: there is no bucket 'missing': create it"):
            call(key(1))
    assert b"missing" not in s3.get("")
    s3.put("missing")
    tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://", "it names no bucket"),
        ("s3:///prefix", "it names no bucket"),
        ("s3://somebody:not-to-be-shown@bucket/prefix", "credentials come from the environment"),
        ("s3://bucket/prefix?endpoint_url=http://127.0.0.1:1", r"no \? and no #"),
    ],
)
def test_urls_that_s3_would_misunderstand(url: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        open_tiers([url])
    assert "not-to-be-shown" not in str(caught.value)


def test_a_server_that_is_killed_and_comes_back(tier: RemoteTier, s3: S3Server) -> None:
    tier.put(key(1), b"abc")
    s3.kill()
    for call in (tier.get, tier.size, tier.delete, lambda name: tier.put(name, b""), lambda _: list(tier.keys())):
        with pytest.raises(TierError, match=f"{URL}: EndpointConnectionError"):
            call(key(1))
    s3.start()
    s3.put("bucket")
    assert tier.get(key(1)) is None  # at once, although connections have died
    tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"


def test_a_server_that_hangs_costs_a_bounded_wait(
    tier: RemoteTier, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier.put(key(1), b"abc")
    monkeypatch.setattr(tier._call, "_seconds", 0.2)
    s3.freeze()
    try:
        for call in (tier.get, tier.size, lambda name: tier.put(name, b"abc")):
            with pytest.raises(TierTimeoutError, match=f"{URL}: no answer in 0.2 s"):
                call(key(1))
    finally:
        s3.thaw()
    monkeypatch.undo()
    assert tier.get(key(1)) == b"abc"


def test_wrong_credentials_are_told_and_not_shown(tier: RemoteTier, s3: S3Server) -> None:
    s3.check_credentials(True)
    try:
        for call in (tier.get, tier.size, tier.delete, lambda name: tier.put(name, b""), lambda _: list(tier.keys())):
            with pytest.raises(TierError, match=f"{URL}: PermissionError") as caught:
                call(key(1))
            assert not any(os.environ[name] in str(caught.value) for name in s3.environment if "KEY" in name)
    finally:
        s3.check_credentials(False)
