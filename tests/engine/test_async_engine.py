"""Requests from event loops: the same tokens as alone, freed as soon as nobody reads them, failing one by one."""

import asyncio
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import aclosing, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import environment

from prolepsis import LLM, SamplingParams
from prolepsis.engine.async_engine import AsyncEngine, Stream
from prolepsis.engine.engine import Output
from prolepsis.engine.sampler import SampledToken, Sampler
from prolepsis.engine.task import Task
from prolepsis.errors import InputError, ProlepsisError

ENDLESS = SamplingParams(max_tokens=2000, ignore_eos=True)
PROMPTS = [[7 * i + j + 1 for j in range(3 * i + 1)] for i in range(20)]
PARAMS = [SamplingParams(max_tokens=5 + i, seed=i, temperature=i % 3, ignore_eos=True) for i in range(20)]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """In a new event loop, which is closed then; nothing here takes a minute."""
    return asyncio.run(asyncio.wait_for(work, 60))


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "prolepsis-engine"]


async def tokens(stream: Stream) -> list[int]:
    return [delta.token.token async for delta in stream]


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    """What the test has not closed is closed, and leaves no thread."""
    engine = AsyncEngine(llm)
    assert len(threads()) == 1
    yield engine
    run(engine.close())
    assert threads() == []


def alone(llm: LLM, i: int) -> list[int]:
    return llm.generate(PROMPTS[i], PARAMS[i])[0].token_ids


async def together(engine: AsyncEngine, which: range = range(20)) -> list[list[int]]:
    return await asyncio.gather(*(tokens(engine.generate(PROMPTS[i], PARAMS[i])) for i in which))


def test_requests_together_are_as_each_alone(llm: LLM) -> None:
    expected = [alone(llm, i) for i in range(20)]

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            assert await together(engine) == expected
            stream = engine.generate(PROMPTS[3], PARAMS[3])
            text = "".join([delta.text async for delta in stream])
            assert (text, stream.completion.finish_reason) == (stream.completion.text, "length")
            assert stream.completion.statistics.ttft_s is not None
            assert [delta async for delta in stream] == []

    run(work())
    assert threads() == []


def test_samples_of_one_prompt_are_those_that_generate_gives(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, seed=5, n=3, ignore_eos=True)
    expected = [completion.token_ids for completion in llm.generate([1, 2, 3], params)]

    async def work() -> None:
        async with AsyncEngine(llm) as engine:
            assert await asyncio.gather(*map(tokens, engine.generate_samples([1, 2, 3], params))) == expected

    run(work())


async def break_off(kept: list[Stream]) -> None:
    async with aclosing(kept[0]) as stream:
        async for _ in stream:
            break


async def drop(kept: list[Stream]) -> None:
    await anext(kept.pop())


async def cancel_the_task(kept: list[Stream]) -> None:
    first = asyncio.Event()

    async def read() -> None:
        async for _ in kept[0]:
            first.set()

    task = asyncio.create_task(read())
    await first.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def time_out(kept: list[Stream]) -> None:
    await anext(kept[0])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.001):
            await tokens(kept[0])


@pytest.mark.parametrize("leave", [break_off, drop, cancel_the_task, time_out])
def test_who_stops_reading_frees_the_sequence_at_once(leave: Any, engine: AsyncEngine, llm: LLM) -> None:
    before = llm.engine.statistics()

    async def work() -> None:
        kept = [engine.generate([1, 2, 3], ENDLESS)]
        await leave(kept)
        await tokens(engine.generate([4, 5], SamplingParams(max_tokens=1)))  # carried out behind the cancellation
        now = llm.engine.statistics()
        assert (now.cancelled - before.cancelled, now.finished - before.finished) == (1, 1)
        assert (now.running, now.waiting, llm.kv_cache.pool.num_used) == (0, 0, 0)
        llm.kv_cache.check([])
        assert [await tokens(stream) for stream in kept] == [[] for _ in kept]

    run(work())


@pytest.mark.parametrize("read", [0, 1, 8])
def test_requests_that_have_ended_are_forgotten(read: int, engine: AsyncEngine) -> None:
    async def work() -> None:
        stream = engine.generate([1, 2, 3], SamplingParams(max_tokens=8, ignore_eos=True))
        for _ in range(read):
            await anext(stream)
        outcome = weakref.ref(stream.completion)
        del stream
        await tokens(engine.generate([4, 5], SamplingParams(max_tokens=1)))
        assert outcome() is None

    run(work())


def test_a_closed_event_loop_frees_its_sequences(engine: AsyncEngine, llm: LLM) -> None:
    before = llm.engine.statistics().cancelled
    stream = engine.generate([1, 2, 3], ENDLESS)
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(anext(stream))
    run(tokens(engine.generate([4, 5], SamplingParams(max_tokens=3))))
    assert llm.engine.statistics().cancelled == before + 1
    assert stream.completion.finish_reason is None


