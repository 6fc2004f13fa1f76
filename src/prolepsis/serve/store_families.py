"""What the store is in Prometheus' terms."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from prolepsis.engine.store_statistics import StoreStatistics
from prolepsis.serve.family_maker import FamilyMaker
from prolepsis.serve.live import StoreView
from prolepsis.store.watched_tier import TierStatistics


def store_families(make: FamilyMaker, view: StoreView) -> Iterator[Metric]:
    """Every metric of the store and its tiers."""
    tiers = view.tiers
    yield from _segments(make, view.segments)
    yield from _holdings(make, tiers)
    yield from _calls(make, tiers)
    yield _failures(make, tiers)


def _segments(make: FamilyMaker, now: StoreStatistics) -> Iterator[Metric]:
    events = {
        "stored": now.stored_segments,
        "restored": now.restored_segments,
        "missed": now.missed_segments,
        "damaged": now.damaged_segments,
        "refused": now.refused_segments,
        "unreadable": now.unreadable_segments,
        "lost": now.lost_segments,
        "failed": now.failures,
    }
    raw = {"stored": now.stored_raw_bytes, "restored": now.restored_raw_bytes}
    coded = {"stored": now.stored_coded_bytes, "restored": now.restored_coded_bytes}
    tokens = {"stored": now.stored_tokens, "restored": now.restored_tokens}
    yield make.counters("store_segments", "Segments by what became of them.", "event", events)
    yield make.counters("store_tokens", "Tokens whose K and V were stored, and restored.", "event", tokens)
    yield make.counters("store_raw_bytes", "Their bytes as in the cache ...", "event", raw)
    yield make.counters("store_coded_bytes", "... and coded.", "event", coded)
    yield make.gauge("store_ratio", "Raw bytes per coded byte of all that was stored.", now.ratio)
    yield make.counter("store_encode_seconds", "Time spent coding.", now.encode_seconds)
    yield make.counter("store_restore_seconds", "Time spent fetching and decoding.", now.restore_seconds)
    yield make.gauge("store_queued_segments", "Segments that wait to be stored.", now.queued_segments)
    decisions = {reason: float(count) for reason, count in now.decisions.items()}
    yield make.counters("planner_decisions", "Prompts by why they were restored or computed.", "reason", decisions)


def _holdings(make: FamilyMaker, tiers: list[TierStatistics]) -> Iterator[Metric]:
    for name, help_, values in (
        ("store_tier_bytes", "Bytes that a tier holds.", {tier.name: tier.bytes for tier in tiers}),
        ("store_tier_entries", "Entries that a tier holds.", {tier.name: tier.entries for tier in tiers}),
        ("store_tier_budget_bytes", "Bytes that it may hold.", {tier.name: tier.budget for tier in tiers}),
    ):
        yield make.by(name, help_, "tier", {tier: value for tier, value in values.items() if value is not None})
    available = {tier.name: float(tier.available) for tier in tiers}
    yield make.by("store_tier_available", "0 while a tier is left alone because it failed.", "tier", available)


def _calls(make: FamilyMaker, tiers: list[TierStatistics]) -> Iterator[Metric]:
    def each(name: str, help_: str, values: Mapping[str, float]) -> Metric:
        return make.counters(f"store_tier_{name}", help_, "tier", values)

    yield each("gets", "Entries looked for.", {tier.name: tier.gets for tier in tiers})
    yield each("hits", "Entries found.", {tier.name: tier.hits for tier in tiers})
    yield each("puts", "Entries written.", {tier.name: tier.puts for tier in tiers})
    yield each("evictions", "Entries that had to leave.", {tier.name: tier.evictions for tier in tiers})
    yield each("skipped", "Calls not made because the tier had failed.", {tier.name: tier.skipped for tier in tiers})
    yield each(
        "dropped",
        "Entries of slower tiers not copied, as too many waited.",
        {tier.name: tier.dropped for tier in tiers},
    )
    yield each("get_bytes", "Bytes read.", {tier.name: tier.get_bytes for tier in tiers})
    yield each("get_seconds", "Time spent reading them.", {tier.name: tier.get_seconds for tier in tiers})
    yield each("put_bytes", "Bytes written.", {tier.name: tier.put_bytes for tier in tiers})
    yield each("put_seconds", "Time spent writing them.", {tier.name: tier.put_seconds for tier in tiers})


def _failures(make: FamilyMaker, tiers: list[TierStatistics]) -> Metric:
    values: dict[tuple[str, ...], float] = {(tier.name, kind): n for tier in tiers for kind, n in tier.failures.items()}
    return make.table("store_tier_failures", "Calls that a tier failed at, by how.", ("tier", "kind"), values)
