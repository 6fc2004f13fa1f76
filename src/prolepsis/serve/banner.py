"""What is told of a server when it is ready."""

from collections.abc import Iterator

from prolepsis.engine.async_engine import AsyncEngine


def banner(engine: AsyncEngine) -> Iterator[str]:
    """The size of the KV cache and of the store's tiers, a line each."""
    llm = engine.llm
    cache = llm.kv_cache
    slots = cache.pool.num_blocks * cache.block_size
    yield (
        f"KV cache {_size(slots * cache.bytes_per_token)} of {cache.dtype}: {slots:,} tokens, sequences of up to "
        f"{llm.max_context:,}, {llm.engine.max_running} at once"
    )
    if engine.store is not None:
        for tier in engine.store.tiers.statistics():
            budget = "" if tier.budget is None else f", {_size(tier.budget)}"
            held = "" if tier.entries is None else f", {tier.entries:,} entries"
            yield f"store: {tier.name}{budget}{held}{'' if tier.available else ' (does not answer)'}"


def _size(count: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count >> 10} KiB"
