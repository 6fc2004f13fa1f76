"""What an engine holds and does at one moment, to be looked at from other threads."""

import time
from collections.abc import Sequence as Many
from dataclasses import replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.engine import Engine
from prolepsis.engine.statistics import EngineStatistics
from prolepsis.engine.swap import SwapStatistics
from prolepsis.engine.task import Task
from prolepsis.engine.traffic import TrafficStatistics

NOBODY = -1
"""As the owner of a block: no request of the engine alone."""


class BlockState(IntEnum):
    """What a block is."""

    BLANK = 0
    """Free, and nothing in it is known."""
    CACHED = 1
    """Free, and known to the prefix index: later prompts may take it into use, or others overwrite it."""
    USED = 2
    """Held by one sequence."""
    SHARED = 3
    """Held by several."""


class RunningRequest(NamedTuple):
    """A request that holds blocks. Neither its text nor whose it is."""

    number: int
    """How many requests had arrived with it: its own for ever."""
    priority: int
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt, found in a cache."""
    output_tokens: int
    held_tokens: int
    """Of all its sequences; tokens that two of them share count twice."""
    sequences: int
    age_s: float
    """Since it arrived."""
    preemptions: int


class PoolSnapshot(NamedTuple):
    """Every block of the cache. The arrays are read-only."""

    dtype: str
    block_size: int
    """Tokens in a block."""
    block_bytes: int
    states: NDArray[np.uint8]
    """`BlockState` of each block."""
    owners: NDArray[np.int64]
    """The number of the request that alone holds a block; NOBODY where none or several do, or something else does."""
    slack: float
    """Share of the slots in the used blocks that hold no token now."""

    def count(self, state: BlockState) -> int:
        """How many blocks are in a state."""
        return int(np.count_nonzero(self.states == state))

    @property
    def usage(self) -> float:
        """Share of the blocks that are used."""
        return float(np.count_nonzero(self.states >= BlockState.USED)) / len(self.states)


class EngineSnapshot(NamedTuple):
    """One consistent view, which nothing changes any more."""

    at: float
    """When it was taken, `time.monotonic`."""
    statistics: EngineStatistics
    traffic: TrafficStatistics
    running: tuple[RunningRequest, ...]
    pool: PoolSnapshot
    swap: SwapStatistics | None
    """None where nothing is swapped."""
    drafter: str | None
    """Who drafts tokens, if anybody does."""
    drafter_failure: str | None
    """Why it has stopped, if it has."""


def take(engine: Engine) -> EngineSnapshot:
    """Look at `engine`, between two passes, in the thread that owns it. Takes well below a millisecond."""
    statistics = engine.statistics()
    drafts, speculation = statistics.drafts, engine.speculation
    drafts = replace(drafts, drafted_at=list(drafts.drafted_at), accepted_at=list(drafts.accepted_at))
    now = time.perf_counter()
    return EngineSnapshot(
        at=time.monotonic(),
        statistics=statistics._replace(drafts=drafts),
        traffic=engine.traffic.statistics(),
        running=tuple(_request(task, now) for task in engine.running),
        pool=_pool(engine),
        swap=None if engine.swap is None else replace(engine.swap.statistics),
        drafter=None if speculation is None else speculation.drafter.name,
        drafter_failure=None if speculation is None or speculation.failure is None else str(speculation.failure),
    )


def _request(task: Task, now: float) -> RunningRequest:
    return RunningRequest(
        number=task.order[1],
        priority=task.priority,
        prompt_tokens=task.completions[0].prompt_tokens,
        cached_tokens=task.statistics.cached_tokens,
        output_tokens=len(task.statistics.token_times),
        held_tokens=sum(sequence.table.held for sequence in task.sequences),
        sequences=len(task.sequences),
        age_s=now - task.statistics.arrived,
        preemptions=task.statistics.preemptions,
    )


def _pool(engine: Engine) -> PoolSnapshot:
    cache = engine.runner.cache
    counts = cache.pool.ref_counts
    states = np.where(counts > 0, 1 + np.minimum(counts, 2), cache.pool.registered).astype(np.uint8)
    owners = _owners(counts, engine.running)
    states.flags.writeable = owners.flags.writeable = False
    used = int(np.count_nonzero(counts)) * cache.block_size
    empty = sum(
        sequence.table.capacity - sequence.table.length for task in engine.running for sequence in task.sequences
    )
    return PoolSnapshot(
        dtype=cache.dtype,
        block_size=cache.block_size,
        block_bytes=cache.block_size * cache.bytes_per_token,
        states=states,
        owners=owners,
        slack=empty / used if used else 0.0,
    )


def _owners(counts: NDArray[np.int32], running: Many[Task]) -> NDArray[np.int64]:
    owners = np.full(len(counts), NOBODY, np.int64)
    for task in running:
        for sequence in task.sequences:
            owners[sequence.table.blocks] = task.order[1]
    owners[counts != 1] = NOBODY
    return owners
