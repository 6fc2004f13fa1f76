"""Sessions in a store: whole again after a restart, each owner's own, never evicted, gone when deleted."""

import asyncio
import random
from dataclasses import replace

import pytest
from stores import AMPLE, GREEDY, UnsoundTier, cached_kv, forget, run, tokens_of

from prolepsis import LLM
from prolepsis.engine import session_manifest, stored_sessions
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_names import SegmentName
from prolepsis.engine.kv_store import KVStore, StoredSegment
from prolepsis.engine.planner import Planner
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.errors import CapacityError, InputError, SegmentError, TierError
from prolepsis.store import MemoryTier, Tiers
from prolepsis.store.breaker import LONGEST_PAUSE, Breaker

TOKENS = random.Random(0).choices(range(1, 1000), k=700)
MESSAGES = [
    {"role": "user", "content": "Ünï \ud7ff"},
    {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]},
]


@pytest.fixture(autouse=True)
def restoring_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model computes so fast that little would be restored."""
    monkeypatch.setattr(Planner, "prefill_s", 1.0)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers([MemoryTier(AMPLE)])


def test_a_session_continues_after_a_restart(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            expected = (await tokens_of(engine, [*TOKENS, 5], salt="other"))[0]
            sessions = StoredSessions(engine)
            saved = await sessions.save("me", "a chat", MESSAGES, TOKENS)
            assert sum(part.tokens for part in saved.parts) == len(TOKENS)
            assert saved.raw_bytes == len(TOKENS) * llm.kv_cache.bytes_per_token > saved.coded_bytes
            assert saved.pinned
            assert await sessions.inspect("me", "a chat") == saved
            before = await engine.call(lambda: cached_kv(llm, TOKENS, "me"))
        forget(llm)
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            [summary] = await sessions.list("me")
            assert summary == saved.summary
            assert (summary.tokens, summary.messages) == (700, 2)
            found = await sessions.restore("me", "a chat")
            assert found is not None
            session, plan = found
            assert session == saved
            assert session.messages == MESSAGES
            assert plan is not None
            assert plan.restored_tokens == len(TOKENS)
            assert await engine.call(lambda: cached_kv(llm, TOKENS, "me")) == before
            assert await tokens_of(engine, [*TOKENS, 5], salt="me") == (expected, len(TOKENS))

    run(work())


def test_nobody_finds_the_sessions_of_others(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            await sessions.save("me", "../../x", MESSAGES, TOKENS[:40])
            assert await sessions.list("you") == []
            assert await sessions.inspect("you", "../../x") is None
            assert await sessions.restore("you", "../../x") is None
            assert not await sessions.delete("you", "../../x")
            assert len(await sessions.list("me")) == 1

    run(work())


def test_segments_of_sessions_outlive_those_of_others_and_go_with_the_last_one(llm: LLM) -> None:
    tier = MemoryTier(1_500_000)
    tiers = Tiers([tier])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            one = await sessions.save("me", "one", MESSAGES, TOKENS)
            two = await sessions.save("me", "two", [], [*TOKENS[:512], 3, 4])
            shared = {part.key for part in one.parts} & {part.key for part in two.parts}
            assert len(shared) == 2
            for number in range(8):
                await tokens_of(engine, [number + 1, *TOKENS])
                assert await engine.flush(60)
            assert tier.usage().evictions > 0
            assert all(tiers.locate(part.key) for part in (*one.parts, *two.parts))
            assert await sessions.delete("me", "one")
            assert {part.key for part in one.parts if tiers.locate(part.key)} == shared
            assert await sessions.delete("me", "two")
            assert not any(tiers.locate(part.key) for part in (*one.parts, *two.parts))
            assert list(tiers.keys("session")) == []
            assert not await sessions.delete("me", "two")

    run(work())


def test_pins_that_were_lost_are_set_again_at_the_start(llm: LLM) -> None:
    tier = MemoryTier(1_500_000)
    tiers = Tiers([tier])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            saved = await StoredSessions(engine).save("me", "one", MESSAGES, TOKENS)
            for key in list(tiers.keys()):
                tiers.unpin(key)
            sessions = StoredSessions(engine)
            for number in range(8):
                await tokens_of(engine, [number + 1, *TOKENS])
                assert await engine.flush(60)
            assert tier.usage().evictions > 0
            assert await sessions.inspect("me", "one") == saved
            assert all(tiers.locate(part.key) for part in saved.parts)

    run(work())


def test_pins_that_were_left_over_are_taken_back_at_the_start(llm: LLM) -> None:
    tier = MemoryTier(AMPLE)
    tiers = Tiers([tier])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            saved = await StoredSessions(engine).save("me", "one", MESSAGES, TOKENS)
            await tokens_of(engine, TOKENS[:300], salt="another")
            assert await engine.flush(60)
            for key in list(tiers.keys("kv")):
                tiers.pin(key)
            StoredSessions(engine)
            ours = {session_manifest.key_of("me", "one"), *(part.key for part in saved.parts)}
            assert set(tier.pinned()) == ours < set(tiers.keys())

    run(work())


def test_a_damaged_session_is_deleted_with_its_segments(llm: LLM) -> None:
    tier = MemoryTier(AMPLE)
    tiers = Tiers([tier])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            for inspected in (False, True):
                await sessions.save("me", "x", [], TOKENS)
                tiers.put(session_manifest.key_of("me", "x"), b"{}")
                if inspected:  # which deletes it
                    assert await sessions.inspect("me", "x") is None
                assert await sessions.delete("me", "x") is not inspected
                assert tier.pinned() == []
                assert await sessions.list("me") == []

    run(work())


def test_what_others_delete_is_not_listed(llm: LLM) -> None:
    tier = MemoryTier(AMPLE)
    tiers = Tiers([tier])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            ours, others = StoredSessions(engine), StoredSessions(engine)
            await others.save("me", "x", [], TOKENS[:300])
            await ours.save("me", "y", [], TOKENS)
            assert {summary.id for summary in await ours.list("me")} == {"x", "y"}
            assert await others.delete("me", "x")
            assert [summary.id for summary in await ours.list("me")] == ["y"]
            assert await ours.restore("me", "y") is not None

    run(work())


def test_a_session_that_a_tier_may_keep_is_not_said_to_be_deleted(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(Breaker.__init__, "__defaults__", (lambda: now[0],))
    away = UnsoundTier("away")
    tiers = Tiers([MemoryTier(AMPLE), away])

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            await sessions.save("me", "x", [], TOKENS[:300], cache_salt="salt")
            away.failing = 1.0
            for _ in range(2):
                with pytest.raises(TierError, match="try again"):
                    await sessions.delete("me", "x")
                with pytest.raises(TierError, match="try again"):
                    await sessions.delete("me", "unknown")
                with pytest.raises(TierError, match="try again"):
                    await sessions.restore("me", "unknown")
                assert await sessions.inspect("me", "x") is not None  # from the other tier
            away.failing = 0.0
            now[0] += LONGEST_PAUSE
            assert [summary.id for summary in await sessions.list("me")] == ["x"]
            assert await sessions.delete("me", "x")
            assert list(tiers.keys()) == []  # of all salts
            assert not await sessions.delete("me", "x")

    run(work())


def test_a_later_save_takes_the_place_of_an_earlier_one(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            first = await sessions.save("me", "chat", MESSAGES[:1], TOKENS[:300])
            later = await sessions.save("me", "chat", MESSAGES, TOKENS)
            assert [summary.messages for summary in await sessions.list("me")] == [2]
            assert first.parts[0] == later.parts[0]
            # Others know of sessions that were saved meanwhile, and keep what they need.
            others = StoredSessions(engine)
            await sessions.save("me", "another", [], TOKENS[:30])
            assert {summary.id for summary in await others.list("me")} == {"chat", "another"}

    run(work())


def test_a_conversation_that_grows_leaves_what_a_session_has(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            assert engine.store is not None
            sessions = StoredSessions(engine)
            saved = await sessions.save("me", "chat", [], TOKENS[:40])
            for length in (80, 100):
                await tokens_of(engine, TOKENS[:length], replace(GREEDY, max_tokens=1), salt="me")
                assert await engine.flush(60)
            names = [engine.store.names(TOKENS[:length], "me")[0].key for length in (40, 80, 100)]
            assert saved.parts[0].key == names[0]
            assert set(tiers.keys("kv")) == {names[0], names[2]}  # the other one holds nothing that is not in these

    run(work())


def test_what_cannot_be_saved_is_refused(llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            with pytest.raises(InputError, match="store"):
                StoredSessions(engine)
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            for bad in ("", "x" * 257, None):
                with pytest.raises(InputError, match="id"):
                    await sessions.save("me", bad, [], TOKENS)  # type: ignore[arg-type]
            with pytest.raises(InputError, match="empty"):
                await sessions.save("me", "x", [], [])
            with pytest.raises(InputError, match="vocabulary"):
                await sessions.save("me", "x", [], [1 << 20])
            with pytest.raises(InputError, match="messages"):
                await sessions.save("me", "x", [{"role": object()}], TOKENS[:20])
            monkeypatch.setattr(stored_sessions, "MAX_SESSIONS", 1)
            await sessions.save("me", "x", [], TOKENS[:20])
            await sessions.save("me", "x", [], TOKENS[:20])
            await sessions.save("you", "x", [], TOKENS[:20])
            with pytest.raises(InputError, match="delete one"):
                await sessions.save("me", "y", [], TOKENS[:20])
        async with AsyncEngine(llm, KVStore(llm, Tiers([MemoryTier(2000)]))) as engine:
            with pytest.raises(CapacityError, match="stored"):
                await StoredSessions(engine).save("me", "x", [], TOKENS)

    run(work())


def test_damaged_manifests_are_left_out_and_those_of_other_models_refused(
    llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            sessions = StoredSessions(engine)
            await sessions.save("me", "x", [], TOKENS[:20])
            await sessions.save("me", "y", [], TOKENS[:20])
            with monkeypatch.context() as patch:
                patch.setattr(stored_sessions, "identity", lambda _: {"file": "another"})
                await sessions.save("me", "z", [], TOKENS[:20])
            with pytest.raises(SegmentError, match="another model"):
                await sessions.restore("me", "z")
            x, y = session_manifest.key_of("me", "x"), session_manifest.key_of("me", "y")
            found = tiers.get(x)
            assert found is not None
            tiers.put(y, found.data)  # another's
            tiers.put(x, found.data[:-1])
            again = StoredSessions(engine)
            assert [summary.id for summary in await again.list("me")] == ["z"]
            assert store.statistics().damaged_segments == 2
            # What no tier would take as a key: at the start, in a list, and where one is deleted.
            strange = found.data.replace(b'"key":"kv-', b'"key":"../')
            tiers.put(x, strange)
            again = StoredSessions(engine)
            assert store.statistics().damaged_segments == 3
            tiers.put(x, strange)
            assert [summary.id for summary in await again.list("me")] == ["z"]
            tiers.put(x, strange)
            assert await again.delete("me", "z")
            assert store.statistics().damaged_segments == 5

    run(work())


def test_a_crowded_pool_takes_longer(llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            await tokens_of(engine, TOKENS, salt="other")
            expected = await engine.call(lambda: cached_kv(llm, TOKENS, "other"))
            look, loop = store.located, asyncio.get_running_loop()

            def lose() -> None:
                if not llm.engine.has_work:
                    forget(llm)

            def crowded(name: SegmentName) -> StoredSegment | None:
                """Others have taken all blocks by the time at which a segment is looked for."""
                asyncio.run_coroutine_threadsafe(engine.call(lose), loop).result()
                return look(name)

            with monkeypatch.context() as patch:
                patch.setattr(store, "located", crowded)
                saved = await StoredSessions(engine).save("me", "x", [], TOKENS)
            await engine.flush()
            assert sum(part.tokens for part in saved.parts) == len(TOKENS)
            plan = await engine.prefetch(TOKENS, "me")
            assert plan is not None
            assert plan.restored_tokens == len(TOKENS), plan
            assert await engine.call(lambda: cached_kv(llm, TOKENS, "me")) == expected

    run(work())


def test_too_little_memory_to_copy_fails_the_save_alone(
    llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short_of_memory(*_: object) -> None:
        raise MemoryError("for this test")

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            with monkeypatch.context() as patch:
                patch.setattr(llm.kv_cache, "read", short_of_memory)
                with pytest.raises(MemoryError, match="for this test"):
                    await asyncio.wait_for(StoredSessions(engine).save("me", "x", [], TOKENS), 60)
            assert not engine.has_failed
            await StoredSessions(engine).save("me", "x", [], TOKENS)

    run(work())


def test_a_part_that_is_lost_meanwhile_is_stored_again(llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            pin, lost = tiers.pin, list[str]()

            def lose(key: str) -> bool:
                if not lost:
                    lost.append(key)
                    tiers.delete(key)
                return pin(key)

            monkeypatch.setattr(tiers, "pin", lose)
            saved = await sessions.save("me", "x", [], TOKENS)
            assert lost
            assert all(tiers.locate(part.key) for part in saved.parts)
            monkeypatch.setattr(tiers, "pin", lambda key: not tiers.delete(key))
            with pytest.raises(CapacityError, match="gone"):
                await sessions.save("me", "y", [], TOKENS)

    run(work())


def test_saves_at_once_do_not_disturb_each_other(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            sessions = StoredSessions(engine)
            lengths = random.Random(1).sample(range(1, 600), 6)
            await asyncio.gather(*(sessions.save("me", str(n), [], TOKENS[:n]) for n in lengths))
            assert {summary.tokens for summary in await sessions.list("me")} == set(lengths)
            for n in lengths:
                session = await sessions.inspect("me", str(n))
                assert session is not None
                assert sum(part.tokens for part in session.parts) == n
                assert all(tiers.locate(part.key) for part in session.parts)
            await tokens_of(engine, TOKENS, GREEDY)

    run(work())
