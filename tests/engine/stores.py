"""Stores for tests: tiers that fail, and what a prompt's K and V are."""

import asyncio
import random
from collections.abc import Coroutine, Iterator
from typing import Any

from prolepsis import LLM, SamplingParams
from prolepsis.coding.cache_dtypes import arrays_of
from prolepsis.engine.async_engine import AsyncEngine
from prolepsis.errors import TierError
from prolepsis.store import MemoryTier

AMPLE = 1 << 28
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """In a new event loop; nothing here takes two minutes."""
    return asyncio.run(asyncio.wait_for(work, 120))


class UnsoundTier(MemoryTier):
    """Fails with the probability `failing`, and changes a bit of what it gives back with the probability `damaging`.

    `damaged`: the keys of which it gave back other bytes than it was given.
    """

    def __init__(self, name: str, seed: int = 0, failing: float = 0.0, damaging: float = 0.0) -> None:
        super().__init__(AMPLE, name)
        self.failing, self.damaging = failing, damaging
        self.damaged: list[str] = []
        self._random = random.Random(seed)

    def _fail(self) -> None:
        if self._random.random() < self.failing:
            raise TierError(f"{self.name} fails")

    def put(self, key: str, data: bytes) -> None:
        self._fail()
        super().put(key, data)

    def get(self, key: str) -> bytes | None:
        self._fail()
        data = super().get(key)
        if data is None or self._random.random() >= self.damaging:
            return data
        self.damaged.append(key)
        at = self._random.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << self._random.randrange(8)]) + data[at + 1 :]

    def size(self, key: str) -> int | None:
        self._fail()
        return super().size(key)

    def delete(self, key: str) -> None:
        self._fail()
        super().delete(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        self._fail()
        return super().keys(kind)


async def tokens_of(
    engine: AsyncEngine, prompt: list[int], params: SamplingParams = GREEDY, salt: str = ""
) -> tuple[list[int], int]:
    """(what is generated, tokens of the prompt that were cached)."""
    stream = engine.generate(prompt, params, cache_salt=salt)
    tokens = [delta.token.token async for delta in stream]
    return tokens, stream.completion.cached_tokens


def forget(llm: LLM) -> None:
    """Empty the pool of what nobody uses, and make its bytes those of nothing that was computed."""
    assert llm.engine.prefix is not None
    llm.engine.prefix.clear()
    for array in (llm.kv_cache.k, llm.kv_cache.v, llm.kv_cache.k_steps, llm.kv_cache.v_steps):
        array.fill(0x7F if array.itemsize == 1 else 0x7FC0)  # NaN in bf16


def cached_kv(llm: LLM, tokens: list[int], salt: str = "") -> tuple[int, list[bytes]]:
    """(how many of `tokens` the pool has, their K and V)."""
    assert llm.engine.prefix is not None
    table = llm.kv_cache.new_table()
    llm.engine.prefix.match(table, [*tokens, 0], salt)
    try:
        kv = llm.kv_cache.read(table, 0, table.length)
        return table.length, [array.tobytes() for array in arrays_of(kv)]
    finally:
        table.release()
