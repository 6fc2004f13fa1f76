"""Servers with one remote tier: each sees at once what another saves, overwrites and deletes there."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from stores import AMPLE, UnsoundTier, run

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.session_manifest import key_of
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.store import MemoryTier, Tiers, open_tiers

TOKENS = random.Random(0).choices(range(1, 1000), k=700)


@pytest.fixture
def other_llm(tiny: Path) -> LLM:
    """Of another server: no two engines run one model at once."""
    return LLM(tiny)


@pytest.fixture(params=["memory", "disk"])
def pairs(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[list[Tiers]]:
    """The tiers of two servers, each with a fast one of its own before the shared one."""
    own = {"memory": ["memory:8MiB"] * 2, "disk": [f"disk:{tmp_path}/{name}:8MiB" for name in "ab"]}[request.param]
    tiers = [open_tiers([spec, f"file://{tmp_path}/shared"]) for spec in own]
    yield tiers
    for each in tiers:
        each.close()


def test_what_another_server_overwrites_or_deletes_is_seen(llm: LLM, other_llm: LLM, pairs: list[Tiers]) -> None:
    async def work() -> None:
        async with (
            AsyncEngine(llm, KVStore(llm, pairs[0])) as engine,
            AsyncEngine(other_llm, KVStore(other_llm, pairs[1])) as other,
        ):
            ours, theirs = StoredSessions(engine), StoredSessions(other)
            first = await ours.save("me", "x", [], TOKENS)
            assert await ours.list("me") == await theirs.list("me") == [first.summary]
            later = await theirs.save("me", "x", [], TOKENS[:300])
            assert await ours.inspect("me", "x") == later
            assert await ours.list("me") == [later.summary]
            assert await theirs.delete("me", "x")
            assert await ours.inspect("me", "x") is None
            assert await ours.restore("me", "x") is None
            assert await ours.list("me") == []
            assert not await ours.delete("me", "x")
            await ours.save("me", "x", [], TOKENS)
            await theirs.save("me", "x", [], TOKENS[:300])
            assert await ours.delete("me", "x")  # with what the other saved, which was not listed here
            assert await theirs.list("me") == []
            assert list(pairs[1].keys("session")) == []

    run(work())


class _Remote(UnsoundTier):
    kind = "remote"


def test_a_session_saved_while_the_remote_tier_is_away_stays_where_it_is() -> None:
    remote = _Remote("remote", failing=1.0)
    key, fast = key_of("me", "x"), MemoryTier(AMPLE)
    tiers = Tiers([fast, remote])
    assert tiers.put(key, b"first", pinned=True, by_others=True).tiers == ("memory",)
    remote.failing = 0.0
    again = Tiers([fast, remote])
    found = again.get(key, by_others=True)
    assert found is not None
    assert (found.data, found.tier) == (b"first", "memory")  # that the remote one lacks it proves nothing
    assert again.put(key, b"second", pinned=True, by_others=True).tiers == ("remote",)
    assert fast.get(key) is None
    found = again.get(key, by_others=True)
    assert found is not None
    assert (found.data, found.tier) == (b"second", "remote")
