"""Random workloads: whatever else happens to a request, its tokens are those it gets alone."""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prolepsis import LLM, SamplingParams
from prolepsis.engine.engine import Engine
from prolepsis.engine.request import Request
from prolepsis.engine.speculation import Speculation
from prolepsis.engine.swap import SwapSpace
from prolepsis.kv.prefix_index import PrefixIndex
from prolepsis.speculate.drafter import Draft, Draftee, Drafter
from prolepsis.speculate.ngram import NgramDrafter

SYSTEM = [[7 * i % 1000 for i in range(length)] for length in (0, 20, 75)]
KINDS = [
    SamplingParams(temperature=0, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=5, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=2, top_p=0.9, repetition_penalty=1.2, presence_penalty=0.5),
    SamplingParams(temperature=2.0, seed=8, n=3, ignore_eos=True),
]
LONGEST = 200


@dataclass(frozen=True)
class Asked:
    """One request of a workload; `cancel` after so many passes from its arrival on, if at all."""

    system: int
    tail: int
    params: SamplingParams
    arrives: int
    cancel: int | None
    priority: int
    salt: str

    @property
    def prompt(self) -> list[int]:
        return SYSTEM[self.system] + [(31 * self.tail + 3 * i) % 1000 for i in range(self.tail % 40 + 1)]


@dataclass(frozen=True)
class Machine:
    """How the engine is set up."""

    spare: int
    """Blocks beyond those of one longest sequence."""
    block_size: int
    budget: int
    max_running: int
    prefix: bool
    swap: tuple[int, int] | None  # bytes in memory and on the disk; None computes again
    threads: int
    draft: str
    draft_tokens: int | None


requests = st.builds(
    Asked,
    st.integers(0, len(SYSTEM) - 1),
    st.integers(0, 200),
    st.builds(lambda kind, count: replace(kind, max_tokens=count), st.sampled_from(KINDS), st.integers(1, 80)),
    st.integers(0, 30),
    st.none() | st.none() | st.integers(0, 40),
    st.integers(-1, 1),
    st.sampled_from(["", "", "other"]),
)
machines = st.builds(
    Machine,
    st.integers(0, 12),
    st.sampled_from([16, 32]),
    st.sampled_from([48, 64, 100, 256]),
    st.integers(1, 16),
    st.booleans(),
    st.sampled_from([None, (1 << 20, 1 << 20), (1 << 16, 1 << 17), (0, 1 << 20), (0, 0)]),
    st.sampled_from([1, 2]),
    st.sampled_from(["none", "ngram", "mostly right"]),
    st.sampled_from([None, 1, 4, 9]),
)


@dataclass
class Run:
    """A request on its way through the engine under test."""

    asked: Asked
    requests: list[Request] = field(default_factory=list)


class MostlyRight:
    """Drafts what a request gets alone, but for some tokens, and sometimes less than it might, or too much."""

    name = "mostly right"

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self.continuations: dict[int, list[int]] = {}
        """What each request gets, prompt and all, by its number."""

    def propose(self, batch: Many[Draftee]) -> list[Draft]:
        return [self._draft(each) for each in batch]

    def _draft(self, draftee: Draftee) -> Draft:
        at = len(draftee.tokens)
        expected = self.continuations[draftee.key][at : at + draftee.limit]
        tokens = [(token + (place % 5 == 3)) % 1000 for place, token in enumerate(expected, at)]
        tokens = tokens[: draftee.limit - at % 2]
        return Draft(tokens, [None] * len(tokens))

    def forget(self, key: int) -> None:
        self.continuations.pop(key, None)


@pytest.fixture(scope="module")
def models(tiny: Path) -> "dict[tuple[int, int], LLM]":
    return {(size, threads): _load(tiny, size, threads) for size in (16, 32) for threads in (1, 2)}


def _load(tiny: Path, block_size: int, threads: int) -> LLM:
    return LLM(tiny, block_size=block_size, threads=threads, max_context=LONGEST, kv_memory=8 << 20)


@pytest.fixture(scope="module")
def codes(tiny: Path) -> LLM:
    return LLM(tiny, kv_dtype="kivi4", threads=2, max_context=LONGEST, kv_memory=8 << 20, max_running=4)


def machine(llm: LLM, setup: Machine) -> Engine:
    """An engine over an empty cache."""
    assert llm.engine.prefix is not None
    prefix = PrefixIndex(llm.kv_cache.pool, setup.block_size) if setup.prefix else None
    swap = None if setup.swap is None else SwapSpace(llm.kv_cache, llm.rope, *setup.swap)
    most = max(1, min(setup.max_running, setup.budget - setup.block_size))
    drafters: dict[str, Drafter] = {"ngram": NgramDrafter(), "mostly right": MostlyRight(llm)}
    drafter = drafters.get(setup.draft)
    speculation = None if drafter is None else Speculation(drafter, setup.draft_tokens)
    return Engine(llm.runner, prefix, swap, most, setup.budget, speculation)


