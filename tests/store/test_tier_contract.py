"""Every tier against a dictionary: the same puts, gets, pins and evictions, opened again and again."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from redis_server import RedisServer
from tier_samples import fast_directory, key

from prolepsis.errors import TierFullError
from prolepsis.store import DiskTier, MemoryTier, PinningTier, Tier
from prolepsis.store.redis_tier import RedisTier
from prolepsis.store.remote_tier import RemoteTier

KEYS = [key(number, kind) for number in range(4) for kind in ("segment", "session")]
keys = st.sampled_from(KEYS)
contents = st.binary(max_size=40) | st.sampled_from([300, 5000, 9000]).map(bytes)


class Model:
    """What a tier must do, in a few lines: `cost` of a size, and a budget or None."""

    def __init__(self, budget: int | None, cost: Callable[[int], int]) -> None:
        self.budget, self.cost = budget, cost
        self.entries: OrderedDict[str, bytes] = OrderedDict()  # longest unused first
        self.pins: set[str] = set()

    def taken(self, keys: set[str]) -> int:
        return sum(self.cost(len(self.entries[key])) for key in keys)

    def put(self, key: str, data: bytes) -> bool:
        if self.budget is not None:
            if self.cost(len(data)) + self.taken(self.pins - {key}) > self.budget:
                return False
            loose = [old for old in self.entries if old not in self.pins and old != key]
            while self.cost(len(data)) + self.taken(set(self.entries) - {key}) > self.budget:
                del self.entries[loose.pop(0)]
        self.entries[key] = data
        self.entries.move_to_end(key)
        return True

    def use(self, key: str) -> bytes | None:
        if key in self.entries:
            self.entries.move_to_end(key)
        return self.entries.get(key)

    def delete(self, key: str) -> None:
        self.entries.pop(key, None)
        self.pins.discard(key)


class Contract(RuleBasedStateMachine):
    """Steps that are done to a tier and to its model."""

    def __init__(self, open_tier: Callable[[], Tier], model: Model, lasts: bool) -> None:
        super().__init__()
        self.open_tier, self.model, self.lasts = open_tier, model, lasts
        self.tier = open_tier()
        for left in list(self.tier.keys()):  # by the example before this one
            self.tier.delete(left)

    @rule(key=keys, data=contents)
    def put(self, key: str, data: bytes) -> None:
        if self.model.put(key, data):
            self.tier.put(key, data)
        else:
            with pytest.raises(TierFullError):
                self.tier.put(key, data)

    @rule(key=keys)
    def get(self, key: str) -> None:
        assert self.tier.get(key) == self.model.use(key)

    @rule(key=keys)
    def delete(self, key: str) -> None:
        self.tier.delete(key)
        self.model.delete(key)

    @rule(key=keys)
    def pin(self, key: str) -> None:
        if isinstance(self.tier, PinningTier):
            assert self.tier.pin(key) == (key in self.model.entries)
            if key in self.model.entries:
                self.model.pins.add(key)

    @rule(key=keys)
    def unpin(self, key: str) -> None:
        if isinstance(self.tier, PinningTier):
            self.tier.unpin(key)
            self.model.pins.discard(key)
            self.model.use(key)

    @rule(key=keys)
    def touch(self, key: str) -> None:
        if isinstance(self.tier, PinningTier):
            self.tier.touch(key)
            self.model.use(key)

    @rule()
    def open_again(self) -> None:
        if self.lasts:
            self.tier.close()
            self.tier = self.open_tier()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert {key: size for key in KEYS if (size := self.tier.size(key)) is not None} == {
            key: len(data) for key, data in self.model.entries.items()
        }
        assert set(self.tier.keys()) == set(self.model.entries)
        assert set(self.tier.keys("session")) == {key for key in self.model.entries if key.startswith("session-")}
        if isinstance(self.tier, PinningTier) and self.model.budget is not None:
            assert set(self.tier.pinned()) == self.model.pins
        usage = self.tier.usage()
        assert usage.budget == self.model.budget
        assert usage.entries in (None, len(self.model.entries))
        assert usage.bytes in (None, self.model.taken(set(self.model.entries)))

    def teardown(self) -> None:
        self.tier.close()


def never(size: int) -> int:
    return 0


def blocks(size: int) -> int:
    return (size + 20 + 4095) // 4096 * 4096


@pytest.fixture(
    params=["memory", "disk", "redis", "memory://", "file://", pytest.param("s3://", marks=pytest.mark.nightly)]
)
def contract(request: pytest.FixtureRequest) -> Iterator[Callable[[], Contract]]:
    """Makes the machine of one kind of tier."""
    kind = request.param
    with fast_directory() as directory:
        if kind == "memory":
            yield lambda: Contract(lambda: MemoryTier(12_000), Model(12_000, lambda size: size + 256), lasts=False)
        elif kind == "disk":
            yield lambda: Contract(lambda: DiskTier(directory, 24_000), Model(24_000, blocks), lasts=True)
        elif kind == "redis":
            server = RedisServer()
            try:
                yield lambda: Contract(lambda: RedisTier(server.url, "redis"), Model(None, never), lasts=True)
            finally:
                server.kill()
        elif kind == "s3://":
            request.getfixturevalue("s3")
            yield lambda: Contract(lambda: RemoteTier("s3://bucket/contract", kind), Model(None, never), lasts=True)
        else:
            url = f"{kind}{directory}"
            yield lambda: Contract(lambda: RemoteTier(url, url), Model(None, never), lasts=True)
            with suppress(FileNotFoundError):
                MemoryFileSystem().rm(str(directory), recursive=True)


def test_every_tier_keeps_the_contract(contract: Callable[[], Contract]) -> None:
    run_state_machine_as_test(
        contract,
        settings=settings(
            max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
