"""Who runs in the next pass, who waits, and who has to leave the pool."""

import heapq
from bisect import insort
from collections.abc import Callable
from collections.abc import Sequence as Many
from operator import attrgetter
from typing import NamedTuple

from prolepsis.engine.sequence import Sequence
from prolepsis.engine.swap import SwapSpace
from prolepsis.engine.task import Left, Task
from prolepsis.errors import CapacityError, SegmentError
from prolepsis.kv.cache import PagedKVCache
from prolepsis.kv.prefix_index import PrefixIndex

ARRIVALS_A_PRIORITY = 256
"""A request of priority p + 1 stands where one of priority p would that came so many requests later."""

PROMPT_TOKENS_BESIDE = 64
"""Tokens of prompts in a pass in which sequences generate, for whom it is a pause between two tokens. More at once
would be no faster: from so many rows on, products are as fast as they get (`docs/engine.md`)."""

PROMPT_TOKENS_A_STEP = 2
"""So many for each row that generates, where that is more: a pass then takes at most three times what it would without
prompts, and those of many clients do not queue up."""

_by_order = attrgetter("order")


class Part(NamedTuple):
    """`tokens` pending tokens of one of a task's sequences that are to be run; `wanted`: the logits after the last.
    drafts: how many tokens that may follow there is room for, to be run with them."""

    task: Task
    sequence: Sequence
    tokens: int
    wanted: bool
    drafts: int = 0


Lengths = Callable[[Many[Task], int], list[int]]
"""How many tokens to draft for each of some tasks, so many rows at most in all."""


