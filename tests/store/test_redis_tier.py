"""A Redis tier: killed and back again while it is in use, full, frozen, damaged, shared."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
from redis_server import RedisServer
from tier_samples import key

from prolepsis.errors import TierDamagedError, TierError, TierFullError, TierTimeoutError
from prolepsis.store import MemoryTier, Tiers, TierStatistics, redis_tier
from prolepsis.store.breaker import FIRST_PAUSE, Breaker
from prolepsis.store.redis_tier import RedisTier


@pytest.fixture
def server() -> Iterator[RedisServer]:
    server = RedisServer()
    yield server
    server.kill()


@pytest.fixture
def tier(server: RedisServer) -> Iterator[RedisTier]:
    tier = RedisTier(server.url, "redis")
    yield tier
    tier.close()


def test_a_server_that_is_killed_while_in_use_and_comes_back(
    server: RedisServer, tier: RedisTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(Breaker.__init__, "__defaults__", (lambda: now[0],))
    tiers = Tiers([tier, MemoryTier(1 << 20)])

    def work(seed: int) -> None:
        for _ in range(20):
            tiers.put(key(seed), key(seed).encode())
            found = tiers.get(key(seed))
            assert found is not None
            assert found.data == key(seed).encode()

    with ThreadPoolExecutor(4) as pool:

        def some_rounds(meanwhile: Callable[[], None] = lambda: None) -> TierStatistics:
            done = pool.map(work, range(4))
            meanwhile()
            list(done)
            return tiers.statistics()[0]

        assert some_rounds().available
        some_rounds(server.kill)
        failed = some_rounds()
        assert not failed.available
        assert 1 <= failed.failures["failed"] <= 4  # calls that were under way
        alone = some_rounds()
        assert alone.failures == failed.failures
        assert alone.skipped > failed.skipped
        server.start()
        now[0] += FIRST_PAUSE
        assert some_rounds().available
    assert tiers.get(key(0)).tier == "redis"  # type: ignore[union-attr]


def test_connections_that_died_meanwhile_are_made_again_at_once(server: RedisServer, tier: RedisTier) -> None:
    tier.put(key(1), b"abc")
    server.kill()
    server.start()
    assert tier.get(key(1)) is None
    tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"


def test_a_server_that_is_not_there_is_an_error_at_once() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        tier = RedisTier(f"redis://127.0.0.1:{probe.getsockname()[1]}", "redis://there")
        with pytest.raises(TierError, match="redis://there"):
            tier.get(key(1))


def test_a_server_that_does_not_answer_costs_a_bounded_wait(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_tier, "_ANSWER_SECONDS", 0.1)
    tier = RedisTier(server.url, "redis")
    tier.put(key(1), b"abc")
    os.kill(server.process_id, signal.SIGSTOP)
    with pytest.raises(TierTimeoutError):
        tier.get(key(1))
    os.kill(server.process_id, signal.SIGCONT)
    assert tier.get(key(1)) == b"abc"


def test_a_server_that_is_full(server: RedisServer, tier: RedisTier) -> None:
    client = redis.Redis(port=server.port)
    client.config_set("maxmemory", "20mb")
    with pytest.raises(TierFullError):  # noqa: PT012 - it is full when it is
        for number in range(40):
            tier.put(key(number), bytes(1 << 20))
    assert tier.get(key(0)) == bytes(1 << 20)
    client.config_set("maxmemory-policy", "allkeys-lru")
    tier.put(key(50), bytes(1 << 20))
    assert tier.get(key(50)) == bytes(1 << 20)


@pytest.mark.parametrize("value", [b"x", b"PLS1" + bytes(100), "the other's", "a list"])
def test_damage_is_told_and_deleted(value: bytes | str, server: RedisServer, tier: RedisTier) -> None:
    client = redis.Redis(port=server.port)
    tier.put(key(2), b"other")
    name = f"prolepsis:{key(1)}"
    if value == "a list":
        client.rpush(name, b"x")
    else:
        client.set(name, client.get(f"prolepsis:{key(2)}") if value == "the other's" else value)
    with pytest.raises(TierDamagedError):
        tier.get(key(1))
    assert tier.get(key(1)) is None
    assert tier.get(key(2)) == b"other"


def test_a_list_in_place_of_an_entry_is_no_failure_of_the_server(server: RedisServer, tier: RedisTier) -> None:
    redis.Redis(port=server.port).rpush(f"prolepsis:{key(1)}", b"x")
    assert tier.size(key(1)) is None
    tier.put(key(1), b"abc")
    assert tier.get(key(1)) == b"abc"


def test_what_others_keep_on_the_server_is_left_alone(server: RedisServer, tier: RedisTier) -> None:
    client = redis.Redis(port=server.port)
    client.set("theirs", b"x")
    client.set(f"prolepsis:{key(1)}-and-more", b"x")
    tier.put(key(1), b"abc")
    assert list(tier.keys()) == [key(1)]
    tier.delete(key(1))
    assert client.get("theirs") == b"x"
