"""What is told of a server when it is ready."""

from collections.abc import Iterator

from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.model.memory import shown


def banner(engine: AsyncEngine) -> Iterator[str]:
    """The size of the KV cache and of the store's tiers, a line each."""
    llm = engine.llm
    cache = llm.kv_cache
    slots = cache.pool.num_blocks * cache.block_size
    yield (
        f"KV cache {shown(slots * cache.bytes_per_token)} of {cache.dtype}: {slots:,} tokens, sequences of up to "
        f"{llm.max_context:,}, {llm.engine.max_running} at once"
    )
    if engine.store is not None:
        for tier in engine.store.tiers.statistics():
            budget = "" if tier.budget is None else f", {shown(tier.budget)}"
            held = "" if tier.entries is None else f", {tier.entries:,} entries"
            yield f"store: {tier.name}{budget}{held}{'' if tier.available else ' (does not answer)'}"
