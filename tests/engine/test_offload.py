"""Prefixes in a store: what comes back are the bits that left, or they are computed again; tokens never change."""

import asyncio
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from stores import AMPLE, GREEDY, UnsoundTier, cached_kv, forget, run, tokens_of
from test_profiles import TEXTS, calibrated

from prolepsis import LLM, SamplingParams
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_payload import PayloadCodec
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.planner import Planner
from prolepsis.engine.profile_store import keep
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.store import MemoryTier, Tiers

DRAW = random.Random(0)
PROMPT = DRAW.choices(range(1, 1000), k=900)


@pytest.fixture
def tiers() -> Tiers:
    return Tiers([MemoryTier(AMPLE)])


@pytest.fixture(autouse=True)
def restoring_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model computes so fast that little would be restored."""
    monkeypatch.setattr(Planner, "prefill_s", 1.0)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("prolepsis-store")] == []


async def stored_and_forgotten(engine: AsyncEngine, llm: LLM) -> list[int]:
    """What follows PROMPT, of which the store has all K and V afterwards, and the pool none."""
    first, _ = await tokens_of(engine, PROMPT)
    assert await engine.flush(60)
    await engine.call(lambda: forget(llm))
    return first


def test_a_prompt_is_restored_in_another_process_to_the_same_bits(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            first, cached = await tokens_of(engine, PROMPT)
            assert cached == 0
            assert await engine.flush(60)
            conversation = [*PROMPT, *first]
            held, before = await engine.call(lambda: cached_kv(llm, conversation))
            assert held == len(conversation) - 1
        done = store.statistics()
        assert (done.stored_segments, done.stored_tokens, done.missed_segments) == (4, held, 0)
        assert done.stored_raw_bytes == held * llm.kv_cache.bytes_per_token == sum(map(len, before))
        assert done.ratio == done.stored_raw_bytes / done.stored_coded_bytes > 1

        forget(llm)
        again = KVStore(llm, tiers)
        async with AsyncEngine(llm, again) as engine:
            assert await tokens_of(engine, PROMPT) == (first, len(PROMPT) - 1)
            await engine.call(lambda: forget(llm))
            stream = engine.generate([*conversation, 5], GREEDY)
            async for _ in stream:
                pass
            assert stream.completion.cached_tokens == held
            plan = stream.completion.statistics.restore
            assert plan is not None
            assert (plan.reason, plan.restored_tokens, plan.stored_tokens) == ("restore_is_faster", held, held)
            assert (plan.tier, plan.predictor, plan.pool_tokens) == ("memory", "static", 0)
            assert (await engine.call(lambda: cached_kv(llm, conversation[:held])))[1] == before
        assert again.statistics().decisions == {"restore_is_faster": 2}
        assert again.statistics().restored_segments == 8

    run(work())


def test_a_report_says_which_tier_it_was_but_not_its_address(llm: LLM) -> None:
    async def work() -> None:
        tiers = Tiers([UnsoundTier("memory://one.example", failing=1.0), UnsoundTier("memory://other.example")])
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
            await engine.call(lambda: forget(llm))
            plan = await engine.prefetch(PROMPT)
            assert plan is not None
            assert (plan.reason, plan.summary()["tier"]) == ("restore_is_faster", "memory_2")

    run(work())


def test_what_begins_alike_is_restored_as_far_as_it_does(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
            for same in (100, 256, 300, 512, 880):
                await engine.call(lambda: forget(llm))
                other = [*PROMPT[:same], *([1001] * 40)]
                assert (await tokens_of(engine, other))[1] == same
            await engine.call(lambda: forget(llm))
            assert (await tokens_of(engine, PROMPT[:700]))[1] == 699

    run(work())


def test_the_store_goes_on_where_the_pool_ends(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
            await engine.call(lambda: forget(llm))
            await tokens_of(engine, PROMPT[:330], replace(GREEDY, max_tokens=1))
            stream = engine.generate(PROMPT, GREEDY)
            async for _ in stream:
                pass
            plan = stream.completion.statistics.restore
            assert plan is not None
            assert (plan.pool_tokens, plan.restored_tokens) == (330, len(PROMPT) - 1 - 330)

    run(work())


def test_salts_never_share(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            await tokens_of(engine, PROMPT, salt="a")
            assert await engine.flush(60)
            await engine.call(lambda: forget(llm))
            assert (await tokens_of(engine, PROMPT, salt="b"))[1] == 0
            assert (await tokens_of(engine, PROMPT))[1] == 0
            assert (await tokens_of(engine, PROMPT, salt="a"))[1] == len(PROMPT) - 1

    run(work())


@pytest.mark.parametrize("dtype", ["fp16", "fp8_e4m3", "int8", "int4", "kivi4"])
def test_every_cache_comes_back_to_the_bit(tiny: Path, dtype: str) -> None:
    tokens = PROMPT[:700]

    async def work(llm: LLM) -> None:
        async with AsyncEngine(llm, KVStore(llm, Tiers([MemoryTier(AMPLE)]))) as engine:
            first, _ = await tokens_of(engine, tokens)
            assert await engine.flush(60)
            held, before = await engine.call(lambda: cached_kv(llm, tokens))
            await engine.call(lambda: forget(llm))
            assert await tokens_of(engine, tokens) == (first, llm.kv_cache.readable(len(tokens) - 1))
            assert await engine.call(lambda: cached_kv(llm, tokens)) == (held, before)
        llm.kv_cache.check([])

    run(work(LLM(tiny, kv_memory=1 << 22, kv_dtype=dtype)))


def test_other_arithmetic_finds_nothing(llm: LLM, tiny: Path, tiers: Tiers) -> None:
    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, tiers)) as engine:
            await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
        for other in (LLM(tiny, kv_memory=1 << 22, precision="fast"), LLM(tiny, kv_memory=1 << 22, kv_dtype="fp16")):
            async with AsyncEngine(other, KVStore(other, tiers)) as engine:
                assert (await tokens_of(engine, PROMPT))[1] == 0

    run(work())


@pytest.mark.parametrize("segment", range(4))
def test_damaged_bytes_are_counted_deleted_and_computed_again(llm: LLM, segment: int) -> None:
    tier = MemoryTier(AMPLE)
    tiers = Tiers([tier])

    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            first = await stored_and_forgotten(engine, llm)
            name = store.names([*PROMPT, *first[:-1]], "")[segment]
            data = bytearray(tier.get(name.key) or b"")
            data[DRAW.randrange(len(data))] ^= 0x10
            tier.put(name.key, bytes(data))
            assert await tokens_of(engine, PROMPT) == (first, 256 * segment)
            assert store.statistics().damaged_segments == 1
            assert store.statistics().decisions == {"nothing_stored": 1, "damaged": 1}
            assert await engine.flush(60)
            assert tier.get(name.key) not in (None, bytes(data))

    run(work())


def test_a_payload_under_another_name_is_not_taken_for_it(llm: LLM) -> None:
    """Equal ids after another beginning are not enough."""
    tier = MemoryTier(AMPLE)
    other = [7, *PROMPT[1:]]

    async def work() -> None:
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            expected, _ = await tokens_of(engine, other, salt="unseen")
            await tokens_of(engine, PROMPT)
            await tokens_of(engine, other[:256], replace(GREEDY, max_tokens=1))
            assert await engine.flush(60)
            await engine.call(lambda: forget(llm))
            mine, theirs = store.names(PROMPT[:512], "")[1], store.names(other[:512], "")[1]
            tier.put(theirs.key, tier.get(mine.key) or b"")
            assert await tokens_of(engine, other) == (expected, 256)
            assert store.statistics().damaged_segments == 1

    run(work())


class Stuck(MemoryTier):
    """Gives nothing back before it is told to."""

    def __init__(self) -> None:
        super().__init__(AMPLE)
        self.asked, self.free = threading.Event(), threading.Event()
        self.free.set()

    def get(self, key: str) -> bytes | None:
        self.asked.set()
        assert self.free.wait(60)
        return super().get(key)


def test_a_tier_that_does_not_answer_costs_a_bounded_wait(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Stuck()

    async def work() -> None:
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            first = await stored_and_forgotten(engine, llm)
            monkeypatch.setattr("prolepsis.engine.restorer._SHORTEST_WAIT", 0.05)
            monkeypatch.setattr(Planner, "prefill_s", 1e-9)
            monkeypatch.setattr(Planner, "skip_look_up", lambda *_: None)
            monkeypatch.setattr(Planner, "restore_s", lambda *_: 0.0)
            tier.free.clear()
            assert await tokens_of(engine, PROMPT) == (first, 0)
            tier.free.set()
            assert store.statistics().decisions["timed_out"] == 1

    run(work())


class Unhurried(Stuck):
    """Counts what restores ask of it, and lets them wait as well."""

    asked_size = 0

    def size(self, key: str) -> int | None:
        if threading.current_thread().name.startswith("prolepsis-restore"):
            self.asked_size += 1
            assert self.free.wait(60)
        return super().size(key)


class Asked(MemoryTier):
    """Takes its time for each question, and knows how many it had at a time, and from which threads."""

    kind = "remote"
    now = most = 0

    def __init__(self) -> None:
        super().__init__(AMPLE)
        self.threads: list[str] = []
        self._counting = threading.Lock()

    def size(self, key: str) -> int | None:
        with self._counting:
            self.threads.append(threading.current_thread().name)
            self.now += 1
            self.most = max(self.most, self.now)
        time.sleep(0.005)
        with self._counting:
            self.now -= 1
        return super().size(key)


@pytest.mark.parametrize(("held", "gap"), [(0, None), (300, None), (0, 0), (0, 1), (0, 17), (600, 17), (0, 39)])
def test_look_ups_of_a_slow_tier_go_together_up_to_the_first_gap(llm: LLM, held: int, gap: int | None) -> None:
    tier, tokens = Asked(), random.Random(4).choices(range(1, 1000), k=40 * 256)
    store = KVStore(llm, Tiers([tier]))
    names = store.names(tokens, "")
    for number, name in enumerate(names):
        if number != gap:
            tier.put(name.key, b"x")
    with ThreadPoolExecutor(16) as pool:
        pieces = store.look_up(tokens, "", held, several=pool.map)
    first = held // 256
    assert [piece.name for piece in pieces] == names[first:gap]
    assert sum(piece.piece.tokens for piece in pieces) == len(names[first:gap]) * 256 - (held % 256 if pieces else 0)
    assert len(tier.threads) <= 2 * len(pieces) + 1
    assert tier.most > 1 or len(pieces) < 2


def test_what_is_computed_sooner_than_asked_for_is_not_asked_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Asked()

    async def work() -> None:
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            first = await stored_and_forgotten(engine, llm)
            monkeypatch.setattr(Planner, "prefill_s", 1e-9)
            tier.threads.clear()
            stream = engine.generate(PROMPT, GREEDY)
            assert [delta.token.token async for delta in stream] == first
            plan = stream.completion.statistics.restore
            assert plan is not None
            assert (plan.reason, plan.stored_tokens) == ("recompute_is_faster", 0)
            assert plan.restore_s is not None
            assert plan.restore_s >= 0.01  # two questions
            assert not any(name.startswith(("prolepsis-restore", "prolepsis-fetch")) for name in tier.threads)

    run(work())


def test_a_slow_tier_hides_no_faster_one(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where to ask all of them would take longer than computing."""
    near, far = MemoryTier(AMPLE, "near"), MemoryTier(AMPLE, "far")

    async def work() -> None:
        async with AsyncEngine(llm, KVStore(llm, Tiers([near, far]))) as engine:
            first, _ = await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
            refusal = RestorePlan("recompute_is_faster", 0)
            monkeypatch.setattr(Planner, "skip_look_up", lambda *_: refusal)
            await engine.call(lambda: forget(llm))
            assert await tokens_of(engine, PROMPT) == (first, len(PROMPT) - 1)
            for key in list(near.keys()):
                near.delete(key)
            await engine.call(lambda: forget(llm))
            assert await tokens_of(engine, PROMPT) == (first, 0)

    run(work())


