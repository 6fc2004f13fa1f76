"""What a view of the server is in Prometheus' terms."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric
from prometheus_client.metrics_core import CounterMetricFamily

from prolepsis.engine.snapshot import BlockState, EngineSnapshot
from prolepsis.engine.statistics import DraftStatistics
from prolepsis.serve.family_maker import PREFIX, FamilyMaker
from prolepsis.serve.live import View
from prolepsis.serve.store_families import store_families


def families(view: View) -> Iterator[Metric]:
    """Every metric that there is now."""
    make = FamilyMaker(view.model)
    yield make.by("phase", "1 for what the server does.", "phase", {view.phase: 1})
    yield make.counters("admission_rejections", "Requests refused.", "reason", {"queue_full": view.refused})
    if view.engine is not None:
        yield from _requests(make, view.engine)
        yield from _times(make, view.engine)
        yield from _cache(make, view.engine)
        yield from _work(make, view.engine)
        if view.engine.drafter is not None:
            yield from _drafts(make, view.engine.statistics.drafts)
    if view.store is not None:
        yield from store_families(make, view.store)


def answers_family(counts: Mapping[tuple[str, str, str], int]) -> Metric:
    """Of `answer_counts.AnswerCounts`."""
    labels = ("handler", "method", "status")
    family = CounterMetricFamily(f"{PREFIX}http_requests", "Answers by endpoint, method and status.", labels=labels)
    for values, count in sorted(counts.items()):
        family.add_metric(values, count)
    return family


def _requests(make: FamilyMaker, snapshot: EngineSnapshot) -> Iterator[Metric]:
    now, traffic = snapshot.statistics, snapshot.traffic
    ended: dict[str, float] = {str(reason): float(count) for reason, count in traffic.ended.items()}
    yield make.gauge("num_requests_running", "Requests that hold blocks of the cache.", now.running)
    yield make.gauge("num_requests_waiting", "Requests that wait, preempted ones included.", now.waiting)
    yield make.counters("request_success", "Requests that have ended, by how.", "finished_reason", ended)
    yield make.counter("prompt_tokens", "Tokens of prompts that were read.", traffic.prompt_tokens)
    yield make.counter("prompt_tokens_cached", "Those of them found in a cache.", traffic.cached_tokens)
    yield make.counter("generation_tokens", "Tokens generated.", traffic.generation_tokens)


def _times(make: FamilyMaker, snapshot: EngineSnapshot) -> Iterator[Metric]:
    traffic = snapshot.traffic
    for name, help_, values in (
        ("time_to_first_token_seconds", "From arrival to the first token.", traffic.time_to_first_token),
        ("inter_token_latency_seconds", "Between two tokens of a request that has ended.", traffic.inter_token),
        ("e2e_request_latency_seconds", "From arrival to the last token.", traffic.request_time),
        ("request_queue_time_seconds", "From arrival until the first pass.", traffic.queue_time),
        ("request_prompt_tokens", "Length of prompts.", traffic.prompt_lengths),
        ("request_generation_tokens", "Length of outputs.", traffic.generation_lengths),
    ):
        yield make.histogram(name, help_, values)


def _cache(make: FamilyMaker, snapshot: EngineSnapshot) -> Iterator[Metric]:
    pool, traffic, swap = snapshot.pool, snapshot.traffic, snapshot.swap
    blocks = {state.name.lower(): float(pool.count(state)) for state in BlockState}
    yield make.gauge("kv_cache_usage_perc", "Share of the cache's blocks in use; 1 is all.", pool.usage)
    yield make.by("kv_cache_blocks", "Blocks of the cache by state.", "state", blocks)
    yield make.gauge("kv_cache_waste_perc", "Share of the slots in used blocks that hold no token.", pool.slack)
    yield make.counter("prefix_cache_queries", "Tokens looked for in the prefix cache.", traffic.prompt_tokens)
    yield make.counter("prefix_cache_hits", "Tokens found in the prefix cache.", traffic.cached_tokens)
    yield make.counter("num_preemptions", "Requests that had to leave the cache.", snapshot.statistics.preemptions)
    if swap is not None:
        yield make.counter("swap_raw_bytes", "K and V of preempted requests, as in the cache.", swap.raw_bytes)
        yield make.counter("swap_coded_bytes", "What they took, coded.", swap.coded_bytes)
        failures = {"no_room": swap.no_room, "disk": swap.disk_failures, "damaged": swap.damaged}
        yield make.counters("swap_failures", "Preempted requests to be computed again, by why.", "reason", failures)


def _work(make: FamilyMaker, snapshot: EngineSnapshot) -> Iterator[Metric]:
    now = snapshot.statistics
    yield make.counter("engine_passes", "Passes of the model.", now.passes)
    yield make.counter("engine_busy_seconds", "Time spent in them.", now.busy_s)
    yield make.counter("computed_tokens", "Rows run in them, of prompts, outputs and drafts.", now.computed_tokens)
    yield make.counter("recomputed_tokens", "Tokens run again after a preemption.", now.recomputed_tokens)
    yield make.counter("evicted_tokens", "Tokens whose K and V were dropped (kv_evict).", now.evicted_tokens)


def _drafts(make: FamilyMaker, drafts: DraftStatistics) -> Iterator[Metric]:
    accepted = {str(place): count for place, count in enumerate(drafts.accepted_at)}
    drafted = {str(place): count for place, count in enumerate(drafts.drafted_at)}
    yield make.counter("spec_decode_num_drafts", "Drafts verified.", drafts.rounds)
    yield make.counter("spec_decode_num_draft_tokens", "Tokens drafted.", sum(drafts.drafted_at))
    yield make.counter("spec_decode_num_accepted_tokens", "Drafted tokens accepted.", sum(drafts.accepted_at))
    yield make.counters(
        "spec_decode_num_accepted_tokens_per_pos", "Accepted, by place in the draft.", "position", accepted
    )
    yield make.counters("spec_decode_num_draft_tokens_per_pos", "Drafted, by place.", "position", drafted)