def test_event_loops_in_turn_and_side_by_side(engine: AsyncEngine) -> None:
    expected = run(together(engine))
    got: dict[int, list[list[int]]] = {}

    def other(first: int) -> None:
        got[first] = run(together(engine, range(first, first + 10)))

    readers = [threading.Thread(target=other, args=(first,)) for first in (0, 10)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    assert got[0] + got[10] == expected


def test_a_request_that_fails_leaves_the_others_whole(
    engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(together(engine))
    sample = Sampler.sample

    def failing(sampler: Sampler, logits: np.ndarray) -> SampledToken:
        if sampler.seed == 666 and failing_after.pop():
            raise ArithmeticError("a sampler that fails")
        return sample(sampler, logits)

    failing_after = [True, False, False]
    monkeypatch.setattr(Sampler, "sample", failing)

    async def work() -> None:
        doomed = engine.generate([1, 2, 3], SamplingParams(seed=666, max_tokens=50, ignore_eos=True))
        others = asyncio.create_task(together(engine))
        assert [(await anext(doomed)).finish_reason for _ in range(2)] == [None, None]
        with pytest.raises(ArithmeticError, match="a sampler that fails"):
            await anext(doomed)
        assert await tokens(doomed) == []
        assert await others == expected

    run(work())


async def ended(engine: AsyncEngine, stream: Stream) -> None:
    """All that comes of it is there to be read."""
    while stream.completion.finish_reason is None and stream.completion.error is None:
        await engine.call(lambda: None)
    await engine.call(lambda: None)


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_reader_gets_all_at_once_and_then_the_end(
    engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    params = SamplingParams(seed=1, max_tokens=6, ignore_eos=True)
    expected = llm.generate([[1, 2, 3]], params)[0].token_ids
    sample = Sampler.sample

    def failing(sampler: Sampler, logits: np.ndarray) -> SampledToken:
        if fails and sampler.num_tokens == 4:
            raise ArithmeticError("a sampler that fails")
        return sample(sampler, logits)

    async def work() -> None:
        stream = engine.generate([1, 2, 3], params)
        first = await anext(stream)
        await ended(engine, stream)
        read = [first, *await stream.read()]
        assert [delta.token.token for delta in read] == expected[: 4 if fails else 6]
        if fails:
            with pytest.raises(ArithmeticError, match="a sampler that fails"):
                await stream.read()
        assert await stream.read() == []

    monkeypatch.setattr(Sampler, "sample", failing)
    run(work())


def test_a_pass_that_fails_ends_what_was_in_it_and_nothing_else(
    engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work() -> None:
        streams = [engine.generate(prompt, ENDLESS) for prompt in PROMPTS[:3]]
        for stream in streams:
            await anext(stream)
        with monkeypatch.context() as patch:
            patch.setattr(llm.engine, "step", lambda: 1 // 0)
            for stream in streams:
                with pytest.raises(ProlepsisError, match="ZeroDivisionError") as raised:
                    await tokens(stream)
                assert isinstance(raised.value.__cause__, ZeroDivisionError)
        assert await tokens(engine.generate([1], SamplingParams(max_tokens=1)))
        assert llm.kv_cache.pool.num_used == 0

    run(work())


def test_bad_input_is_refused_and_nothing_queued(
    engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    for prompt, params, field in [
        ("", SamplingParams(), "prompt is empty"),
        ([1 << 20], SamplingParams(), "vocabulary"),
        ([1] * 5000, SamplingParams(), "context"),
        ([1], SamplingParams(n=2), "n and best_of"),
    ]:
        with pytest.raises(InputError, match=field):
            engine.generate(prompt, params)

    def full(_: object) -> None:
        raise InputError("it can never fit")

    monkeypatch.setattr(llm.engine, "add", full)
    stream = engine.generate([1], SamplingParams())
    with pytest.raises(InputError, match="never fit"):
        run(tokens(stream))
    assert not llm.engine.has_work


def test_closing_ends_what_runs(engine: AsyncEngine, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, gate = llm.engine.step, threading.Event()

    async def work() -> None:
        running, late, unread = (engine.generate([1, 2], ENDLESS) for _ in range(3))
        await anext(running)
        loop, entered = asyncio.get_running_loop(), asyncio.Event()

        def gated() -> list[Output]:
            loop.call_soon_threadsafe(entered.set)
            gate.wait(60)
            return step()

        monkeypatch.setattr(llm.engine, "step", gated)
        await entered.wait()
        ends = [asyncio.create_task(work) for work in (engine.close(), engine.close(), tokens(late))]
        await asyncio.sleep(0)  # all have ordered what they want by now
        gate.set()
        assert [type(end) for end in await asyncio.gather(*ends, return_exceptions=True)] == [
            type(None),
            type(None),
            ProlepsisError,
        ]
        assert threads() == []
        with pytest.raises(ProlepsisError, match="closed before"):
            await tokens(running)
        with pytest.raises(ProlepsisError, match="was closed"):
            await tokens(unread)
        with pytest.raises(ProlepsisError, match="was closed"):
            engine.generate([1, 2], ENDLESS)

    run(work())
    monkeypatch.undo()
    assert llm.kv_cache.pool.num_used == 0
    assert llm.generate([1, 2, 3], SamplingParams(max_tokens=2))[0].error is None


def test_one_that_nobody_holds_any_more_ends_its_thread(llm: LLM) -> None:
    engine = AsyncEngine(llm)
    stream = engine.generate([1], SamplingParams(max_tokens=1))
    del engine
    assert len(run(tokens(stream))) == 1
    del stream
    assert threads() == []


FORGETFUL = """
import asyncio, sys
from prolepsis import LLM, SamplingParams
from prolepsis.engine.async_engine import AsyncEngine

engine = AsyncEngine(LLM(sys.argv[1]))
streams = [engine.generate([1, 2, 3], SamplingParams(max_tokens=2000, ignore_eos=True)) for _ in range(8)]
loop = asyncio.new_event_loop()
loop.run_until_complete(anext(streams[0]))
print("read")
"""


def test_an_interpreter_that_exits_does_not_wait_for_requests(tiny: Path) -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", FORGETFUL, tiny], env=environment(), capture_output=True, timeout=60, check=False
    )
    assert (outcome.returncode, outcome.stdout, outcome.stderr) == (0, b"read\n", b"")


def test_a_call_runs_in_the_engines_thread_between_passes(llm: LLM, engine: AsyncEngine) -> None:
    async def calls() -> None:
        (thread,) = threads()
        assert await engine.call(threading.current_thread) is thread
        stream = engine.generate(PROMPTS[0], ENDLESS)
        await anext(stream)
        passes = [await engine.call(lambda: llm.engine.statistics().passes) for _ in range(3)]
        assert passes == sorted(passes)
        assert (await engine.call(llm.engine.statistics)).running == 1
        with pytest.raises(ZeroDivisionError):
            await engine.call(lambda: 1 // 0)
        assert (await anext(stream)).finish_reason is None

    run(calls())


def test_calls_of_a_closed_engine_are_refused(engine: AsyncEngine) -> None:
    async def calls() -> None:
        going = asyncio.Event()
        loop, stop = asyncio.get_running_loop(), threading.Event()

        def hold() -> bool:
            loop.call_soon_threadsafe(going.set)
            return stop.wait(60)

        first = asyncio.create_task(engine.call(hold))
        await going.wait()
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)  # lets it give its order, behind which the next one waits
        late = asyncio.create_task(engine.call(threads))
        await asyncio.sleep(0)
        stop.set()
        assert await first
        with pytest.raises(ProlepsisError, match="closed"):
            await late
        await closing
        with pytest.raises(ProlepsisError, match="closed"):
            await engine.call(threads)

    run(calls())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_whose_thread_has_failed_says_so(engine: AsyncEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("unforeseen")

    async def work() -> None:
        assert engine.is_open
        monkeypatch.setattr(engine._worker, "_step", broken)
        with pytest.raises(ProlepsisError, match="has failed"):
            await tokens(engine.generate(PROMPTS[0], ENDLESS))
        assert not engine.is_open
        with pytest.raises(ProlepsisError, match="has failed"):
            engine.generate(PROMPTS[0], ENDLESS)

    run(work())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_even_end_its_requests_ends(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for it is refused, and closing does not wait for ever."""
    engine, cancel = AsyncEngine(llm), llm.engine.cancel

    def cancel_and_break(task: Task) -> None:
        cancel(task)
        raise RuntimeError("unforeseen")

    def break_while_a_call_waits() -> None:
        calls.append(asyncio.run_coroutine_threadsafe(engine.call(threading.current_thread), loop))
        while engine._worker._orders.empty():
            time.sleep(0.001)
        raise RuntimeError("unforeseen")

    async def work() -> None:
        monkeypatch.setattr(engine._worker, "_step", break_while_a_call_waits)
        monkeypatch.setattr(llm.engine, "cancel", cancel_and_break)
        with pytest.raises(ProlepsisError, match="has failed"):
            await tokens(engine.generate(PROMPTS[0], ENDLESS))
        with pytest.raises(ProlepsisError, match="has failed"):
            await asyncio.wrap_future(calls[0])
        await engine.close()

    calls: list[Future[threading.Thread]] = []
    with closing(asyncio.new_event_loop()) as loop:
        loop.run_until_complete(work())
    assert engine.has_failed
