"""The engine, pass by pass: order, fairness, sharing, preemption, cancellation and failures."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from prolepsis import LLM, SamplingParams
from prolepsis.engine.beam_search import BeamParams, beam_search
from prolepsis.engine.engine import Engine
from prolepsis.engine.request import Request
from prolepsis.engine.scheduler import ARRIVALS_A_PRIORITY, prompt_tokens, share_budget
from prolepsis.engine.swap import SwapSpace
from prolepsis.errors import InputError
from prolepsis.kv.prefix_index import PrefixIndex

GREEDY = SamplingParams(temperature=0, seed=0, max_tokens=8, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.5, seed=9, max_tokens=30, ignore_eos=True)
SIZE = 32


def prompt(number: int, length: int = 10) -> list[int]:
    return [(number * 37 + 5 * i) % 1000 for i in range(length)]


@pytest.fixture(scope="module")
def small(tiny: Path) -> LLM:
    """A model whose own engine shares nothing, so that engines of a test can have its cache."""
    return LLM(tiny, prefix_caching=False, preemption="recompute", kv_memory=64 << 20)


@pytest.fixture
def room(small: LLM, llm: LLM) -> "Iterator[Room]":
    room = Room(small, llm)
    yield room
    room.close()


class Room:
    """A cache with only so many blocks, and engines over it. `generate`: what requests get elsewhere, alone."""

    def __init__(self, llm: LLM, other: LLM) -> None:
        self.llm = llm
        self.generate = other.generate
        self._pool = llm.kv_cache.pool
        self._taken: list[int] = []
        self._prefix: PrefixIndex | None = None

    def engine(
        self, blocks: int = 64, *, max_running: int = 16, budget: int = 256, swap: tuple[int, int] | None = (1 << 24, 0)
    ) -> Engine:
        self.close()
        self._taken = [self._pool.allocate() for _ in range(self._pool.num_blocks - blocks)]
        self._prefix = PrefixIndex(self._pool, SIZE)
        space = None if swap is None else SwapSpace(self.llm.kv_cache, self.llm.rope, *swap)
        return Engine(self.llm.runner, self._prefix, space, max_running, budget)

    def add(self, engine: Engine, tokens: list[int], params: SamplingParams = GREEDY, **settings: object) -> Request:
        (request,) = self.llm.new_requests(tokens, params, **settings)  # type: ignore[arg-type]
        engine.add(request)
        return request

    def close(self) -> None:
        while self._taken:
            self._pool.release(self._taken.pop())
        assert self._pool.num_used == 0
        if self._prefix is not None:
            self._prefix.check()
            self._prefix.clear()
        self._pool.check()


def finish(engine: Engine, most: int = 10_000) -> list[Request]:
    """Run until nothing is left; requests in the order in which they ended."""
    ended = []
    for _ in range(most):
        if not engine.has_work:
            return ended
        ended += [task for task, delta in engine.step() if delta is None or delta.finish_reason is not None]
    raise AssertionError("the engine does not come to an end")


def test_the_first_in_order_gets_half_of_the_budget_and_short_prompts_the_rest() -> None:
    assert share_budget([1000, 1000, 20, 300], 256) == [128, 0, 20, 108]
    assert share_budget([1000, 20], 256) == [236, 20]
    assert share_budget([10, 1000], 256) == [10, 246]
    assert share_budget([1000], 255) == [255]
    assert share_budget([5, 5], 1) == [1, 0]
    assert share_budget([], 256) == share_budget([], 0) == []
    assert share_budget([3], 0) == [0]


def test_prompts_lengthen_a_pass_to_three_times_what_it_takes_without_them_or_by_64_rows() -> None:
    assert [prompt_tokens(256, steps) for steps in (1, 32, 33, 64)] == [64, 64, 66, 128]
    assert [prompt_tokens(256, steps) for steps in (0, 100, 256)] == [256, 156, 0]
    assert prompt_tokens(40, 1) == 39


def test_sequences_that_generate_are_never_held_up_by_a_long_prompt(room: Room) -> None:
    engine = room.engine(budget=64)
    talking = room.add(engine, prompt(1), replace(GREEDY, max_tokens=30))
    engine.step()
    room.add(engine, prompt(2, 600))
    for count in range(2, 12):
        (output,) = engine.step()
        assert output.task is talking
        assert len(talking.completion.token_ids) == count
    finish(engine)


def test_a_short_prompt_does_not_wait_for_a_long_one(room: Room) -> None:
    engine = room.engine(budget=64)
    long, short = room.add(engine, prompt(2, 1000)), room.add(engine, prompt(3, 20))
    assert [output.task for output in engine.step()] == [short]
    assert finish(engine) == [short, long]


def test_priorities_overtake_but_starve_nobody(room: Room) -> None:
    engine = room.engine(max_running=1)
    waiting = [room.add(engine, prompt(i), priority=1) for i in range(2)]
    urgent = [room.add(engine, prompt(10 + i)) for i in range(ARRIVALS_A_PRIORITY + 20)]
    order = finish(engine, 100_000)
    for place, request in enumerate(waiting):
        # Those that came up to 256 later go first, and no others.
        assert order.index(request) == ARRIVALS_A_PRIORITY - 2 + 2 * place
    assert [request for request in order if request.priority == 0] == urgent


def test_prompts_share_what_they_begin_with_even_while_it_is_computed(room: Room) -> None:
    engine = room.engine()
    common = prompt(7, 500)
    many = [room.add(engine, [*common, i]) for i in range(6)]
    finish(engine)
    alone = [room.generate([[*common, i]], GREEDY)[0] for i in range(6)]
    assert [request.completion for request in many] == alone
    computed = engine.statistics().computed_tokens - 6 * 7
    assert 501 <= computed < 800  # of 3,006: the first reads it, two read ahead at most
    again = room.add(engine, [*common, 3])
    finish(engine)
    assert again.completion == alone[3]
    assert again.completion.cached_tokens == 500


def test_a_partly_filled_block_is_shared_and_copied_when_it_is_written(room: Room) -> None:
    engine = room.engine()
    first = room.add(engine, prompt(1, 50))
    finish(engine)
    second = room.add(engine, [*prompt(1, 45), 1, 2, 3])
    third = room.add(engine, prompt(1, 50))
    finish(engine)
    assert (second.completion.cached_tokens, third.completion.cached_tokens) == (45, 49)
    assert third.completion == first.completion
    (alone,) = room.generate([[*prompt(1, 45), 1, 2, 3]], GREEDY)
    assert second.completion == alone


def test_salts_keep_tenants_apart(room: Room) -> None:
    engine = room.engine()
    tokens = prompt(3, 100)
    for salt, cached in (("a", 0), ("a", 99), ("b", 0), ("", 0), ("b", 99)):
        request = room.add(engine, tokens, cache_salt=salt)
        finish(engine)
        assert request.completion.cached_tokens == cached


@pytest.mark.parametrize("swap", [(1 << 24, 0), (0, 1 << 24), (3000, 1 << 24), (0, 0), None])
def test_a_pool_far_too_small_gives_the_same_tokens(room: Room, swap: tuple[int, int] | None) -> None:
    params = replace(SEEDED, max_tokens=100)
    prompts = [prompt(i, 20 + 7 * i) for i in range(10)]
    ample = room.engine(200)
    expected = [room.add(ample, tokens, params) for tokens in prompts]
    finish(ample)
    assert ample.statistics().preemptions == 0
    engine = room.engine(8, swap=swap)
    got = [room.add(engine, tokens, params) for tokens in prompts]
    finish(engine)
    assert [request.completion for request in got] == [request.completion for request in expected]
    now = engine.statistics()
    assert now.preemptions > 0
    assert sum(request.statistics.preemptions for request in got) == now.preemptions
    if swap is None or swap == (0, 0):
        assert now.recomputed_tokens > 0
        assert now.refused_swaps == (0 if swap is None else now.preemptions)
    else:
        assert (now.recomputed_tokens, now.refused_swaps) == (0, 0)
        assert now.coded_bytes > 0
    assert now.prompt_tokens == sum(map(len, prompts))  # however often they are looked for
    # The first in order never leaves.
    assert got[0].statistics.preemptions == 0


def test_thrashing_is_bounded(room: Room) -> None:
    """Each return to the pool is worth some passes: preemptions are fewer than the blocks that are written."""
    engine = room.engine(8)
    many = [room.add(engine, prompt(i, 30), replace(SEEDED, max_tokens=150)) for i in range(12)]
    finish(engine)
    assert 0 < engine.statistics().preemptions <= len(many) * (180 // SIZE)


def test_damaged_swap_is_computed_again_and_counted(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    from prolepsis.engine import swap as module

    store = module.SwapSpace._store

    def damage(self: SwapSpace, *arguments: object) -> object:
        swapped = store(self, *arguments)  # type: ignore[arg-type]
        data = bytearray(swapped.source)  # type: ignore[arg-type]
        data[len(data) // 2] ^= 1
        object.__setattr__(swapped, "source", bytes(data))
        return swapped

    params = replace(SEEDED, max_tokens=100)
    prompts = [prompt(i, 40) for i in range(6)]
    expected = room.generate(prompts, params)
    monkeypatch.setattr(module.SwapSpace, "_store", damage)
    engine = room.engine(8)
    got = [room.add(engine, tokens, params) for tokens in prompts]
    finish(engine)
    assert [request.completion for request in got] == expected
    now = engine.statistics()
    assert 0 < now.refused_swaps <= now.preemptions
    assert now.recomputed_tokens > 0


def test_n_samples_read_the_prompt_once_and_equal_requests_with_the_seeds_that_follow(room: Room) -> None:
    tokens, params = prompt(4, 77), replace(SEEDED, n=4, logprobs=0)
    engine = room.engine()
    many = room.llm.new_requests(tokens, params)
    for request in many:
        engine.add(request)
    finish(engine)
    assert engine.statistics().computed_tokens == 77 + 4 * 29
    alone = [room.generate([tokens], replace(params, n=1, seed=9 + i))[0] for i in range(4)]
    assert [request.completion for request in many] == alone
    assert [request.completion.cached_tokens for request in many] == [0, 77, 77, 77]
    best = room.generate([tokens], replace(params, n=2, best_of=4))
    ranked = sorted(alone, key=lambda one: -one.cumulative_logprob / len(one.token_ids))  # type: ignore[operator]
    assert best == ranked[:2]
    for one in alone:
        assert one.cumulative_logprob == pytest.approx(sum(token.logprob for token in one.logprobs))  # type: ignore[misc]


def test_followers_do_without_a_leader_that_is_cancelled(room: Room) -> None:
    for passes in (0, 1, 2):
        engine = room.engine(budget=64)
        many = room.llm.new_requests(prompt(4, 100), replace(SEEDED, n=3))
        for request in many:
            engine.add(request)
        for _ in range(passes):
            engine.step()
        engine.cancel(many[0])
        finish(engine)
        alone = [room.generate([prompt(4, 100)], replace(SEEDED, seed=9 + i))[0] for i in range(3)]
        assert [request.completion for request in many[1:]] == alone[1:]


def test_a_beam_search_among_others_finds_what_it_finds_alone(room: Room) -> None:
    params = BeamParams(beam_width=4, n=3, max_tokens=40, length_penalty=0.7)
    tokens = prompt(8, 60)
    runner = room.llm.runner
    eos = room.llm.tokenizer.eos_ids
    alone = beam_search(runner, tokens, params, eos_ids=eos, context=room.llm.max_context)
    engine = room.engine(18)
    search = room.llm.new_search(tokens, params)
    first = [room.add(engine, prompt(i, 50), replace(SEEDED, max_tokens=60)) for i in range(3)]
    engine.add(search)
    more = [room.add(engine, prompt(i, 50), replace(SEEDED, max_tokens=60)) for i in range(3, 9)]
    finish(engine)
    found = search.completions
    assert [(one.token_ids, one.score, one.finish_reason) for one in found] == [
        (one.token_ids, one.score, one.finish_reason) for one in alone
    ]
    assert engine.statistics().preemptions > 0
    expected = room.generate([prompt(i, 50) for i in range(9)], replace(SEEDED, max_tokens=60))
    assert [request.completion for request in first + more] == expected


def test_a_search_that_is_preempted_comes_back(room: Room) -> None:
    params = BeamParams(beam_width=3, max_tokens=90, n=3, ignore_eos=True)
    expected = room.generate([prompt(1, 20)], params)
    for swap in ((1 << 24, 0), None):
        engine = room.engine(16, swap=swap)
        older = [room.add(engine, prompt(i, 60), replace(SEEDED, max_tokens=70)) for i in range(3)]
        search = room.llm.new_search(prompt(1, 20), params)
        engine.add(search)
        finish(engine)
        assert search.statistics.preemptions > 0
        assert search.completions == expected
        assert all(request.completion.finish_reason == "length" for request in older)


@pytest.mark.parametrize("width", [2, 4, 8])
def test_a_search_fits_into_as_many_blocks_as_it_has_beams(room: Room, width: int) -> None:
    params = BeamParams(beam_width=width, n=width, max_tokens=20, ignore_eos=True)
    engine = room.engine(width)
    search = room.llm.new_search(prompt(3, 11), params)
    engine.add(search)
    finish(engine)
    assert search.completions == room.generate([prompt(3, 11)], params)
    again = room.llm.new_search(prompt(3, 11), params)
    engine.add(again)
    finish(engine)
    assert again.completions == search.completions


def test_an_interrupted_pass_leaves_nothing_behind(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = room.engine(8)
    many = [room.add(engine, prompt(i, 60), SEEDED) for i in range(6)]
    put = SwapSpace.put

    def interrupted(self: SwapSpace, *arguments: object) -> object:
        monkeypatch.setattr(SwapSpace, "put", put)
        raise KeyboardInterrupt

    monkeypatch.setattr(SwapSpace, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        finish(engine)
    for request in many[::2]:
        engine.cancel(request)
    finish(engine)
    expected = room.generate([prompt(i, 60) for i in range(6)], SEEDED)
    assert [request.completion for request in many[1::2]] == expected[1::2]


def test_ctrl_c_ends_a_batch_between_passes(llm: LLM) -> None:
    prompts = [prompt(i) for i in range(4)]
    expected = llm.generate(prompts, SEEDED)

    def strike(done: int, total: int) -> None:
        signal.raise_signal(signal.SIGINT)

    short = [replace(SEEDED, max_tokens=4), *[replace(SEEDED, max_tokens=200)] * 3]
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, short, progress=strike)
    assert not llm.engine.has_work
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert llm.generate(prompts, SEEDED) == expected


def test_what_can_never_fit_is_refused_at_once(room: Room) -> None:
    engine = room.engine(64)
    pool = room.llm.kv_cache.pool
    search = room.llm.new_search(prompt(1), BeamParams(beam_width=64, max_tokens=2000))
    blocks = 64 * -(-2010 // SIZE)
    message = f"64 sequence.s. of 2010 tokens, {blocks} blocks, but the KV cache has {pool.num_blocks}"
    if blocks > pool.num_blocks:
        with pytest.raises(InputError, match=message):
            engine.add(search)
    small = room.llm.new_search(prompt(1), BeamParams(beam_width=17, max_tokens=2))
    with pytest.raises(InputError, match="beam_width 17 exceeds max_running, 16"):
        engine.add(small)
    assert not engine.has_work


def test_an_error_in_one_request_is_its_own(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = room.engine()
    prompts = [prompt(i, 30) for i in range(4)]
    many = [room.add(engine, tokens, SEEDED) for tokens in prompts]
    accept = many[2].accept

    def broken(logits: np.ndarray) -> object:
        if len(many[2].completion.token_ids) == 5:
            raise ZeroDivisionError("by design")
        return accept(logits)

    monkeypatch.setattr(many[2], "accept", broken)
    finish(engine)
    assert isinstance(many[2].completion.error, ZeroDivisionError)
    assert (len(many[2].completion.token_ids), many[2].completion.finish_reason) == (5, None)
    expected = room.generate(prompts, SEEDED)
    for index in (0, 1, 3):
        assert many[index].completion == expected[index]
    assert engine.statistics()[2:5] == (3, 0, 1)


@pytest.mark.parametrize("passes", [0, 1, 2, 3, 9])
def test_a_request_can_be_cancelled_wherever_it_stands(room: Room, passes: int) -> None:
    engine = room.engine(9, budget=64)
    many = [room.add(engine, prompt(i, 90), replace(SEEDED, max_tokens=60)) for i in range(6)]
    for _ in range(passes):
        engine.step()
    for request in many[::2]:
        engine.cancel(request)
        engine.cancel(request)
        assert request.completion.finish_reason is None
    finish(engine)
    expected = room.generate([prompt(i, 90) for i in range(6)], replace(SEEDED, max_tokens=60))
    assert [request.completion for request in many[1::2]] == expected[1::2]
    assert engine.statistics()[2:5] == (3, 3, 0)


def test_statistics_of_a_request(room: Room) -> None:
    engine = room.engine(max_running=1)
    first, second = room.add(engine, prompt(1)), room.add(engine, prompt(2))
    finish(engine)
    for request in (first, second):
        told = request.completion.statistics
        assert told is request.statistics
        assert len(told.token_times) == 8
        assert len(told.inter_token_s) == 7
        assert 0 <= told.queue_s <= told.ttft_s  # type: ignore[operator]
        assert min(told.inter_token_s) > 0
    assert second.statistics.queue_s > first.statistics.ttft_s  # type: ignore[operator]
    summary = second.statistics.summary()
    assert summary["ttft_s"] == second.statistics.ttft_s
    assert summary["preemptions"] == 0


def test_waste_is_what_is_left_in_the_last_blocks(room: Room) -> None:
    engine = room.engine()
    room.add(engine, prompt(1, 48), replace(GREEDY, max_tokens=1))
    finish(engine)
    now = engine.statistics()
    taken = room.llm.kv_cache.pool.num_blocks - 64  # by the test, and as good as full
    assert now.waste == pytest.approx(16 / ((taken + 2) * SIZE))


def test_requests_from_prompts_with_parameters_of_their_own(llm: LLM) -> None:
    prompts = [prompt(i) for i in range(3)]
    params = [GREEDY, replace(SEEDED, n=2), BeamParams(beam_width=2, max_tokens=5)]
    done: list[tuple[int, int]] = []
    together = llm.generate(prompts, params, progress=lambda *state: done.append(state))
    assert len(together) == 4
    assert together == [one for tokens, each in zip(prompts, params, strict=True) for one in llm.generate(tokens, each)]
    assert done == [(1, 3), (2, 3), (3, 3)]
    with pytest.raises(InputError, match="params has 2 entries for 3 prompts"):
        llm.generate(prompts, params[:2])
    for wrong in ("x", {"n": 1}, [None], [GREEDY, 5, GREEDY]):
        with pytest.raises(InputError, match="params must be SamplingParams or BeamParams"):
            llm.generate(prompts, wrong)  # type: ignore[arg-type]


def test_a_new_tiny_model_has_an_engine_of_the_asked_kind(tiny: Path) -> None:
    plain = LLM(tiny, kv_memory=1 << 20, prefix_caching=False, preemption="recompute")
    assert (plain.engine.prefix, plain.engine.swap) == (None, None)
    default = LLM(tiny, kv_memory=1 << 20, block_size=16)
    assert default.engine.prefix is not None
    assert default.engine.swap is not None
    assert default.generate([prompt(1, 99)], SEEDED) == plain.generate([prompt(1, 99)], SEEDED)