@given(asked=st.lists(requests, min_size=1, max_size=12), setup=machines)
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_request_gets_the_tokens_it_gets_alone(
    models: dict[tuple[int, int], LLM], asked: list[Asked], setup: Machine
) -> None:
    assert_as_alone(models[setup.block_size, setup.threads], asked, setup)


@given(asked=st.lists(requests, min_size=1, max_size=12), setup=machines)
@settings(max_examples=6, deadline=None, suppress_health_check=list(HealthCheck))
def test_each_request_gets_the_tokens_it_gets_alone_from_a_cache_of_codes(
    codes: LLM, asked: list[Asked], setup: Machine
) -> None:
    """Blocks of 128 tokens, whose exact forms are few: prompts end in the first and answers in the second."""
    assert_as_alone(codes, asked, replace(setup, block_size=128, budget=256))


def assert_as_alone(llm: LLM, asked: list[Asked], setup: Machine) -> None:
    pool = llm.kv_cache.pool
    assert pool.num_used == 0
    for each in asked:
        completed_alone(llm, each)  # from now on known: it takes blocks
    room = -(-LONGEST // setup.block_size) + setup.spare
    taken = []
    for _ in range(pool.num_blocks - room):
        taken.append(pool.allocate())
        pool.settle(taken[-1])
    try:
        engine = machine(llm, setup)
        runs = _run(llm, engine, asked)
        assert pool.num_used == len(taken)
        _check(llm, engine, runs)
    finally:
        if engine.prefix is not None:
            engine.prefix.clear()
        pool.on_forget = None
        for block in taken:
            pool.release(block)
    pool.check()
    for run in runs:
        for request, alone in zip(run.requests, completed_alone(llm, run.asked), strict=True):
            whole = request.completion.finish_reason is not None
            assert whole or run.asked.cancel is not None
            count = len(request.completion.token_ids)
            assert request.completion.token_ids == alone[0][:count]
            assert not whole or (request.completion.text, request.completion.finish_reason) == alone[1:]


def _run(llm: LLM, engine: Engine, asked: list[Asked]) -> list[Run]:
    """Pass by pass: requests arrive and are cancelled as they say."""
    runs = [Run(each) for each in asked]
    passes = 0
    while engine.has_work or passes <= 30:
        for run in runs:
            each = run.asked
            if each.arrives == passes:
                run.requests = llm.new_requests(
                    each.prompt, each.params, priority=each.priority, cache_salt=each.salt
                )  # fmt: skip
                for request, alone in zip(run.requests, completed_alone(llm, each), strict=True):
                    if engine.speculation is not None and isinstance(engine.speculation.drafter, MostlyRight):
                        engine.speculation.drafter.continuations[request.sequence.number] = each.prompt + alone[0]
                    engine.add(request)
            if each.cancel is not None and each.arrives + each.cancel == passes:
                for request in run.requests:
                    engine.cancel(request)
        for _, delta in engine.step():
            assert delta is not None
        if engine.prefix is not None:
            engine.prefix.check()
        llm.kv_cache.pool.check()
        passes += 1
        assert passes < 20_000
    return runs


def _check(llm: LLM, engine: Engine, runs: list[Run]) -> None:
    now = engine.statistics()
    assert (now.running, now.waiting, now.failed) == (0, 0, 0)
    assert now.finished + now.cancelled == sum(len(run.requests) for run in runs)
    if engine.swap is not None:
        held = engine.swap.statistics
        assert (held.memory_bytes, held.disk_bytes, held.damaged, held.disk_failures) == (0, 0, 0, 0)


def completed_alone(llm: LLM, asked: Asked) -> list[tuple[list[int], str, str]]:
    """Token ids, text and reason to end of each completion of a request that has an engine to itself."""
    return _alone(llm, tuple(asked.prompt), _hashable(asked.params))


def _hashable(params: SamplingParams) -> tuple[tuple[str, object], ...]:
    return tuple((name, getattr(params, name)) for name in params.__dataclass_fields__ if name != "logit_bias")


@cache
def _alone(
    llm: LLM, prompt: tuple[int, ...], fields: tuple[tuple[str, object], ...]
) -> list[tuple[list[int], str, str]]:
    params = SamplingParams(**dict(fields))  # type: ignore[arg-type]
    outcomes = []
    for index in range(params.n):
        sequence = llm.runner.new_sequence(prompt)
        request = llm.new_request(sequence, replace(params, n=1, seed=params.sample_seed(index)))
        for _ in llm.run(request):
            pass
        sequence.release()
        done = request.completion
        outcomes.append((done.token_ids, done.text, str(done.finish_reason)))
    return outcomes
