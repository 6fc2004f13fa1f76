"""Draws drafts as the target's sampler would draw tokens, so that they agree as often as they can."""

from contextlib import suppress

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine import rng
from prolepsis.engine.matching import Matcher
from prolepsis.engine.sampler import Sampler, TokenCounts, adjusted_logits, largest_logit, sample, target_probabilities
from prolepsis.errors import InputError
from prolepsis.speculate.drafter import Choice


class DraftChooser:
    """The drafts of one request in one round; see `speculate.drafter.Chooser`.

    A request with a seed has to get the tokens of plain decoding. Its drafts are drawn with the very random number that
    the target will draw with (`rng`), and so are the same token most of the time. Without one, they are drawn
    independently, and their distribution goes with them: more of them are accepted then (`speculate.acceptance`).
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._params, self._seed, self._position = sampler.params, sampler.seed, sampler.num_tokens
        self._counts: TokenCounts | None = None
        self._matcher: Matcher | None = None

    def choose(self, logits: NDArray[np.float32]) -> Choice:
        """See `Chooser`. ModelFileError for logits of which none is a number."""
        if self._counts is None and (past := self._sampler.past()) is not None:
            self._counts = past.copy()  # not before it is needed: drafters without a model choose nothing
        if self._matcher is None and self._sampler.matcher is not None:
            self._matcher = self._sampler.matcher.copy()
        choice = self._choose(self._possible(logits))
        self._position += 1
        if self._matcher is not None:
            with suppress(InputError):
                self._matcher.accept(choice.token)
        if self._counts is not None:
            self._counts.add(choice.token)
        return choice

    def _possible(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        """As the sampler will have them. Where a grammar fails it is for the sampler to say so, and of one request."""
        if self._matcher is not None:
            with suppress(InputError):
                return self._matcher.mask(logits)
        return logits

    def _choose(self, logits: NDArray[np.float32]) -> Choice:
        if self._params.is_greedy:
            return Choice(largest_logit(adjusted_logits(logits, self._params, self._counts)), None)
        probabilities = target_probabilities(logits, self._params, self._counts)
        if self._params.seed is not None:
            return Choice(sample(probabilities, rng.uniform(self._seed, self._position)), None)
        return Choice(sample(probabilities, rng.uniform(self._seed, self._position, rng.DRAFT)), probabilities)