def test_restores_that_nobody_waits_for_ask_no_tier(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = Unhurried()
    once = replace(GREEDY, max_tokens=1)

    async def work() -> None:
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            await tokens_of(engine, PROMPT, once)
            assert await engine.flush(60)
            await engine.call(lambda: forget(llm))
            monkeypatch.setattr("prolepsis.engine.restorer._SHORTEST_WAIT", 0.05)
            monkeypatch.setattr(Planner, "prefill_s", 1e-9)
            monkeypatch.setattr(Planner, "skip_look_up", lambda *_: None)
            tier.free.clear()
            tier.asked_size = 0
            streams = [engine.generate([*PROMPT, number + 1], once) for number in range(12)]
            await asyncio.gather(*(stream.read() for stream in streams))
            assert store.statistics().decisions["timed_out"] == 12
            tier.free.set()
        assert tier.asked_size <= 4  # prompts at a time, one question of each

    run(work())


def test_without_threads_to_restore_all_is_computed(llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            offload = engine._worker.offload
            assert offload is not None
            monkeypatch.setattr(offload._restorer._workers, "submit", submit)
            assert (await tokens_of(engine, PROMPT))[1] == 0
            assert await engine.prefetch([5, *PROMPT]) is None
            assert engine.is_open
            assert store.statistics().failures == 2

    run(work())


@pytest.mark.parametrize(("method", "what"), [("encode", "storing"), ("decode", "restoring")])
def test_an_unforeseen_error_costs_a_computation_and_is_told(
    llm: LLM, tiers: Tiers, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str, what: str
) -> None:
    def fail(*_: object) -> None:
        raise KeyError("oh")

    async def work() -> None:
        store = KVStore(llm, tiers)
        monkeypatch.setattr(PayloadCodec, method, fail)
        async with AsyncEngine(llm, store) as engine:
            first = await stored_and_forgotten(engine, llm)
            assert await tokens_of(engine, PROMPT) == (first, 0)
            assert await engine.flush(60)
            failures = store.statistics().failures
        assert failures >= 1
        assert {record.message for record in caplog.records} == {
            f"{what} failed; the K and V that are missing for it are computed"
        }
        assert all("KeyError: 'oh'" in (record.exc_text or "") for record in caplog.records)

    run(work())


def test_a_request_that_is_cancelled_while_it_is_restored_leaves_nothing(llm: LLM) -> None:
    tier = Stuck()

    async def work() -> None:
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            first = await stored_and_forgotten(engine, llm)
            tier.free.clear()
            tier.asked.clear()
            samples = engine.generate_samples(PROMPT, replace(GREEDY, n=2, temperature=1.0, seed=1))
            readers = [asyncio.ensure_future(anext(sample)) for sample in samples]
            await asyncio.to_thread(tier.asked.wait, 60)
            readers[0].cancel()
            assert (await readers[1]).token.token  # the second sample waits for the first, not for the tier
            samples[1].close()
            tier.free.set()
            assert store.statistics().decisions == {"nothing_stored": 1, "cancelled": 1}
            assert (await tokens_of(engine, PROMPT))[0] == first

    run(work())


def test_an_engine_that_is_closed_in_the_middle_leaves_no_thread_and_tells_all(llm: LLM) -> None:
    tier = Stuck()

    async def work() -> None:
        engine = AsyncEngine(llm, KVStore(llm, Tiers([tier])))
        await tokens_of(engine, PROMPT)
        assert await engine.flush(60)
        await engine.call(lambda: forget(llm))
        tier.free.clear()
        tier.asked.clear()
        waiting = asyncio.ensure_future(tokens_of(engine, PROMPT))
        warming = asyncio.ensure_future(engine.prefetch(PROMPT, "x"))
        await asyncio.to_thread(tier.asked.wait, 60)
        closing = asyncio.ensure_future(engine.close())
        with pytest.raises(ProlepsisError, match="closed"):
            await waiting
        plan = await warming
        assert plan is None or plan.reason in ("cancelled", "nothing_stored")
        tier.free.set()
        await closing
        with pytest.raises(ProlepsisError, match="closed"):
            await engine.store_now(PROMPT)

    run(work())


def test_what_a_store_cannot_do_is_refused_by_name(tiny: Path, llm: LLM, tiers: Tiers) -> None:
    with pytest.raises(InputError, match="kv_evict"):
        KVStore(LLM(tiny, kv_memory=1 << 22, kv_evict="h2o:64"), tiers)
    with pytest.raises(InputError, match="prefix_caching"):
        KVStore(LLM(tiny, kv_memory=1 << 22, prefix_caching=False), tiers)
    with pytest.raises(InputError, match="twin-int8 builds on all tokens"):
        KVStore(llm, tiers, predictor="twin-int8")
    with pytest.raises(InputError, match="prolepsis calibrate"):
        KVStore(llm, tiers, predictor="linear")
    with pytest.raises(InputError, match="must be one of auto"):
        KVStore(llm, tiers, predictor="best")


def test_full_tiers_are_counted_and_change_nothing(llm: LLM) -> None:
    async def work() -> None:
        store = KVStore(llm, Tiers([MemoryTier(1000)]))
        async with AsyncEngine(llm, store) as engine:
            first, _ = await tokens_of(engine, PROMPT)
            assert await engine.flush(60)
            assert store.statistics().refused_segments == 1
            assert store.statistics().stored_segments == 0
            await engine.call(lambda: forget(llm))
            assert await tokens_of(engine, PROMPT) == (first, 0)

    run(work())


def test_beginnings_are_evicted_last(llm: LLM) -> None:
    chats = [random.Random(seed).choices(range(1, 1000), k=1025) for seed in range(3)]
    once = replace(GREEDY, max_tokens=1)

    async def fill(tier: MemoryTier) -> list[int]:
        """How many tokens of each chat can be restored."""
        store = KVStore(llm, Tiers([tier]))
        async with AsyncEngine(llm, store) as engine:
            for stop in range(257, 1026, 256):
                for chat in chats:
                    await tokens_of(engine, chat[:stop], once)
                    assert await engine.flush(60)
            return [sum(piece.piece.tokens for piece in store.look_up(chat[:-1], "", 0)) for chat in chats]

    async def work() -> None:
        ample = MemoryTier(AMPLE)
        assert await fill(ample) == [1024] * 3
        size = ample.usage().bytes
        assert size is not None
        forget(llm)
        assert await fill(MemoryTier(size * 3 // 4)) == [256, 1024, 1024]

    run(work())


def test_what_is_evicted_before_its_turn_is_counted(llm: LLM, tiers: Tiers) -> None:
    async def work() -> None:
        store = KVStore(llm, tiers)
        async with AsyncEngine(llm, store) as engine:
            assert engine.store is store
            offload = engine._worker.offload
            assert offload is not None
            await engine.call(lambda: offload.writer.add(PROMPT, "never computed"))
            assert await engine.flush(60)
        assert store.statistics().missed_segments == 4

    run(work())


@pytest.mark.parametrize("seed", range(3))
def test_random_workloads_have_the_tokens_of_requests_alone(tiny: Path, seed: int) -> None:
    """Several salts, a pool that evicts, cancels, a tier that fails and one that lies: nobody notices."""
    draw = random.Random(seed)
    small = LLM(tiny, kv_memory=60 * 32 * LLM(tiny, kv_memory=1 << 20).kv_cache.bytes_per_token)
    assert small.kv_cache.pool.num_blocks == 60
    roots = [draw.choices(range(1, 1000), k=draw.randrange(200, 800)) for _ in range(4)]
    prompts = [
        [*root[: draw.randrange(1, len(root))], *draw.choices(range(1, 1000), k=draw.randrange(1, 300))]
        for root in draw.choices(roots, k=12)
    ]
    params = [
        SamplingParams(max_tokens=draw.randrange(1, 30), seed=i, temperature=i % 2, ignore_eos=True) for i in range(12)
    ]
    expected = [small.generate(prompt, each)[0].token_ids for prompt, each in zip(prompts, params, strict=True)]
    liar, sound = UnsoundTier("liar", seed, damaging=0.2), UnsoundTier("failing", seed, failing=0.005)

    async def one(engine: AsyncEngine, number: int, salt: str, cancel_after: int | None) -> None:
        stream = engine.generate(prompts[number], params[number], cache_salt=salt)
        tokens: list[int] = []
        async for delta in stream:
            tokens.append(delta.token.token)
            if len(tokens) == cancel_after:
                stream.close()
        if cancel_after is None:
            assert tokens == expected[number]
        else:
            assert tokens == expected[number][:cancel_after]

    async def work() -> None:
        restored = damaged = 0
        for _ in range(2):
            forget(small)
            store = KVStore(small, Tiers([liar, sound]))
            async with AsyncEngine(small, store) as engine:
                for _ in range(5):
                    picked = [
                        (draw.randrange(12), draw.choice("ab"), draw.choice([None, None, None, 1, 5])) for _ in range(6)
                    ]
                    await asyncio.gather(*(one(engine, *each) for each in picked))
                    await engine.flush(60)
            assert store.statistics().failures == 0
            restored += store.statistics().restored_tokens
            damaged += store.statistics().damaged_segments
            small.kv_cache.check([])
            assert small.engine.prefix is not None
            small.engine.prefix.check()
        assert any(key.startswith("kv-") for key in liar.damaged)
        assert restored > 0
        assert damaged > 0

    run(work())


def test_a_kept_linear_profile_codes_and_without_it_all_is_computed_again(llm: LLM, profiles: Path) -> None:
    keep(calibrated(llm, tokens=300))
    tiers = Tiers([MemoryTier(AMPLE)])
    text = [*TEXTS[1][:400]]

    async def work() -> None:
        store = KVStore(llm, tiers, predictor="linear")
        assert KVStore(llm, tiers).predictor == "linear"  # computing takes a second a token here
        async with AsyncEngine(llm, store) as engine:
            first, _ = await tokens_of(engine, text)
            assert await engine.flush(60)
            held, before = await engine.call(lambda: cached_kv(llm, text))
            await engine.call(lambda: forget(llm))
            stream = engine.generate(text, GREEDY)
            assert [delta.token.token async for delta in stream] == first
            plan = stream.completion.statistics.restore
            assert plan is not None
            assert (plan.predictor, plan.restored_tokens) == ("linear", 399)
            assert await engine.call(lambda: cached_kv(llm, text)) == (held, before)
        forget(llm)
        for path in profiles.rglob("*.safetensors"):
            path.unlink()
        store = KVStore(llm, tiers)
        assert store.predictor == "static"
        async with AsyncEngine(llm, store) as engine:
            stored = set(tiers.keys("kv"))
            assert await tokens_of(engine, text) == (first, 0)
            assert (store.statistics().unreadable_segments, store.statistics().damaged_segments) == (1, 0)
            assert stored <= set(tiers.keys("kv"))  # nothing is deleted
            assert await engine.flush(60)  # it is stored anew, so that it can be read here too
            await engine.call(lambda: forget(llm))
            assert await tokens_of(engine, text) == (first, 399)

    run(work())


def test_who_waits_for_a_save_does_not_wait_for_the_pauses(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a duty that would make it sleep for hours, while a request runs that never ends."""
    monkeypatch.setattr("prolepsis.engine.store_writer.DUTY", 1e-7)

    async def work() -> None:
        store = KVStore(llm, Tiers([MemoryTier(AMPLE)]))
        async with AsyncEngine(llm, store) as engine:
            await tokens_of(engine, PROMPT)
            await tokens_of(engine, PROMPT[::-1])
            endless = engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, temperature=0.0, ignore_eos=True))
            await anext(endless)
            saved = await engine.store_now(PROMPT)
            assert saved.whole
            assert sum(segment.tokens for segment in saved.segments) == len(PROMPT)
            assert await engine.flush(60)
            assert len(store.look_up(PROMPT[::-1], "", 0)) == 4
            assert store.statistics().missed_segments == 0
            endless.close()

    run(work())


def test_an_engine_that_is_collected_in_a_thread_of_its_own_does_not_wait_for_that(llm: LLM) -> None:
    class Collecting(MemoryTier):
        """Stops the engine within a put or a get, as the garbage collector may."""

        def put(self, key: str, data: bytes) -> None:
            stop("prolepsis-store")
            super().put(key, data)

        def get(self, key: str) -> bytes | None:
            stop("prolepsis-fetch")
            return super().get(key)

    stopped: list[str] = []
    engines: list[AsyncEngine] = []

    def stop(where: str) -> None:
        if threading.current_thread().name.startswith(where) and stopped[-1:] == [f"now in {where}"]:
            engines[-1]._worker.stop()
            stopped.append(where)

    tier = Collecting(AMPLE)

    async def work() -> None:
        for where in ("prolepsis-store", "prolepsis-fetch"):
            engines.append(AsyncEngine(llm, KVStore(llm, Tiers([tier]))))
            if where == "prolepsis-store":
                stopped.append(f"now in {where}")
                await tokens_of(engines[-1], PROMPT)
            else:
                await tokens_of(engines[-1], PROMPT[:300])
                await engines[-1].flush(60)
                await engines[-1].call(lambda: forget(llm))
                stopped.append(f"now in {where}")
                with pytest.raises(ProlepsisError, match="closed"):
                    await tokens_of(engines[-1], PROMPT[:300])
            await asyncio.wrap_future(engines[-1]._worker.stopped)
            assert stopped[-1] == where

    run(work())
