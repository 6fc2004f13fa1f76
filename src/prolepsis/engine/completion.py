"""What comes out of a request: piece by piece, and in the end."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from prolepsis.engine.sampler import SampledToken
from prolepsis.engine.statistics import RequestStatistics
from prolepsis.engine.stopping import FinishReason


class Delta(NamedTuple):
    """What one token added: text that may be shown now (often empty), the token, and the end, if this was it."""

    text: str
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """The outcome of a request. Two are equal if the outcomes are, however they came about."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] = field(default_factory=list)
    """One for each token, where the request asked for them."""
    finish_reason: FinishReason | None = None
    """None while the request runs, and for one that was abandoned or failed."""
    prompt_tokens: int = 0
    cached_tokens: int = field(default=0, compare=False)
    """Tokens of the prompt whose K and V were in the cache already."""
    evicted_tokens: int = 0
    """Tokens whose K and V were dropped on the way (`kv_evict`): above 0, the output is not that of the full cache."""
    seed: int | None = 0
    """The seed that repeats this completion; None where drafts had a say in which of the possible ones it is."""
    cumulative_logprob: float | None = None
    """Sum of the tokens' log-probabilities, where they were asked for or needed (`best_of`, beams)."""
    score: float | None = None
    """Of a beam search: what its hypotheses are ranked by."""
    error: Exception | None = field(default=None, compare=False)
    """Why the request ended before its time."""
    statistics: RequestStatistics = field(default_factory=RequestStatistics, compare=False)


def best(completions: Sequence[Completion], n: int) -> list[Completion]:
    """The `n` with the highest log-probability a token, best first; all of them, as they are, where there are no more.

    One that failed is the worst.
    """
    if len(completions) <= n:
        return list(completions)

    def worth(completion: Completion) -> float:
        if completion.cumulative_logprob is None:
            return -inf
        return completion.cumulative_logprob / len(completion.token_ids)

    return sorted(completions, key=worth, reverse=True)[:n]