class Scheduler:
    """Orders tasks by `arrival + 256 * priority`, a total order that never changes.

    So no request waits for more than a bounded number of later ones, whatever their priorities; and the first in order
    is never preempted, it runs until it is done, and then the next is first: that is why every request ends, and what
    bounds thrashing. Within a pass, sequences that generate come first, a token each; prompts share the rest of the
    budget (`share_budget`).

    Where a block is missing, the running task that is last in order leaves the pool, its K and V losslessly coded. It
    queues at its old place, and comes back when there is room for its tokens and a block more for each that runs.
    """

    def __init__(
        self, cache: PagedKVCache, prefix: PrefixIndex | None, swap: SwapSpace | None, max_running: int, budget: int
    ) -> None:
        """
        prefix: where blocks of other sequences are found; None shares none.
        swap: where preempted tasks' K and V go; None computes them again.
        max_running: most sequences that run at once.
        budget: most tokens in a pass, more than `max_running`.
        """
        self.running: list[Task] = []
        """In order."""
        self.failed: list[Task] = []
        """Tasks that could not go on; whoever reports them empties this."""
        self.num_waiting = 0
        self.preemptions = 0
        self.recomputed_tokens = 0
        self.refused_swaps = 0
        self._cache, self._pool, self._prefix, self._swap = cache, cache.pool, prefix, swap
        self._max_running, self._budget = max_running, budget
        self._queue: list[tuple[tuple[int, int], Task]] = []
        self._arrivals = 0
        self._refused: Task | None = None  # the first of the queue, where nothing has ended since it found no room
        self._parts: dict[Task, list[Part]] = {}

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self.running or self.num_waiting)

    def add(self, task: Task) -> None:
        """Queue a new task; one whose leader has not read their prompt yet waits for that."""
        self._arrivals += 1
        task.order = (self._arrivals + ARRIVALS_A_PRIORITY * task.priority, self._arrivals)
        task.state = "queued"
        self.num_waiting += 1
        if task.leader is not None and task.leader.reads_its_prompt:
            task.leader.followers.append(task)
        else:
            self._push(task)

    def schedule(self, lengths: Lengths | None = None) -> list[Part]:
        """What to run next: room for it is made, and shared tails are copied. Empty where nothing can run."""
        self._parts = {}  # a call that was interrupted has left some
        for task in [task for task in self.running if task.steps]:
            if task.state == "running" and self._make_room(task, task.sequences, 1):
                self._parts[task] = [Part(task, sequence, 1, True) for sequence in task.sequences]
        self._admit()
        if lengths is not None:
            self._make_drafts_room(lengths)
        steps = sum(1 + part.drafts for parts in self._parts.values() for part in parts)
        self._share(prompt_tokens(self._budget, steps))
        parts, self._parts = self._parts, {}
        return [part for each in parts.values() for part in each]

    def computed(self, parts: Many[Part]) -> None:
        """What `parts` wrote is in the cache: others may share it from now on."""
        if self._prefix is not None:
            for part in parts:
                self._prefix.register(part.sequence.table, part.sequence.tokens, part.task.cache_salt)

    def lead(self, task: Task) -> list[Task]:
        """`task` has read its prompt: those who waited for that share it and run, as far as there are places."""
        followers, task.followers = task.followers, []
        started = []
        for follower in followers:
            if follower.state != "queued":
                continue
            if self._places() < follower.width:
                self._push(follower)
                continue
            follower.follow(task)
            self._start(follower)
            started.append(follower)
        return started

    def end(self, task: Task) -> None:
        """`task` is done, failed or cancelled: whatever it holds is given back, and may still serve later prompts."""
        self._refused = None
        if task.state == "running":
            if task in self.running:  # else an interrupted call has taken it out
                self.running.remove(task)
            if self._prefix is not None:
                for sequence in task.sequences:
                    self._prefix.register(sequence.table, sequence.tokens, task.cache_salt, tail=True)
        elif task.state == "queued":
            self.num_waiting -= 1
        task.state = "ended"
        task.release()
        self._forget_swapped(task)
        followers, task.followers = task.followers, []
        for follower in followers:
            if follower.state == "queued":
                self._push(follower)

    def _push(self, task: Task) -> None:
        heapq.heappush(self._queue, (task.order, task))

    def _first_in_queue(self) -> Task | None:
        while self._queue and self._queue[0][1].state != "queued":
            heapq.heappop(self._queue)
        return self._queue[0][1] if self._queue else None

    def _places(self) -> int:
        """How many more sequences may run."""
        return self._max_running - sum(task.width for task in self.running)

    def _start(self, task: Task) -> None:
        self.num_waiting -= 1
        task.state = "running"
        insort(self.running, task, key=_by_order)

    def _admit(self) -> None:
        """Let tasks from the queue run, in order, until the next has no room."""
        while (task := self._first_in_queue()) is not None and task.width <= max(self._places(), 0):
            if task is self._refused:
                return
            found = self._find(task)
            if not self._has_room(task):
                task.release()
                found = 0
                if self.running:
                    self._refused = task
                    return
                # Alone, and without what it found, whose last block would have to be copied.
                if not self._has_room(task):
                    self._fail(task)
                    continue
            heapq.heappop(self._queue)
            self._start(task)
            task.found(found if not task.left else 0)
            self._restore(task)

    def _find(self, task: Task) -> int:
        """Share what is known of its sequences' tokens and not in their tables; returns how many tokens that are."""
        if self._prefix is None:
            return 0
        return sum(self._prefix.match(each.table, each.tokens, task.cache_salt) for each in task.sequences)

    def _has_room(self, task: Task) -> bool:
        """Whether `task`'s tokens fit beside those that run, which are to get theirs and a block more for each."""
        promised = sum(other.blocks_missing + other.width for other in self.running)
        return task.blocks_missing + promised <= self._pool.num_free

    def _restore(self, task: Task) -> None:
        """Bring back what the sequences of a preempted task had."""
        for sequence, left in zip(task.sequences, task.left, strict=False):
            if left.swapped is not None and self._swap is not None and sequence.num_cached < left.length:
                try:
                    self._swap.restore(left.swapped, sequence.table)
                except (SegmentError, CapacityError):  # the latter of places for exact blocks of kivi4
                    self.refused_swaps += 1
            lost = max(left.length - sequence.num_cached, 0)
            task.statistics.recomputed_tokens += lost
            self.recomputed_tokens += lost
        self._forget_swapped(task)

    def _forget_swapped(self, task: Task) -> None:
        for left in task.left:
            if left.swapped is not None and self._swap is not None:
                self._swap.discard(left.swapped)
        task.left = []

    def _share(self, budget: int) -> None:
        """Plan tokens of prompts, and of others that have more than one to run.

        What others have computed meanwhile of the same prompts is shared first.
        """
        tasks = [task for task in self.running if task not in self._parts]
        for task in tasks:
            found = self._find(task)
            task.found(found if task.reads_its_prompt else 0)
        waiting = self._without_doubles([(task, sequence) for task in tasks for sequence in task.sequences])
        # Of several sequences, the last tokens are run together, in one pass.
        wanted = [
            min(sequence.num_pending - (len(task.sequences) > 1), sequence.table.room) for task, sequence in waiting
        ]
        counts = share_budget(wanted, budget)
        for (task, sequence), want, count in zip(waiting, wanted, counts, strict=True):
            if task.state != "running":
                continue
            if count < want:
                count = self._to_block_end(sequence, count)
            if count > 0 and self._make_room(task, [sequence], count):
                part = Part(task, sequence, count, count == sequence.num_pending)
                self._parts.setdefault(task, []).append(part)

    def _make_drafts_room(self, lengths: Lengths) -> None:
        """Let the sequences that generate run drafts too, where that takes no room from anyone."""
        steps = sum(map(len, self._parts.values()))
        tasks = [task for task in self._parts if task.most_drafts > 0 and not task.reads_its_prompt]
        planned = lengths(tasks, self._budget - steps - self._cache.block_size)
        if not any(planned):
            return
        promised = sum(task.blocks_missing for task in self.running)
        for task, length in zip(tasks, planned, strict=True):
            [part] = self._parts[task]
            table, most = part.sequence.table, min(length, task.most_drafts)
            needed = table.blocks_to_write(1 + most)
            if most > 0 and needed + promised <= self._pool.num_free and needed <= self._pool.num_writable:
                self._cache.copy_blocks(table.prepare_write(1 + most))
                self._parts[task] = [part._replace(drafts=most)]

    def _without_doubles(self, waiting: list[tuple[Task, Sequence]]) -> list[tuple[Task, Sequence]]:
        """Leave out who would compute the block that another one before it is about to: it will find it."""
        if self._prefix is None:
            return waiting
        size, seen, kept = self._cache.block_size, set(), []
        for task, sequence in waiting:
            table, at = sequence.table, sequence.num_cached
            if at == table.num_known * size and sequence.num_pending > size:
                last = int(table.blocks[table.num_known - 1]) if at else task.cache_salt
                block = (last, *sequence.tokens[at : at + size])
                if block in seen:
                    continue
                seen.add(block)
            kept.append((task, sequence))
        return kept

    def _to_block_end(self, sequence: Sequence, count: int) -> int:
        """`count`, less what would begin a block without filling it; all of it where that leaves nothing."""
        size = self._cache.block_size
        stop = (sequence.num_cached + count) // size * size
        return stop - sequence.num_cached if stop > sequence.num_cached else count

    def _make_room(self, task: Task, sequences: Many[Sequence], count: int) -> bool:
        """Have blocks for `count` more tokens of each sequence, at the cost of those behind `task`; False: it left."""
        # One after the other: of those that share a block, the last to write has it alone and needs no copy.
        for sequence in sequences:
            sequence.table.settle()
            while sequence.table.blocks_to_write(count) > self._pool.num_writable:
                last = self.running[-1]
                if last is task and len(self.running) == 1:
                    self._fail(task)
                    return False
                self._preempt(last)
                if last is task:
                    return False
            self._cache.copy_blocks(sequence.table.prepare_write(count))
        return True

    def _preempt(self, task: Task) -> None:
        # First what takes long: an interruption in it leaves a task that runs, and whatever it has lost is pending.
        task.left = [self._leave(sequence) for sequence in task.sequences]
        self.running.remove(task)
        self._refused = None
        self._parts.pop(task, None)
        task.statistics.preemptions += 1
        self.preemptions += 1
        task.state = "queued"
        self.num_waiting += 1
        self._push(task)

    def _leave(self, sequence: Sequence) -> Left:
        length, swapped = sequence.num_cached, None
        if self._swap is not None and self._cache.readable(length) > 0:
            swapped = self._swap.put(sequence.tokens[:length], sequence.table)
            self.refused_swaps += swapped is None
        sequence.table.release()
        return Left(length, swapped)

    def _fail(self, task: Task) -> None:
        """There is no room for `task` although nothing else of ours runs: sequences outside the engine hold it."""
        free, needed = self._pool.num_free, task.blocks_missing
        task.fail(
            CapacityError(
                f"the request needs {needed} more block(s) but only {free} of {self._pool.num_blocks} are free; "
                "sequences that the engine does not run hold the others: release one, or give the cache more memory"
            )
        )
        self.end(task)
        self.failed.append(task)


def prompt_tokens(budget: int, steps: int) -> int:
    """How many tokens of prompts there may be in a pass of `budget` rows, beside `steps` rows that generate."""
    return min(budget - steps, max(PROMPT_TOKENS_BESIDE, PROMPT_TOKENS_A_STEP * steps)) if steps else budget


def share_budget(wanted: Many[int], budget: int) -> list[int]:
    """How many tokens each of several sequences may run of those it wants to, all together at most `budget`.

    The first gets at least half of it. The other half goes to those that want least, so that a long prompt does not
    hold up short ones; what they leave, the first gets too.
    """
    counts = [0] * len(wanted)
    if not wanted or budget <= 0:
        return counts
    counts[0] = min(wanted[0], budget - budget // 2)
    left = budget - counts[0]
    for i in sorted(range(1, len(wanted)), key=lambda i: (wanted[i], i)):
        counts[i] = min(wanted[i], left)
        left -= counts[i]
    counts[0] += min(wanted[0] - counts[0], left)
    return counts
