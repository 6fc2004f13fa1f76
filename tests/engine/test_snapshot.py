"""One view of the engine: every block in one state, and nothing in it changes when the engine goes on."""

from dataclasses import replace

import numpy as np
import pytest

from prolepsis import LLM, BeamParams, SamplingParams
from prolepsis.engine.snapshot import NOBODY, BlockState, EngineSnapshot, take
from prolepsis.engine.traffic import Histogram

LONG = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0)
PROMPT = [5 + i % 900 for i in range(100)]


def run(llm: LLM, passes: int) -> EngineSnapshot:
    for _ in range(passes):
        llm.engine.step()
    return take(llm.engine)


def end_all(llm: LLM) -> EngineSnapshot:
    while llm.engine.has_work:
        llm.engine.step()
    return take(llm.engine)


def test_every_block_is_in_one_state(llm: LLM) -> None:
    pool = llm.kv_cache.pool
    empty = take(llm.engine)
    assert empty.pool.count(BlockState.BLANK) == pool.num_blocks
    assert not empty.pool.usage
    assert not empty.pool.slack
    one, other = (llm.new_request(PROMPT[:count], LONG) for count in (100, 70))
    llm.engine.add(one)
    run(llm, 1)
    llm.engine.add(other)
    now = run(llm, 3)
    shared = now.pool.count(BlockState.SHARED)
    assert shared == 70 // llm.kv_cache.block_size
    assert now.pool.count(BlockState.USED) + shared == pool.num_used
    owned = {number: int(np.count_nonzero(now.pool.owners == number)) for number in np.unique(now.pool.owners)}
    del owned[NOBODY]
    assert owned == {task.order[1]: len(task.sequence.table.blocks) - shared for task in (one, other)}
    assert [each.number for each in now.running] == list(owned)
    assert now.running[1].cached_tokens >= shared * llm.kv_cache.block_size
    assert 0 < now.pool.slack < 1
    after = end_all(llm)
    assert after.pool.count(BlockState.CACHED) > 0
    assert after.pool.count(BlockState.BLANK) + after.pool.count(BlockState.CACHED) == pool.num_blocks
    assert set(after.pool.owners.tolist()) == {NOBODY}


def test_a_view_does_not_change(llm: LLM) -> None:
    llm.engine.add(llm.new_request(PROMPT, LONG))
    before = run(llm, 3)
    states, copy = before.pool.states.copy(), (before.statistics, before.traffic, before.running, before.swap)
    told = repr(copy)
    end_all(llm)
    assert np.array_equal(before.pool.states, states)
    assert repr(copy) == told
    with pytest.raises(ValueError, match="read-only"):
        before.pool.states[0] = 1


def test_traffic_counts_what_requests_get(llm: LLM) -> None:
    start = take(llm.engine).traffic
    done, stopped = llm.new_request(PROMPT, replace(LONG, max_tokens=7)), llm.new_request(PROMPT, LONG)
    for request in (done, stopped):
        llm.engine.add(request)
    while not done.finished:
        llm.engine.step()
    llm.engine.cancel(stopped)
    now = take(llm.engine).traffic
    tokens = sum(len(request.completion.token_ids) for request in (done, stopped))
    assert now.generation_tokens - start.generation_tokens == tokens
    assert now.prompt_tokens - start.prompt_tokens == 2 * len(PROMPT)
    assert now.cached_tokens - start.cached_tokens == done.completion.cached_tokens + stopped.completion.cached_tokens
    assert {reason: count - start.ended[reason] for reason, count in now.ended.items()} == {
        "stop": 0,
        "length": 1,
        "abort": 1,
        "error": 0,
    }
    for name, more in [("time_to_first_token", 2), ("inter_token", tokens - 2), ("request_time", 1)]:
        assert sum(getattr(now, name).counts) - sum(getattr(start, name).counts) == more


def test_a_beam_search_is_one_request(llm: LLM) -> None:
    llm.engine.add(llm.new_search(PROMPT, BeamParams(beam_width=3, max_tokens=8)))
    (beam,) = run(llm, 4).running
    assert (beam.sequences, beam.prompt_tokens) == (3, len(PROMPT))
    ended = end_all(llm).traffic.ended
    assert ended["stop"] + ended["length"] > 0


@pytest.mark.parametrize("values", [[], [0.5], [1, 1.0, 2, 3, 99, 0]])
def test_values_at_once_are_as_one_by_one(values: list[float]) -> None:
    one, many = Histogram((1.0, 2.0)), Histogram((1.0, 2.0))
    for value in values:
        one.observe(value)
    many.observe_all(values)
    assert one.distribution == many.distribution
    assert sum(one.distribution.counts) == len(values)
    assert one.distribution.counts[0] == sum(value <= 1 for value in values)
