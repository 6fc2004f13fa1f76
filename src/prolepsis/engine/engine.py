"""Continuous batching: many requests, one pass at a time."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import partial
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.coding.threads import limited_to
from prolepsis.engine.completion import Delta
from prolepsis.engine.request import Request
from prolepsis.engine.runner import CHUNK, Runner
from prolepsis.engine.sampling_params import is_int
from prolepsis.engine.scheduler import Part, Scheduler
from prolepsis.engine.speculation import NO_DRAFT, Speculation, accepted
from prolepsis.engine.statistics import DraftStatistics, EngineStatistics
from prolepsis.engine.swap import SwapSpace
from prolepsis.engine.task import Task
from prolepsis.engine.traffic import EndReason, Traffic
from prolepsis.errors import InputError
from prolepsis.kv.prefix_index import PrefixIndex
from prolepsis.speculate.drafter import Draft


class Output(NamedTuple):
    """News of a request. `delta` is None where it failed; its completion then says why."""

    task: Task
    delta: Delta | None


class Engine:
    """Runs requests together over one paged cache, and tells what each pass brought.

        engine.add(request)
        while engine.has_work:
            for output in engine.step():
                ...

    A request's tokens depend on nothing else that runs (`docs/determinism.md`). Not for use by two threads at once.
    """

    def __init__(
        self,
        runner: Runner,
        prefix: PrefixIndex | None,
        swap: SwapSpace | None,
        max_running: int,
        budget: int = CHUNK,
        speculation: Speculation | None = None,
    ) -> None:
        """See `Scheduler`. Raises InputError for limits that leave prompts no place in a pass."""
        require_places(max_running, budget, runner.cache.block_size)
        self.runner = runner
        self.prefix = prefix
        """The blocks that later prompts can share; None where that is switched off."""
        self.swap = swap
        self.speculation = speculation
        """Who guesses the tokens that come next; None where nobody does."""
        self._scheduler = Scheduler(runner.cache, prefix, swap, max_running, budget)
        self.max_running = max_running
        """Most sequences that run at once."""
        self.traffic = Traffic()
        """What its requests get."""
        self._passes = self._computed = self._slots = self._wasted = 0
        self._busy_s = 0.0
        self._drafts = DraftStatistics()

    @property
    def running(self) -> tuple[Task, ...]:
        """The requests that hold blocks now, in their order."""
        return tuple(self._scheduler.running)

    @property
    def has_work(self) -> bool:
        """Whether any request runs or waits."""
        return self._scheduler.has_work

    @property
    def computed_tokens(self) -> int:
        """Rows run so far, of prompts and outputs alike."""
        return self._computed

    def add(self, task: Task) -> None:
        """Queue a request. Raises InputError, and queues nothing, as `require_fits` does."""
        self.require_fits(task)
        self._scheduler.add(task)

    def require_fits(self, task: Task) -> None:
        """Raise InputError if the engine could not hold a request even alone."""
        cache, eviction = self.runner.cache, self.runner.eviction
        most_held = task.most_tokens if eviction is None else min(task.most_tokens, eviction.budget)
        blocks = task.width * -(-most_held // cache.block_size)
        if blocks > cache.pool.num_blocks:
            raise InputError(
                f"the request may grow to {task.width} sequence(s) that hold {most_held} tokens, {blocks} blocks, but "
                f"the KV cache has {cache.pool.num_blocks}: lower max_tokens or beam_width, or raise kv_memory"
            )
        if task.width > self.max_running:
            raise InputError(f"beam_width {task.width} exceeds max_running, {self.max_running} sequences at once")

    def cancel(self, task: Task) -> None:
        """Stop a request at once, wherever it stands; its completion keeps what it has. One that has ended is left."""
        if task.state in ("queued", "running"):
            self._end(task, "abort")

    def step(self) -> list[Output]:
        """Run one pass. Returns a piece of output for each sequence that generates, and the failures."""
        start = time.perf_counter()
        lengths = None if self.speculation is None else self.speculation.lengths
        with limited_to(self.runner.decoder.threads):
            parts = self._scheduler.schedule(lengths)
        outputs = [Output(task, None) for task in self._scheduler.failed]
        for task in self._scheduler.failed:
            self._forget(task, "error")
        self._scheduler.failed.clear()
        if parts:
            outputs += self._run(parts, start)
        self._busy_s += time.perf_counter() - start
        return outputs

    def _run(self, parts: Many[Part], start: float) -> list[Output]:
        drafts = [NO_DRAFT] * len(parts) if self.speculation is None else self.speculation.propose(parts)
        for part, draft in zip(parts, drafts, strict=True):
            if part.drafts > 0 and not draft.tokens:
                part.sequence.table.truncate(part.sequence.table.length)  # gives back the room for drafts
        try:
            return self._settle(parts, drafts, start)
        except BaseException:
            # Interrupted between a pass and what is made of it: the last token of each is run again.
            for part in parts:
                table = part.sequence.table
                table.truncate(min(table.length, len(part.sequence.tokens) - 1))
            raise

    def _settle(self, parts: Many[Part], drafts: Many[Draft], start: float) -> list[Output]:
        """Run a pass and let requests take their steps."""
        drafted = time.perf_counter()
        rows = [
            (part.sequence, part.tokens, "all" if draft.tokens else "last" if part.wanted else "none")
            for part, draft in zip(parts, drafts, strict=True)
        ]
        logits = self.runner.run(rows, [draft.tokens for draft in drafts])
        self._scheduler.computed([part for part, draft in zip(parts, drafts, strict=True) if not draft.tokens])
        self._count(parts, drafts, start)
        outputs, taken = self._advance(parts, drafts, logits)
        if self.speculation is not None:
            self.speculation.observe(parts, drafts, taken, time.perf_counter() - drafted)
        return outputs

    def statistics(self) -> EngineStatistics:
        """The engine now, and what it has done."""
        scheduler, swap, traffic = self._scheduler, self.swap, self.traffic
        return EngineStatistics(
            running=len(scheduler.running),
            waiting=scheduler.num_waiting,
            finished=traffic.count("stop") + traffic.count("length"),
            cancelled=traffic.count("abort"),
            failed=traffic.count("error"),
            passes=self._passes,
            computed_tokens=self._computed,
            busy_s=self._busy_s,
            preemptions=scheduler.preemptions,
            recomputed_tokens=scheduler.recomputed_tokens,
            refused_swaps=scheduler.refused_swaps,
            swapped_bytes=0 if swap is None else swap.statistics.raw_bytes,
            coded_bytes=0 if swap is None else swap.statistics.coded_bytes,
            prompt_tokens=traffic.prompt_tokens,
            cached_tokens=traffic.cached_tokens,
            evicted_tokens=self.runner.evicted_tokens,
            waste=self._wasted / max(self._slots, 1),
            drafts=self._drafts,
        )

    def _count(self, parts: Many[Part], drafts: Many[Draft], start: float) -> None:
        cache = self.runner.cache
        self._passes += 1
        self._computed += sum(part.tokens + len(draft.tokens) for part, draft in zip(parts, drafts, strict=True))
        tables = [sequence.table for task in self._scheduler.running for sequence in task.sequences]
        self._slots += cache.pool.num_used * cache.block_size
        self._wasted += sum(table.capacity - table.length for table in tables)
        for part in parts:
            if part.task.statistics.started is None:
                part.task.statistics.started = start

    def _advance(
        self, parts: Many[Part], drafts: Many[Draft], logits: NDArray[np.float32]
    ) -> tuple[list[Output], list[int]]:
        """Let requests take their steps. Returns their news, and for each part how many drafts were accepted."""
        outputs: list[Output] = []
        taken = [0] * len(parts)
        first = 0
        for task, group in groupby(enumerate(parts), key=lambda numbered: numbered[1].task):
            wanted = [number for number, part in group if part.wanted]
            if not wanted:
                continue
            draft = drafts[wanted[0]]
            count = len(wanted) + len(draft.tokens)
            rows = logits[first : first + count]
            first += count
            if draft.tokens:
                told, taken[wanted[0]] = self._verify(task, rows, draft)
                outputs += told
                self._scheduler.computed([parts[wanted[0]]])
                continue
            for each in [task, *self._scheduler.lead(task)]:
                outputs += self._tell(each, partial(each.advance, rows))
        return outputs, taken

    def _verify(self, task: Task, logits: NDArray[np.float32], draft: Draft) -> tuple[list[Output], int]:
        assert isinstance(task, Request)
        outputs = self._tell(task, partial(task.verify, logits, draft))
        taken = accepted([output.delta for output in outputs if output.delta is not None], draft)
        self._drafts.count(len(draft.tokens), taken)
        return outputs, taken

    def _tell(self, task: Task, step: Callable[[], list[Delta]]) -> list[Output]:
        """Let a request take its step; its failure is its own."""
        try:
            deltas = step()
        except Exception as error:
            task.fail(error)
            self._end(task, "error")
            return [Output(task, None)]
        tokens = len(deltas) or 1
        task.statistics.told(tokens)
        self.traffic.told(task, tokens)
        if task.finished:
            self._end(task, task.completions[0].finish_reason or "stop")
        return [Output(task, delta) for delta in deltas]

    def _end(self, task: Task, reason: EndReason) -> None:
        self._scheduler.end(task)
        self._forget(task, reason)

    def _forget(self, task: Task, reason: EndReason) -> None:
        self.traffic.ended(task, reason)
        if self.speculation is not None:
            self.speculation.forget(task)


def require_places(max_running: int, budget: int, block_size: int) -> None:
    """Raise InputError unless `max_running` sequences leave a block of a prompt room in a pass of `budget` tokens."""
    if not is_int(max_running) or not 1 <= max_running <= budget - block_size:
        raise InputError(
            f"max_running must be in 1 .. {budget - block_size}, so that a pass of {budget} tokens has room for a "
            f"block of a prompt, not {max_running!r}"
        )
