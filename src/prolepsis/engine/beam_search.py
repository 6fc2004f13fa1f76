"""Beam search: the likeliest continuations of a prompt, several kept in step.

As `generate(num_beams=...)` of Hugging Face transformers 5: the candidates of a step are ranked together; those among
the best `beam_width` that end are hypotheses, and the best `beam_width` that do not end go on. A hypothesis scores

    sum of its tokens' log-probabilities / (number of its tokens, the one that ends it included) ** length_penalty

Equal logits give equal tokens and scores on every machine: log-probabilities are float64 in a fixed order of operations
(`kernels.sampling`; logarithm and power rounded by `decimal`), equal scores rank by lower beam, then lower token id.
"""

import math
from collections.abc import Collection
from collections.abc import Sequence as Many
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.runner import Runner
from prolepsis.engine.sampler import largest_logit
from prolepsis.engine.sampling_params import in_range, is_int, is_token
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.stopping import FinishReason
from prolepsis.errors import InputError
from prolepsis.kernels.sampling import exp_sum

MAX_BEAMS = 64
MAX_LENGTH_PENALTY = 10

_RUN = 64  # candidates of which only the best one is looked at to find out which are surely too bad
_EXACT = Context(prec=30)


@dataclass(frozen=True)
class BeamParams:
    """How to search. Names as in `SamplingParams`, or else as in transformers.

    Raises InputError that names the field and its range.
    """

    beam_width: int = 4
    """Sequences kept at each step (`num_beams`); 1 is greedy."""
    length_penalty: float = 1.0
    """Exponent of the length that scores are divided by: above 0 favours long answers, below 0 short ones."""
    early_stopping: bool | Literal["never"] = False
    """When to end, once there are `beam_width` hypotheses. True: at once. False: when the best running sequence, ended
    here and now, would not beat the worst of them. "never": when it could not beat it at any length up to the longest;
    sure to be the best only for a length penalty of 0."""
    n: int = 1
    """Hypotheses to return; at most `beam_width`."""
    max_tokens: int = 256
    """Most tokens to generate. Sequences that are as long are hypotheses too."""
    stop_token_ids: Many[int] = ()
    """Tokens that end a hypothesis beside the model's own end-of-sequence tokens."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        sound = is_int(self.beam_width) and 1 <= self.beam_width <= MAX_BEAMS
        self._check("beam_width", sound, f"must be an integer in 1 .. {MAX_BEAMS}")
        limit = MAX_LENGTH_PENALTY
        self._check("length_penalty", in_range(self.length_penalty, -limit, limit), f"must be in -{limit} .. {limit}")
        sound = isinstance(self.early_stopping, bool) or self.early_stopping == "never"
        self._check("early_stopping", sound, 'must be True, False or "never"')
        sound = is_int(self.n) and 1 <= self.n <= self.beam_width
        self._check("n", sound, f"must be an integer in 1 .. beam_width ({self.beam_width})")
        self._check("max_tokens", is_int(self.max_tokens) and self.max_tokens >= 1, "must be an integer >= 1")
        self._check("stop_token_ids", all(map(is_token, self.stop_token_ids)), "must hold token ids from 0 on")

    def _check(self, name: str, sound: bool, rule: str) -> None:
        if not sound:
            raise InputError(f"{name} {rule}, not {getattr(self, name)!r}")


class Hypothesis(NamedTuple):
    """A sequence that has ended: its generated tokens, with the one that ended it, and how it ranks."""

    token_ids: list[int]
    score: float
    cumulative_logprob: float
    finish_reason: FinishReason


class _Candidate(NamedTuple):
    """A running sequence with one more token. `logprob`: of all generated tokens."""

    logprob: float
    beam: int
    token: int


class BeamSearch:
    """The search for one prompt, a step at a time.

        search = BeamSearch(sequence, params, vocab_size, eos_ids, context)
        logits = ...                                # after the prompt's last token
        while not search.advance(logits):
            logits = ...                            # after the last token of each of search.sequences, in order
        search.best(params.n)
        search.release()

    Sequences share the blocks of what they have in common; whoever writes into a shared one copies it (`BlockTable`).
    """

    def __init__(
        self, sequence: Sequence, params: BeamParams, vocab_size: int, eos_ids: Collection[int], context: int
    ) -> None:
        """
        sequence: holds the prompt, and is the search's own from now on.
        eos_ids: the model's own end tokens.
        context: the most tokens a sequence may hold, more than the prompt has.

        Raises InputError for ids beyond the vocabulary.
        """
        beyond = [token for token in params.stop_token_ids if token >= vocab_size]
        if beyond:
            raise InputError(f"stop_token_ids names token {beyond[0]}, but the vocabulary has {vocab_size}")
        self.params = params
        self.sequences = [sequence]
        """Those that run, best first; each has one pending token, but for the prompt at first. They stay as they are
        when the search ends."""
        self.finished = False
        """Whether the outcome is known."""
        self.num_tokens = 0
        """Tokens generated for each running sequence."""
        self._logprobs = [0.0]
        self._prompt_tokens = len(sequence.tokens)
        self._longest = min(params.max_tokens, context - len(sequence.tokens))
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._hypotheses: list[Hypothesis] = []

    def advance(self, logits: NDArray[np.float32]) -> bool:
        """Take a step: logits float32 [sequences, vocab] after the last token of each. Returns `finished`.

        Raises ModelFileError if a row has no finite maximum.
        """
        self.num_tokens += 1
        candidates = self._candidates(logits)
        last = self.num_tokens >= self._longest
        going_on = [] if last else [one for one in candidates if one.token not in self._stop_ids]
        going_on = going_on[: self.params.beam_width]
        self._collect(candidates[: self.params.beam_width], last)
        self.finished = not going_on or not self._can_improve(going_on[0].logprob)
        if not self.finished:
            self._branch(going_on)
        return self.finished

    def best(self, n: int) -> list[Hypothesis]:
        """The `n` hypotheses with the highest scores, best first; fewer, if the search has not found as many."""
        return self._hypotheses[:n]

    def release(self) -> None:
        """Give all blocks back."""
        for sequence in self.sequences:
            sequence.release()

    def _candidates(self, logits: NDArray[np.float32]) -> list[_Candidate]:
        """The best continuations in order: enough for `beam_width` that go on, whatever the others are."""
        totals = np.empty(logits.shape)
        for row, before, total in zip(logits, self._logprobs, totals, strict=True):
            np.add(log_probabilities(row), before, out=total)
        flat = totals.ravel()
        vocab_size = logits.shape[1]
        places = _largest(flat, self.params.beam_width * (1 + len(self._stop_ids))).tolist()
        return [_Candidate(float(flat[place]), *divmod(place, vocab_size)) for place in places]

    def _collect(self, best: list[_Candidate], last: bool) -> None:
        """Keep those that end here among the hypotheses; of all these, the best."""
        for one in best:
            stopped = one.token in self._stop_ids
            if stopped or last:
                tokens = [*self.sequences[one.beam].tokens[self._prompt_tokens :], one.token]
                score = one.logprob / self._divisor(self.num_tokens)
                self._hypotheses.append(Hypothesis(tokens, score, one.logprob, "stop" if stopped else "length"))
        self._hypotheses.sort(key=lambda hypothesis: -hypothesis.score)
        del self._hypotheses[self.params.beam_width :]

    def _can_improve(self, logprob: float) -> bool:
        """Whether the best running sequence, of that log-probability, may still change the outcome."""
        if len(self._hypotheses) < self.params.beam_width:
            return True
        if self.params.early_stopping is True:
            return False
        distant = self.params.early_stopping == "never" and self.params.length_penalty > 0
        best = logprob / self._divisor(self._longest if distant else self.num_tokens)
        return best > self._hypotheses[-1].score

    def _divisor(self, length: int) -> float:
        return float(_EXACT.power(Decimal(length), Decimal(self.params.length_penalty)))

    def _branch(self, chosen: list[_Candidate]) -> None:
        """Let the chosen candidates be the running sequences. The last one from a sequence takes that over."""
        heirs = {one.beam: index for index, one in enumerate(chosen)}
        for beam, sequence in enumerate(self.sequences):
            if beam not in heirs:
                sequence.release()
        running = []
        for index, one in enumerate(chosen):
            sequence = self.sequences[one.beam]
            if heirs[one.beam] != index:
                sequence = Sequence(sequence.table.fork(), sequence.tokens)
            sequence.tokens.append(one.token)
            running.append(sequence)
        self.sequences = running
        self._logprobs = [one.logprob for one in chosen]


def beam_search(
    runner: Runner, tokens: Many[int], params: BeamParams, *, eos_ids: Collection[int] = (), context: int
) -> list[Hypothesis]:
    """The `params.n` best continuations of a prompt, best first. `context`: the most tokens a sequence may hold.

    Raises InputError as `BeamSearch` does, and CapacityError if the cache has no room.
    """
    sequence = runner.new_sequence(tokens)
    search = BeamSearch(sequence, params, runner.decoder.config.vocab_size, eos_ids, context)
    try:
        logits = runner.prefill(sequence)[None]
        while not search.advance(logits):
            logits = runner.step(search.sequences)
    finally:
        search.release()
    return search.best(params.n)


def log_probabilities(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    """The log-softmax of float32 [vocab]. Raises ModelFileError unless the largest logit is finite."""
    largest = float(logits[largest_logit(logits)])
    log_total = largest + float(_EXACT.ln(Decimal(exp_sum(logits, largest, 1.0))))
    return logits.astype(np.float64) - log_total


def _largest(values: NDArray[np.float64], count: int) -> NDArray[np.int64]:
    """Where the `count` largest values are (fewer, if fewer are finite), in order; of equal ones the first."""
    maxima = np.maximum.reduceat(values, np.arange(0, len(values), _RUN))
    lowest = -math.inf if len(maxima) < count else np.partition(maxima, -count)[-count]
    places = np.flatnonzero((values >= lowest) & (values > -math.inf))
    return places[np.argsort(-values[places], kind="stable")][:count]
