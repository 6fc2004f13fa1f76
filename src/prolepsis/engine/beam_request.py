"""A request that searches for the likeliest continuations, among others that sample."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.beam_search import BeamParams, BeamSearch, Hypothesis
from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.sampler import SampledToken
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.task import Task
from prolepsis.model.tokenizer import Tokenizer


class BeamRequest(Task):
    """A beam search whose sequences step together. `completions` are there when it has finished."""

    def __init__(
        self,
        sequence: Sequence,
        params: BeamParams,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        context: int,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """As for a `Request`."""
        super().__init__(sequence, min(len(sequence.tokens) + params.max_tokens, context), priority, cache_salt)
        self.params = params
        self.width = params.beam_width
        self._tokenizer = tokenizer
        self._prompt_tokens = len(sequence.tokens)
        eos_ids = tokenizer.eos_ids if tokenizer is not None else ()
        self._search = BeamSearch(sequence, params, vocab_size, eos_ids, context)
        self._error: Exception | None = None
        self._evicted = 0

    @property
    def finished(self) -> bool:
        """Whether the search is over."""
        return self._search.finished

    @property
    def completions(self) -> list[Completion]:
        """The best `params.n` hypotheses, best first; without tokens while the search goes on, or where it failed."""
        found = self._search.best(self.params.n) if self.finished else []
        return [self._completion(one) for one in found] or [self._completion(None)]

    def advance(self, logits: NDArray[np.float32]) -> list[Delta]:
        """See `Task`. All is told at once, in the end: the best hypothesis."""
        self._evicted = max(sequence.table.evicted for sequence in self.sequences)
        over = self._search.advance(logits)
        self.sequences = self._search.sequences
        if not over:
            return []
        best = self.completions[0]
        return [Delta(best.text, SampledToken(best.token_ids[-1], None, ()), best.finish_reason)]

    def found(self, tokens: int) -> None:
        """See `Task`."""
        self.statistics.cached_tokens += tokens

    def fail(self, error: Exception) -> None:
        """See `Task`."""
        self._error = error

    def _completion(self, one: Hypothesis | None) -> Completion:
        outcome = Completion(
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self.statistics.cached_tokens,
            evicted_tokens=self._evicted,
            error=self._error,
            statistics=self.statistics,
        )
        if one is not None:
            outcome.token_ids, outcome.finish_reason = one.token_ids, one.finish_reason
            outcome.cumulative_logprob, outcome.score = one.cumulative_logprob, one.score
            shown = one.token_ids[:-1] if one.finish_reason == "stop" else one.token_ids
            outcome.text = self._tokenizer.decode(shown) if self._tokenizer is not None else ""
        return outcome
