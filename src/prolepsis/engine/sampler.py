"""From logits to a token.

Order of operations, as in vLLM, each on the outcome of the one before:
grammar -> logit bias -> repetition penalty -> presence and frequency penalty -> temperature -> top-k -> top-p -> min-p.
Ties go to the lowest token id throughout: exactly top_k tokens are kept, never more. Where top-k or top-p is asked for,
tokens less than 2^-64 times as probable as the best one go too; together they weigh less than the sum's rounding.
Log-probabilities are reported as the model has them, before any of these.

Given equal logits, parameters, history, seed and position, the token is the same on every machine: integers decide the
random number (`rng`), and every float is added and multiplied in a fixed order (`kernels.sampling`, `kernels.ranking`).
Logprobs go through the platform's `log` and may differ in their last bit.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine import rng
from prolepsis.engine.matching import Matcher
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.errors import InputError, ModelFileError
from prolepsis.kernels.ranking import most_probable
from prolepsis.kernels.sampling import (
    BLOCK,
    draw,
    exp_sum,
    exp_weights,
    largest_logits,
    penalise,
)
from prolepsis.speculate.acceptance import settle


class SampledToken(NamedTuple):
    """A chosen token and, where the request asked, its log-probability and the most probable tokens'."""

    token: int
    logprob: float | None
    top_logprobs: tuple[tuple[int, float], ...]
    """(token, logprob) by descending logprob, then ascending id; empty unless asked for."""


