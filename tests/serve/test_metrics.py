"""/metrics: what Prometheus reads is what happened, and nothing of it grows with what clients say."""

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prolepsis import LLM
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.engine.kv_store import KVStore
from prolepsis.serve.app import create_app
from prolepsis.serve.middleware import guarded
from prolepsis.serve.options import ServeOptions
from prolepsis.serve.state import ServerState
from prolepsis.store import open_tiers

SECRET = "secret-key-of-somebody"
TEXT = "Tell nobody of the blue elephant."


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


def server(**options: Any) -> tuple[ServerState, httpx.AsyncClient]:
    state = ServerState(ServeOptions(model="tiny.gguf", **options))
    app = guarded(create_app(state), state)
    return state, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and labels, without the model's name."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = {key: value for key, value in sample.labels.items() if key != "model_name"}
            found[(sample.name, *sorted(labels.values()))] = sample.value
    return found


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, ...], float]:
    answer = await client.get("/metrics")
    assert answer.status_code == 200
    return samples(answer.text)


@pytest.fixture(autouse=True)
def fresh_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prolepsis.serve.live.MAX_AGE", -1.0)


def test_metrics_tell_what_happened(tiny_llm: LLM) -> None:
    async def ask() -> tuple[dict[tuple[str, ...], float], ...]:
        state, client = server()
        async with AsyncEngine(tiny_llm) as engine, client:
            state.ready(engine)
            before = await scrape(client)
            body = {"prompt": TEXT, "max_tokens": 5, "ignore_eos": True}
            for _ in range(3):
                assert (await client.post("/v1/completions", json=body)).status_code == 200
            return before, await scrape(client)

    before, after = run(ask())
    prompt = len(tiny_llm.encode(TEXT))

    def grown(name: str, *labels: str) -> float:
        return after[f"prolepsis:{name}", *labels] - before.get((f"prolepsis:{name}", *labels), 0)

    assert grown("request_success_total", "length") == 3
    assert grown("generation_tokens_total") == 15
    assert grown("prompt_tokens_total") == grown("prefix_cache_queries_total") == 3 * prompt
    assert grown("prefix_cache_hits_total") == 2 * (prompt - 1)
    assert grown("time_to_first_token_seconds_count") == grown("e2e_request_latency_seconds_count") == 3
    assert grown("inter_token_latency_seconds_count") == 12
    assert grown("inter_token_latency_seconds_bucket", "+Inf") == 12
    assert grown("request_generation_tokens_bucket", "5.0") == 3
    assert grown("request_generation_tokens_bucket", "2.0") == 0
    assert grown("http_requests_total", "/v1/completions", "200", "POST") == 3
    blocks = [after["prolepsis:kv_cache_blocks", state] for state in ("blank", "cached", "used", "shared")]
    assert sum(blocks) == tiny_llm.kv_cache.pool.num_blocks
    assert blocks[1] > 0
    assert after["prolepsis:kv_cache_usage_perc",] == after["prolepsis:num_requests_running",] == 0


def test_what_clients_make_up_makes_no_series() -> None:
    async def ask() -> tuple[str, str]:
        _, client = server(api_keys=(SECRET,))
        async with client:
            first = (await client.get("/metrics")).text
            for i in range(30):
                await client.request(f"MADE{i}", f"/up/{i}?key={SECRET}")
                await client.post(
                    f"/v1/made/up/{i}", headers={"Authorization": f"Bearer {SECRET}"}, json={"prompt": TEXT}
                )
                await client.post("/v1/completions", headers={"Authorization": f"Bearer wrong{i}"})
            return first, (await client.get("/metrics")).text

    first, last = run(ask())
    made = {key: value for key, value in samples(last).items() if key[0] == "prolepsis:http_requests_total"}
    assert len(made) <= 5
    assert sum(made.values()) == 91
    assert ("prolepsis:phase", "loading") in samples(last)
    assert "num_requests_running" not in first
    assert not [word for word in (SECRET, "elephant", "made", "wrong") if word in last.lower()]


def test_an_engine_that_is_closed_leaves_the_rest(tiny_llm: LLM) -> None:
    async def ask() -> dict[tuple[str, ...], float]:
        state, client = server()
        async with client, AsyncEngine(tiny_llm) as engine:
            state.ready(engine)
            await engine.close()
            return await scrape(client)

    found = run(ask())
    assert ("process_resident_memory_bytes",) in found
    assert ("prolepsis:num_requests_running",) not in found


def test_acceptance_is_told_by_place(tiny_llm: LLM, tiny: Any) -> None:
    async def ask() -> dict[tuple[str, ...], float]:
        state, client = server()
        llm = LLM(tiny, kv_memory=1 << 21, draft="ngram", draft_tokens=3)
        async with client, AsyncEngine(llm) as engine:
            state.ready(engine)
            body = {"prompt": "a b c d a b c d a b c d", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
            await client.post("/v1/completions", json=body)
            return await scrape(client)

    found = run(ask())
    drafted = [found["prolepsis:spec_decode_num_draft_tokens_per_pos_total", str(place)] for place in range(3)]
    assert sum(drafted) == found["prolepsis:spec_decode_num_draft_tokens_total",] > 0
    assert drafted[0] == found["prolepsis:spec_decode_num_drafts_total",]


def test_the_store_and_its_failures_are_told(tiny: Any, tmp_path: Path) -> None:
    disks = [tmp_path / "one", tmp_path / "two"]

    async def ask() -> dict[tuple[str, ...], float]:
        state, client = server()
        llm = LLM(tiny, kv_memory=1 << 21)
        # A disk with room for nothing, between a memory and a disk that take all.
        store = KVStore(llm, open_tiers(["memory:64MiB", f"disk:{disks[0]}:1KiB", f"disk:{disks[1]}:64MiB"]))
        async with client, AsyncEngine(llm, store) as engine:
            state.ready(engine)
            body = {"prompt": "word " * 300, "max_tokens": 5, "ignore_eos": True}
            await client.post("/v1/completions", json=body)
            assert await engine.flush(30)
            assert str(tmp_path) not in (await client.get("/v1/engine")).text
            found = await scrape(client)
        store.close()
        return found

    found = run(ask())
    stored = found["prolepsis:store_segments_total", "stored"]
    assert stored >= 2
    for tier, kept in [("memory", True), ("disk", False), ("disk_2", True)]:
        assert (found["prolepsis:store_tier_puts_total", tier] >= stored) is kept
    assert not [key for key in found if str(tmp_path) in " ".join(key)]
    assert found["prolepsis:store_tier_failures_total", "disk", "full"] > 0
    assert found["prolepsis:store_raw_bytes_total", "stored"] > found["prolepsis:store_coded_bytes_total", "stored"] > 0
    assert found["prolepsis:store_ratio",] > 1
    assert found["prolepsis:planner_decisions_total", "nothing_stored"] == 1
