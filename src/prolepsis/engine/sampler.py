"""From logits to a token.

Order of operations, as in vLLM, each on the outcome of the one before:
logit bias -> repetition penalty -> presence and frequency penalty -> temperature -> top-k -> top-p -> min-p.
Ties go to the lowest token id throughout: exactly top_k tokens are kept, never more. Where top-k or top-p is asked for,
tokens less than 2^-64 times as probable as the best one go too; together they weigh less than the sum's rounding.

Given equal logits, parameters, history, seed and position, the token is the same on every machine: integers decide the
random number (`rng`), and every float is added and multiplied in a fixed order (`kernels.sampling`). Logprobs go
through the platform's `log` and may differ in their last bit.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine import rng
from prolepsis.engine.ranking import Ranking
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError, ModelFileError
from prolepsis.kernels.sampling import draw, exp_weights, keep_prefix, penalise, sum_weights


class SampledToken(NamedTuple):
    """A chosen token and, where the request asked, its log-probability and the most probable tokens'."""

    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    """(token, logprob) by descending logprob, then ascending id; empty unless asked for."""


class TokenCounts:
    """What the penalties need to know about a request's past, kept up to date in constant time per token."""

    def __init__(self, vocab_size: int, prompt: Sequence[int] = ()) -> None:
        self.seen = np.zeros(vocab_size, dtype=np.bool_)
        """bool [vocab]: in the prompt or the output."""
        self.output = np.zeros(vocab_size, dtype=np.int32)
        """int32 [vocab]: times in the output."""
        self.seen[list(prompt)] = True

    def add(self, token: int) -> None:
        """Count one more output token."""
        self.seen[token] = True
        self.output[token] += 1


class Sampler:
    """Draws the tokens of one request, in order."""

    def __init__(self, params: SamplingParams, vocab_size: int, prompt: Sequence[int] = ()) -> None:
        """`prompt`: the tokens before the first sampled one, read when that is drawn. InputError for ids beyond the
        vocabulary."""
        for field, tokens in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            beyond = [token for token in tokens if token >= vocab_size]
            if beyond:
                raise InputError(f"{field} names token {beyond[0]}, but the vocabulary has {vocab_size}")
        self.params = params
        self.seed = rng.fresh_seed() if params.seed is None else params.seed
        """The request's seed, to be reported where it was drawn here."""
        self.num_tokens = 0
        """Output tokens so far: the position of the next random number."""
        self._vocab_size, self._prompt = vocab_size, prompt
        self._counts: TokenCounts | None = None

    def sample(self, logits: NDArray[np.float32]) -> SampledToken:
        """Choose the next token from float32 logits [vocab], and record it. ModelFileError if they hold a NaN."""
        token = self._choose(logits)
        self.record(token)
        if self.params.logprobs is None:
            return SampledToken(token, None, ())
        return with_logprobs(logits, token, self.params.logprobs)

    def record(self, token: int) -> None:
        """Count a token as the request's next output, as when it is replayed and not drawn."""
        self.num_tokens += 1
        counts = self._past()
        if counts is not None:
            counts.add(token)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        counts = self._past()
        if self.params.is_greedy:
            return largest_logit(adjusted_logits(logits, self.params, counts))
        probabilities = target_probabilities(logits, self.params, counts)
        return sample(probabilities, rng.uniform(self.seed, self.num_tokens))

    def _past(self) -> TokenCounts | None:
        """What the penalties need; made with the first token, as a request that waits should not hold the memory."""
        if self._counts is None and self.params.has_penalties:
            self._counts = TokenCounts(self._vocab_size, self._prompt)
        return self._counts


def target_probabilities(
    logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts | None
) -> NDArray[np.float64]:
    """The distribution a token is drawn from: float64 [vocab], summing to 1 up to rounding.

    logits float32 [vocab], unchanged; `counts` may be None where `params` has no penalties. This is the distribution
    that speculative verification has to preserve. Greedy parameters give a single 1. ModelFileError for NaN logits.
    """
    adjusted = adjusted_logits(logits, params, counts)
    best = largest_logit(adjusted)
    if params.is_greedy:
        probabilities = np.zeros(len(adjusted))
        probabilities[best] = 1.0
        return probabilities
    weights = np.empty(len(adjusted))
    exp_weights(adjusted, float(adjusted[best]), 1.0 / params.temperature, weights)
    _cut_tail(weights, params)
    weights *= 1.0 / sum_weights(weights)
    return weights


def sample(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The token that a uniform number in [0, 1) selects by inverse-transform sampling, in order of ids."""
    return int(draw(probabilities, uniform))


def adjusted_logits(
    logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts | None
) -> NDArray[np.float32]:
    """Logits after bias and penalties, float32 [vocab]; the very array given where there are none."""
    if params.logit_bias:
        logits = logits.copy()
        logits[list(params.logit_bias)] += np.array(list(params.logit_bias.values()), dtype=np.float32)
    if counts is None or not params.has_penalties:
        return logits
    adjusted = np.empty_like(logits)
    penalise(
        logits,
        counts.seen,
        counts.output,
        np.float32(params.repetition_penalty),
        np.float32(params.presence_penalty),
        np.float32(params.frequency_penalty),
        adjusted,
    )
    return adjusted


def with_logprobs(logits: NDArray[np.float32], token: int, count: int) -> SampledToken:
    """`token` with its log-softmax over the raw float32 logits [vocab], and those of the `count` most probable."""
    largest = float(logits[largest_logit(logits)])
    weights = np.empty(len(logits))
    exp_weights(logits, largest, 1.0, weights)
    log_total = largest + math.log(sum_weights(weights))
    top = _most_probable(logits, weights, count) if count else []
    return SampledToken(token, float(logits[token]) - log_total, tuple((t, float(logits[t]) - log_total) for t in top))


def _cut_tail(weights: NDArray[np.float64], params: SamplingParams) -> None:
    """Zero, in place, what top-k, top-p and min-p rule out. Weights are relative to the largest, which is 1."""
    size = len(weights)
    count = min(params.top_k, size) if params.top_k > 0 else size
    if count < size or params.top_p < 1.0:
        ranking = Ranking(weights)
        count = min(count, ranking.size)
        if params.top_p < 1.0:
            count = min(count, ranking.count_reaching(params.top_p * ranking.mass(count)))
        last = ranking.token(count - 1)
        keep_prefix(weights, weights[last], last)
    if params.min_p > 0.0:
        keep_prefix(weights, params.min_p, size)


def largest_logit(logits: NDArray[np.float32]) -> int:
    """Lowest id of the largest logit. ModelFileError unless it is finite: a NaN counts as larger than any number."""
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):
        raise ModelFileError(
            f"the model gave the logit {logits[best]} for token {best}, so no token can be chosen; "
            "the model file is damaged or its weights overflow"
        )
    return best


def _most_probable(logits: NDArray[np.float32], weights: NDArray[np.float64], count: int) -> list[int]:
    candidates = Ranking(weights).heaviest(count)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(token) for token in candidates[order[:count]]]
