"""What the scheduler runs: one sequence, or several in lockstep, on behalf of one request."""

import time
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.sampling_params import is_int
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.statistics import RequestStatistics
from prolepsis.engine.swap import Swapped
from prolepsis.errors import InputError

MAX_PRIORITY = 1 << 20
State = Literal["new", "queued", "running", "ended"]


class Left(NamedTuple):
    """A sequence out of the pool: how many of its tokens were cached, and their K and V; None if those are lost."""

    length: int
    swapped: Swapped | None


class Task(ABC):
    """Sequences that take every step together, and where they stand with the scheduler.

    A subclass says what is made of the logits.
    """

    width = 1
    """The most sequences it comes to have."""

    def __init__(self, sequence: Sequence, most_tokens: int, priority: int, cache_salt: str) -> None:
        """
        most_tokens: the most tokens that one of its sequences may come to hold.
        priority: lower comes first (`scheduler.Scheduler`).
        cache_salt: only requests with the same one share K and V.

        Raises InputError for a priority that is no whole number, or a salt that is no text.
        """
        if not is_int(priority) or abs(priority) > MAX_PRIORITY:
            rule = f"priority must be an integer in -{MAX_PRIORITY} .. {MAX_PRIORITY}, not {priority!r:.80}"
            raise InputError(rule, field="priority")
        if not isinstance(cache_salt, str):
            raise InputError(f"cache_salt must be a text, not {cache_salt!r:.80}", field="cache_salt")
        self.sequences = [sequence]
        self.most_tokens = most_tokens
        self.priority = priority
        self.cache_salt = cache_salt
        self.statistics = RequestStatistics(arrived=time.perf_counter())
        self.state: State = "new"
        self.order = (0, 0)
        """Its place among all: whoever is lower comes first, and is preempted last."""
        self.left: list[Left] = []
        """Its sequences, while it is out of the pool."""
        self.leader: Self | None = None
        """A request of the same prompt, whose K and V this one shares if it gets there first."""
        self.followers: list[Task] = []
        """Requests that wait for this one to have read the prompt."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Whether it needs no further step."""

    @abstractmethod
    def advance(self, logits: NDArray[np.float32]) -> list[Delta]:
        """Take the logits after the last token of each sequence, float32 [sequences, vocab]; returns news to tell."""

    @property
    def most_drafts(self) -> int:
        """How many tokens after its last one may be guessed; 0 where it cannot make use of any."""
        return 0

    @property
    @abstractmethod
    def completions(self) -> list[Completion]:
        """The outcome, as far as it is known."""

    def follow(self, leader: "Task") -> None:
        """Share the prompt that `leader`, which is the same, has in the cache, whole.

        The partly filled last block is shared too; whoever writes into it first copies it.
        """
        self.sequences[0].table = leader.sequences[0].table.fork()
        self.found(self.sequences[0].num_cached)

    @abstractmethod
    def found(self, tokens: int) -> None:
        """So many more tokens of its prompt were in the cache already."""

    @abstractmethod
    def fail(self, error: Exception) -> None:
        """End with an error."""

    @property
    def steps(self) -> bool:
        """Whether each sequence has just its last token to run, so that all can take a step."""
        return all(sequence.num_pending == 1 for sequence in self.sequences)

    @property
    def reads_its_prompt(self) -> bool:
        """Whether it waits or runs, and has no token of its own yet."""
        return self.state in ("queued", "running") and not self.statistics.token_times

    @property
    def blocks_missing(self) -> int:
        """Blocks that its tokens need beyond those it has."""
        return sum(sequence.table.blocks_to_write(sequence.num_pending) for sequence in self.sequences)

    def release(self) -> None:
        """Give all blocks back."""
        for sequence in self.sequences:
            sequence.table.release()
