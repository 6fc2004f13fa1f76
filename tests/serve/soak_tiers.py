"""Tiers that fail when they are told to, and what makes them."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Literal

from redis_server import RedisServer

from prolepsis.errors import TierDamagedError, TierError, TierFullError, TierTimeoutError
from prolepsis.store.tier import PinningTier, Usage

Fault = Literal["full", "failed", "timeout", "damaged", "slow", "corrupt"]
FAULTS: tuple[Fault, ...] = ("full", "failed", "timeout", "damaged", "slow", "corrupt")
COUNTED = ("full", "failed", "timeout", "damaged")
"""Those that a tier reports itself."""
_SLOW_S = 0.2


class FaultyTier:
    """A tier that fails as `fault` says, and counts in `injected` how often it did. Implements PinningTier."""

    def __init__(self, tier: PinningTier) -> None:
        self.fault: Fault | None = None
        self.injected: Counter[str] = Counter()
        self._tier = tier

    @property
    def name(self) -> str:
        return self._tier.name

    @property
    def kind(self) -> str:
        return self._tier.kind

    def put(self, key: str, data: bytes) -> None:
        if self.fault == "full":
            self.injected["full"] += 1
            raise TierFullError("no space left on device")
        self._stumble()
        self._tier.put(key, data)

    def get(self, key: str) -> bytes | None:
        self._stumble()
        data = self._tier.get(key)
        if data is None:
            return None
        if self.fault == "damaged":
            self.injected["damaged"] += 1
            self._tier.delete(key)
            raise TierDamagedError("a checksum is wrong")
        if self.fault == "corrupt" and key.startswith("kv-"):
            self.injected["corrupt"] += 1
            place = len(data) // 2
            return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]
        return data

    def size(self, key: str) -> int | None:
        return self._tier.size(key)

    def delete(self, key: str) -> None:
        self._tier.delete(key)

    def keys(self, kind: str = "") -> Iterator[str]:
        return self._tier.keys(kind)

    def usage(self) -> Usage:
        return self._tier.usage()

    def pin(self, key: str) -> bool:
        return self._tier.pin(key)

    def unpin(self, key: str) -> None:
        self._tier.unpin(key)

    def touch(self, key: str) -> None:
        self._tier.touch(key)

    def pinned(self) -> list[str]:
        return self._tier.pinned()

    def close(self) -> None:
        self._tier.close()

    def _stumble(self) -> None:
        fault = self.fault
        if fault == "slow":
            self.injected["slow"] += 1
            time.sleep(_SLOW_S)
        if fault == "failed":
            self.injected["failed"] += 1
            raise TierError("input/output error")
        if fault == "timeout":
            self.injected["timeout"] += 1
            raise TierTimeoutError("no answer")


class Chaos:
    """Has one thing fail after the other until it is cancelled, with all well in between."""

    def __init__(self, tiers: list[FaultyTier], redis: RedisServer | None, seed: int) -> None:
        self.kills = 0
        self._tiers, self._redis = tiers, redis
        self._random = random.Random(seed)

    async def run(self) -> None:
        """Raises CancelledError; then all is well again."""
        turns = [(tier, fault) for tier in self._tiers for fault in FAULTS] + [None]
        while True:
            self._random.shuffle(turns)
            for turn in turns:
                await asyncio.sleep(self._random.uniform(0.2, 1.0))
                if turn is None:
                    await self._without_redis()
                else:
                    await self._with_fault(*turn)

    async def _with_fault(self, tier: FaultyTier, fault: Fault) -> None:
        tier.fault = fault
        try:
            await asyncio.sleep(self._random.uniform(0.3, 1.5))
        finally:
            tier.fault = None

    async def _without_redis(self) -> None:
        if self._redis is None:
            return
        self._redis.kill()
        self.kills += 1
        try:
            await asyncio.sleep(self._random.uniform(0.5, 2.0))
        finally:
            self._redis.start()
