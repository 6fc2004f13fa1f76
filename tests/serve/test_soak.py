"""Half an hour of everything at once: clients of all kinds over a store whose tiers fail, and not one wrong token.

PROLEPSIS_SOAK_SECONDS makes it longer or shorter. In a minute all there is happens some times.
"""

import asyncio
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx
import pytest
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from redis_server import RedisServer
from soak_clients import SEED, Catalogue, Clients, Tale
from soak_memory import MIB, Memory
from soak_tiers import COUNTED, Chaos, FaultyTier

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.planner import Piece, Planner
from prolepsis.engine.restore_plan import RestorePlan
from prolepsis.engine.stored_sessions import StoredSessions
from prolepsis.serve.app import create_app
from prolepsis.serve.middleware import guarded
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState
from prolepsis.store.disk_tier import DiskTier
from prolepsis.store.memory_tier import MemoryTier
from prolepsis.store.redis_tier import RedisTier
from prolepsis.store.remote_tier import RemoteTier
from prolepsis.store.tiers import Tiers

SECONDS = float(os.environ.get("PROLEPSIS_SOAK_SECONDS", "1800"))
CLIENTS = 12
POOL = 2 * MIB  # bytes: room for 4,096 tokens, some six of the requests
MOST_GROWTH = Memory(resident=16 * MIB, malloc=3 * MIB, blocks=8_000)
"""What the last quarter may hold beyond the second. What is in use does not grow, but is more or less as requests come
and go; beside it, allocators keep more while pieces of all sizes come and go in many threads.

Half an hour finds a leak of one small object in two requests, or of 200 bytes of arrays in each.
"""
FIRST_TRIES_S = 70.0
"""A tier that failed is tried again within a minute."""

Reading = dict[tuple[str, ...], float]


class EagerPlanner(Planner):
    """Always looks and restores: computing is faster on a model as small as the tests'."""

    def skip_look_up(self, pool_tokens: int, missing: int, kinds: Iterable[str]) -> None:
        return None

    def decide(self, pool_tokens: int, pieces: list[Piece], predictor: str) -> RestorePlan:
        plan = super().decide(pool_tokens, pieces, predictor)
        if pieces:
            plan.reason = "restore_is_faster"
        return plan