class TokenCounts:
    """What the penalties need to know about a request's past, kept up to date in constant time per token."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        seen = np.unique(np.asarray(prompt, dtype=np.int32))
        self._places = {int(token): place for place, token in enumerate(seen)}
        self._tokens = seen
        self._output = np.zeros(len(seen), dtype=np.int32)

    @property
    def tokens(self) -> NDArray[np.int32]:
        """int32 [n]: those in the prompt or the output, each once."""
        return self._tokens[: len(self._places)]

    @property
    def output(self) -> NDArray[np.int32]:
        """int32 [n]: how often each of `tokens` is in the output."""
        return self._output[: len(self._places)]

    def copy(self) -> "TokenCounts":
        """The same, to go on by itself."""
        other = TokenCounts()
        other._places = dict(self._places)
        other._tokens, other._output = self._tokens.copy(), self._output.copy()
        return other

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._tokens):
            room = np.zeros(max(place, 64), dtype=np.int32)
            self._tokens, self._output = (np.concatenate([array, room]) for array in (self._tokens, self._output))
        self._tokens[place] = token
        self._output[place] += 1


class Sampler:
    """Draws the tokens of one request, in order."""

    def __init__(
        self, params: SamplingParams, vocab_size: int, prompt: Sequence[int] = (), matcher: Matcher | None = None
    ) -> None:
        """`prompt`: the tokens before the first sampled one, read when that is drawn. `matcher`: that of the params'
        grammar, if they have one. InputError for ids beyond the vocabulary."""
        if (params.grammar is None) != (matcher is None):
            raise InputError("a grammar needs its matcher, and a matcher its grammar")
        highest_biased, highest_stop = params.bias.tokens.max(initial=0), max(params.stop_token_ids, default=0)
        for field, highest in (("logit_bias", highest_biased), ("stop_token_ids", highest_stop)):
            if highest >= vocab_size:
                raise InputError(f"{field} names token {highest}, but the vocabulary has {vocab_size}", field=field)
        self.params = params
        self.seed = rng.fresh_seed() if params.seed is None else params.seed
        """The request's seed, to be reported where it was drawn here."""
        self.num_tokens = 0
        """Output tokens so far: the position of the next random number."""
        self.matcher = matcher
        """Where the output stands in its grammar."""
        self._prompt = prompt
        self._counts: TokenCounts | None = None

    def sample(self, logits: NDArray[np.float32]) -> SampledToken:
        """Choose the next token from float32 logits [vocab], and record it. ModelFileError if they hold a NaN."""
        return self._recorded(self._choose(self._possible(logits)), logits)

    def settle(self, logits: NDArray[np.float32], draft: int, probabilities: NDArray[np.float64]) -> SampledToken:
        """As `sample`, where `draft` was drawn from `probabilities`, float64 [vocab]: it is taken if that may be."""
        target = target_probabilities(self._possible(logits), self.params, self.past())
        accept = rng.uniform(self.seed, self.num_tokens, rng.ACCEPT)
        redraw = rng.uniform(self.seed, self.num_tokens)
        return self._recorded(settle(target, probabilities, draft, accept, redraw, sample), logits)

    def _recorded(self, token: int, logits: NDArray[np.float32]) -> SampledToken:
        self.record(token)
        if self.params.logprobs is None:
            return SampledToken(token, None, ())
        return with_logprobs(logits, token, self.params.logprobs)

    def record(self, token: int) -> None:
        """Count a token as the request's next output, as when it is replayed and not drawn."""
        self.num_tokens += 1
        counts = self.past()
        if counts is not None:
            counts.add(token)
        if self.matcher is not None:
            self.matcher.accept(token)

    def _possible(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        return logits if self.matcher is None else self.matcher.mask(logits)

    def _choose(self, logits: NDArray[np.float32]) -> int:
        counts = self.past()
        if self.params.is_greedy:
            return largest_logit(adjusted_logits(logits, self.params, counts))
        uniform = rng.uniform(self.seed, self.num_tokens)
        return int(draw(*_distribution(adjusted_logits(logits, self.params, counts), self.params), uniform))

    def past(self) -> TokenCounts | None:
        """What the penalties need, if there are any; made with the first token, as what waits should hold no memory."""
        if self._counts is None and self.params.has_penalties:
            self._counts = TokenCounts(self._prompt)
        return self._counts


def target_probabilities(
    logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts | None
) -> NDArray[np.float64]:
    """The distribution a token is drawn from: float64 [vocab], summing to 1 up to rounding.

    logits float32 [vocab], unchanged; `counts` may be None where `params` has no penalties. This is the distribution
    that speculative verification has to preserve. Greedy parameters give a single 1. ModelFileError for NaN logits.
    """
    adjusted = adjusted_logits(logits, params, counts)
    probabilities = np.zeros(len(adjusted))
    if params.is_greedy:
        probabilities[largest_logit(adjusted)] = 1.0
    else:
        weights, factor, blocks = _distribution(adjusted, params)
        possible = np.zeros(_num_blocks(len(adjusted)), dtype=np.bool_)
        possible[blocks] = True
        np.multiply(weights, factor, out=probabilities, where=np.repeat(possible, BLOCK)[: len(adjusted)])
    return probabilities


def sample(probabilities: NDArray[np.float64], uniform: float) -> int:
    """The token that a uniform number in [0, 1) selects by inverse-transform sampling, in order of ids."""
    return int(draw(probabilities, 1.0, _all_blocks(len(probabilities)), uniform))


def adjusted_logits(
    logits: NDArray[np.float32], params: SamplingParams, counts: TokenCounts | None
) -> NDArray[np.float32]:
    """Logits after bias and penalties, float32 [vocab]; the very array given where there are none."""
    penalised = counts is not None and params.has_penalties
    if not penalised and not params.logit_bias:
        return logits
    adjusted = logits.copy()
    if params.logit_bias:
        adjusted[params.bias.tokens] += params.bias.values
    if counts is not None and penalised:
        penalise(
            adjusted,
            counts.tokens,
            counts.output,
            np.float32(params.repetition_penalty),
            np.float32(params.presence_penalty),
            np.float32(params.frequency_penalty),
        )
    return adjusted


def with_logprobs(logits: NDArray[np.float32], token: int, count: int) -> SampledToken:
    """`token` with its log-softmax over the raw float32 logits [vocab], and those of the `count` most probable."""
    largest, of_blocks = _largest(logits)
    log_total = largest + math.log(exp_sum(logits, largest, 1.0))
    top = _best(logits, of_blocks, count) if count else []
    return SampledToken(token, float(logits[token]) - log_total, tuple((t, float(logits[t]) - log_total) for t in top))


def _num_blocks(vocab_size: int) -> int:
    return -(-vocab_size // BLOCK)


@cache
def _all_blocks(vocab_size: int) -> NDArray[np.int32]:
    return np.arange(_num_blocks(vocab_size), dtype=np.int32)


def _distribution(
    logits: NDArray[np.float32], params: SamplingParams
) -> tuple[NDArray[np.float64], float, NDArray[np.int32]]:
    """What `draw` takes: weights float64 [vocab], the factor that makes them probabilities, the blocks that count."""
    vocab_size = len(logits)
    largest, of_blocks = _largest(logits)
    factor = 1.0 / params.temperature
    top_k = min(params.top_k, vocab_size) if params.top_k > 0 else vocab_size
    if top_k < vocab_size or params.top_p < 1.0 or params.min_p > 0.0:
        kth = _kth(of_blocks, min(top_k, len(of_blocks)))
        return most_probable(logits, of_blocks, largest, kth, factor, top_k, float(params.top_p), float(params.min_p))
    weights = np.empty(vocab_size)
    total = exp_weights(logits, largest, factor, weights)
    return weights, 1.0 / total, _all_blocks(vocab_size)


def _largest(logits: NDArray[np.float32]) -> tuple[float, NDArray[np.float32]]:
    """The largest logit, and that of each block. ModelFileError as of `largest_logit`."""
    of_blocks = np.empty(_num_blocks(len(logits)), np.float32)
    largest = largest_logits(logits, of_blocks)
    return (largest if math.isfinite(largest) else float(logits[largest_logit(logits)])), of_blocks


def largest_logit(logits: NDArray[np.float32]) -> int:
    """Lowest id of the largest logit. ModelFileError unless it is finite: a NaN counts as larger than any number."""
    best = int(np.argmax(logits))
    if not math.isfinite(logits[best]):
        raise ModelFileError(
            f"the model gave the logit {logits[best]} for token {best}, so no token can be chosen; "
            "the model file is damaged or its weights overflow"
        )
    return best


def _kth(of_blocks: NDArray[np.float32], k: int) -> np.float32:
    """The k-th largest of the blocks' largest logits: so many blocks, hence so many tokens, have this or more."""
    return of_blocks.min() if k == len(of_blocks) else np.partition(of_blocks, -k)[-k]


def _best(logits: NDArray[np.float32], of_blocks: NDArray[np.float32], count: int) -> list[int]:
    """The `count` most probable tokens in order."""
    least = _kth(of_blocks, count) if count <= len(of_blocks) else -np.inf
    candidates = np.flatnonzero(logits >= least)
    order = np.argsort(-logits[candidates], kind="stable")
    return [int(token) for token in candidates[order[:count]]]
