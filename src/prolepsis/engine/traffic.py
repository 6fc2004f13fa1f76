"""What requests have asked of an engine and got, all together: counts, and how their times are distributed."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal, NamedTuple

import numpy as np

from prolepsis.engine.stopping import FinishReason
from prolepsis.engine.task import Task

EndReason = FinishReason | Literal["abort", "error"]
"""Under vLLM's names: its end, or that it was cancelled, or failed."""

END_REASONS: tuple[EndReason, ...] = ("stop", "length", "abort", "error")

# The bounds are vLLM's, so that its users' dashboards and alerts fit.
FIRST_TOKEN_BOUNDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
INTER_TOKEN_BOUNDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BOUNDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
TOKEN_BOUNDS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))


class Distribution(NamedTuple):
    """How often values fell where: `counts[i]` of them are at most `bounds[i]` and above the bound before."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    """One more than the bounds: the last is of values above them all."""
    total: float
    """Sum of the values."""


class Histogram:
    """A distribution that grows."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def observe_all(self, values: Iterable[float]) -> None:
        """Count many, in little time."""
        array = np.fromiter(values, np.float64)
        places = np.bincount(np.searchsorted(self._bounds, array), minlength=len(self._counts)).tolist()
        self._counts = [old + new for old, new in zip(self._counts, places, strict=True)]
        self._total += float(array.sum())

    @property
    def distribution(self) -> Distribution:
        """As it is now."""
        return Distribution(self._bounds, tuple(self._counts), self._total)


class TrafficStatistics(NamedTuple):
    """What requests have got since the engine was made. Times are in seconds."""

    prompt_tokens: int
    """Tokens of prompts that have been read, those found in a cache included."""
    cached_tokens: int
    """Those of them whose K and V were in a cache."""
    generation_tokens: int
    ended: dict[EndReason, int]
    time_to_first_token: Distribution
    inter_token: Distribution
    """Counted as requests end, as all below."""
    queue_time: Distribution
    request_time: Distribution
    """From arrival to the last token, of requests that were neither cancelled nor failed; so are the two below."""
    prompt_lengths: Distribution
    generation_lengths: Distribution


class Traffic:
    """Counts what an engine's requests get."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        """See `TrafficStatistics`."""
        self._ended: dict[EndReason, int] = dict.fromkeys(END_REASONS, 0)
        self._first_token = Histogram(FIRST_TOKEN_BOUNDS)
        self._inter_token = Histogram(INTER_TOKEN_BOUNDS)
        self._queue, self._request = Histogram(REQUEST_BOUNDS), Histogram(REQUEST_BOUNDS)
        self._prompts, self._generations = Histogram(TOKEN_BOUNDS), Histogram(TOKEN_BOUNDS)

    def told(self, task: Task, tokens: int) -> None:
        """`task`'s statistics have just been told of so many tokens."""
        statistics = task.statistics
        self.generation_tokens += tokens
        if len(statistics.token_times) == tokens and statistics.ttft_s is not None:
            self.prompt_tokens += task.completions[0].prompt_tokens
            self.cached_tokens += statistics.cached_tokens
            self._first_token.observe(statistics.ttft_s)

    def ended(self, task: Task, reason: EndReason) -> None:
        """`task` ends."""
        statistics = task.statistics
        self._ended[reason] += 1
        self._inter_token.observe_all(statistics.inter_token_s)
        if statistics.queue_s is not None:
            self._queue.observe(statistics.queue_s)
        if reason in ("stop", "length"):
            self._request.observe(statistics.token_times[-1] - statistics.arrived)
            self._prompts.observe(task.completions[0].prompt_tokens)
            self._generations.observe(len(statistics.token_times))

    def count(self, reason: EndReason) -> int:
        """Requests that have ended so."""
        return self._ended[reason]

    def statistics(self) -> TrafficStatistics:
        """All so far."""
        return TrafficStatistics(
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            generation_tokens=self.generation_tokens,
            ended=dict(self._ended),
            time_to_first_token=self._first_token.distribution,
            inter_token=self._inter_token.distribution,
            queue_time=self._queue.distribution,
            request_time=self._request.distribution,
            prompt_lengths=self._prompts.distribution,
            generation_lengths=self._generations.distribution,
        )