@contextmanager
def listening(state: ServerState) -> Iterator[str]:
    """The server in a thread, as it is behind all its guards; its address."""
    config = uvicorn.Config(guarded(create_app(state), state), port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@asynccontextmanager
async def alone(tiny: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A server without a store and with room for everything."""
    state = ServerState(ServeOptions(model="tiny"))
    async with AsyncEngine(LLM(tiny, threads=1)) as engine:
        state.ready(engine)
        transport = httpx.ASGITransport(guarded(create_app(state), state))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client:
            yield client
    state.close()


async def memory_watch(readings: list[Memory]) -> None:
    """Memory, a hundred times."""
    while True:
        readings.append(Memory.now())
        await asyncio.sleep(SECONDS / 100)


async def reading(client: httpx.AsyncClient) -> Reading:
    """/metrics by name and labels."""
    found: Reading = {}
    for family in text_string_to_metric_families((await client.get("/metrics")).text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[(sample.name, *(labels[key] for key in sorted(labels)))] = sample.value
    return found


async def soak(url: str, catalogue: Catalogue, tale: Tale, chaos: Chaos) -> tuple[Reading, list[Memory]]:
    """Have everybody at work for SECONDS. Returns the last metrics and what memory was taken."""
    readings: list[Memory] = []
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        background = [asyncio.create_task(work) for work in (chaos.run(), memory_watch(readings))]
        clients = Clients(client, catalogue, tale)
        deadline = time.monotonic() + SECONDS
        await asyncio.gather(*(clients.run(number, deadline) for number in range(CLIENTS)))
        for task in background:
            task.cancel()
        await asyncio.gather(*background, return_exceptions=True)
        return await reading(client), readings


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_everything_at_once(tiny: Path, tmp_path: Path) -> None:
    redis = RedisServer() if shutil.which("redis-server") else None
    if redis is None:
        print("without a Redis tier: redis-server is not installed")
    faulty = [
        FaultyTier(MemoryTier(2 * MIB)),
        FaultyTier(DiskTier(tmp_path / "disk", 8 * MIB)),
        FaultyTier(RemoteTier(f"file://{tmp_path / 'remote'}", "remote")),
    ]
    tiers = Tiers([*faulty[:2], *([RedisTier(redis.url, "redis")] if redis else []), faulty[2]])
    llm = LLM(tiny, threads=1, kv_memory=POOL, draft="ngram", draft_tokens=3)
    store = KVStore(llm, tiers)
    store.planner = EagerPlanner(llm.kv_cache.bytes_per_token, llm.model_bytes)
    chaos, catalogue, tale = Chaos(faulty, redis, SEED), Catalogue(), Tale()

    async def everything() -> tuple[Reading, list[Memory]]:
        async with alone(tiny) as client:
            await catalogue.fill(client)
        state = ServerState(ServeOptions(model="tiny"))
        async with AsyncEngine(llm, store) as engine:
            state.ready(engine, StoredSessions(engine))
            with listening(state) as url:
                found = await soak(url, catalogue, tale, chaos)
            await engine.flush(FIRST_TRIES_S)
        state.close()
        return found

    try:
        metrics, memory = asyncio.run(everything())
        told = tiers.statistics()
        store.close()
    finally:
        if redis is not None:
            redis.kill()
    print(tale.statuses, tale.put_off, tale.answers, f"{tale.cancelled} cancelled, {chaos.kills} times without Redis")
    print({tier.name: dict(tier.injected) for tier in faulty}, store.statistics(), sep="\n")
    print("resident MiB/in use of malloc/blocks in use of Python:", *memory[:: max(len(memory) // 16, 1)])
    assert not tale.faults, f"{len(tale.faults)} faults: {tale.faults[:5]}"
    assert min(tale.answers.values()) > 0
    llm.kv_cache.check([])
    assert llm.engine.prefix is not None
    llm.engine.prefix.check()
    assert llm.kv_cache.pool.num_used == 0
    check_failures(metrics, faulty, chaos, told)
    check_statuses(metrics, tale)
    check_memory(memory)


def check_failures(metrics: Reading, faulty: list[FaultyTier], chaos: Chaos, told: list[Any]) -> None:
    """Every failure that was injected is counted, and none else."""
    for tier in faulty:
        for kind in COUNTED:
            counted = metrics.get(("prolepsis:store_tier_failures_total", kind, tier.kind), 0)
            assert counted <= tier.injected[kind], (tier.name, kind)
            [now] = [each for each in told if each.name == tier.name]
            assert now.failures.get(kind, 0) == tier.injected[kind], (tier.name, kind)
    corrupt = sum(tier.injected["corrupt"] for tier in faulty)
    assert corrupt > 0
    assert metrics["prolepsis:store_segments_total", "damaged"] > 0
    if chaos.kills:
        assert metrics["prolepsis:store_tier_failures_total", "failed", "redis"] > 0
    assert metrics["prolepsis:store_segments_total", "restored"] > 0


def check_statuses(metrics: Reading, tale: Tale) -> None:
    """What the server says it answered is what the clients got; and 503 is the only status above 499."""
    counted: Counter[int] = Counter()
    for key, value in metrics.items():
        if key[0] == "prolepsis:http_requests_total" and key[3] != "none":
            counted[int(key[3])] += int(value)
    assert {status for status in counted if status >= 500} <= {503}
    for status in counted | tale.statuses:
        assert counted[status] == tale.statuses[status], (status, counted, tale.statuses)


def check_memory(readings: list[Memory]) -> None:
    """It is level once everything has happened some times."""
    quarter = len(readings) // 4
    for name, most in MOST_GROWTH._asdict().items():
        values = [getattr(reading, name) for reading in readings]
        if None in values:
            print(f"without {name}: the C library does not tell")
            continue
        early, late = median(values[quarter : 2 * quarter]), median(values[-quarter:])
        assert late - early <= most, f"{name}: {early:,.0f}, later {late:,.0f}"
