"""One request on its way: what it asked for, what it has got so far, and when it ends."""

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.completion import Completion, Delta
from prolepsis.engine.draft_chooser import DraftChooser
from prolepsis.engine.matching import Matcher
from prolepsis.engine.sampler import SampledToken, Sampler, with_logprobs
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.stopping import StopChecker
from prolepsis.engine.task import Task
from prolepsis.model.tokenizer import Tokenizer
from prolepsis.speculate.drafter import Draft


class Request(Task):
    """A sequence that is being continued. `completion` grows with every token."""

    def __init__(
        self,
        sequence: Sequence,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        context: int,
        priority: int = 0,
        cache_salt: str = "",
        matcher: Matcher | None = None,
    ) -> None:
        """`context`: the most tokens the sequence may hold; generation ends there with "length". `matcher`: see
        `Sampler`."""
        most_tokens = min(len(sequence.tokens) + params.max_tokens, context)
        super().__init__(sequence, most_tokens, priority, cache_salt)
        self.params = params
        self._sampler = Sampler(params, vocab_size, sequence.tokens, matcher)
        self._stops = StopChecker(params, tokenizer.eos_ids if tokenizer is not None else ())
        self._text = None
        if tokenizer is not None:
            self._text = tokenizer.stream(skip_special=params.skip_special_tokens)
        self._context = context
        self.completion = Completion(
            prompt_tokens=len(sequence.tokens),
            cached_tokens=sequence.num_cached,
            seed=self._sampler.seed,
            statistics=self.statistics,
        )

    @property
    def sequence(self) -> Sequence:
        """The only one it has."""
        return self.sequences[0]

    @property
    def finished(self) -> bool:
        """Whether its end is known."""
        return self.completion.finish_reason is not None

    @property
    def completions(self) -> list[Completion]:
        """The one."""
        return [self.completion]

    def accept(self, logits: NDArray[np.float32]) -> Delta:
        """Sample the next token from logits float32 [vocab], append it to the sequence and say what it added.

        A token that ends the output is not appended: it belongs to the protocol, not to the text.
        """
        return self._take(self._sampler.sample(logits), logits)

    def _take(self, sampled: SampledToken, logits: NDArray[np.float32]) -> Delta:
        done = self.completion
        done.token_ids.append(sampled.token)
        done.evicted_tokens = self.sequence.table.evicted
        if self.params.logprobs is not None:
            done.logprobs.append(sampled)
        if self.params.needs_logprobs:
            scored = sampled if sampled.logprob is not None else with_logprobs(logits, sampled.token, 0)
            done.cumulative_logprob = (done.cumulative_logprob or 0.0) + (scored.logprob or 0.0)
        text = ""
        if not self._stops.accept(sampled.token):
            self.sequence.tokens.append(sampled.token)
            text, _ = self._stops.push(self._text.push(sampled.token) if self._text is not None else "")
        done.finish_reason = self._stops.finish_reason
        if done.finish_reason is None and len(self.sequence.tokens) >= self._context:
            done.finish_reason = "length"
        if done.finish_reason is not None:
            text += self._last_text()
        done.text += text
        return Delta(text, sampled, done.finish_reason)

    def advance(self, logits: NDArray[np.float32]) -> list[Delta]:
        """See `Task`."""
        return [self.accept(logits[0])]

    @property
    def most_drafts(self) -> int:
        """See `Task`: with one more token that the target adds, they must not exceed what may still come."""
        return max(self.most_tokens - len(self.sequence.tokens) - 1, 0)

    @property
    def chooser(self) -> DraftChooser:
        """Draws the drafts that may follow now."""
        return DraftChooser(self._sampler)

    def verify(self, logits: NDArray[np.float32], draft: Draft) -> list[Delta]:
        """Take the drafts that the target agrees with, and the token it puts in place of the first that it does not.

        logits float32 [1 + drafts, vocab], after the last token and after each draft. All were run: K and V of drafts
        that are not taken leave the table. Where a draft has no distribution of its own, the tokens are those of plain
        decoding; else they have the same distribution (`speculate.acceptance`).
        """
        deltas: list[Delta] = []
        table = self.sequence.table
        cached = table.length - len(draft.tokens)
        accepted = 0
        try:
            for guess, probabilities, row in zip(draft.tokens, draft.probabilities, logits, strict=False):
                if probabilities is None:
                    sampled = self._sampler.sample(row)
                else:
                    self.completion.seed = None
                    sampled = self._sampler.settle(row, guess, probabilities)
                deltas.append(self._take(sampled, row))
                accepted += sampled.token == guess
                if sampled.token != guess or self.finished:
                    break
            else:
                deltas.append(self.accept(logits[len(draft.tokens)]))
        finally:
            table.truncate(min(cached + accepted, len(self.sequence.tokens)))
        if draft.tokens:
            self.statistics.drafts.count(len(draft.tokens), accepted)
        return deltas

    def found(self, tokens: int) -> None:
        """See `Task`."""
        self.statistics.cached_tokens += tokens
        self.completion.cached_tokens += tokens

    def fail(self, error: Exception) -> None:
        """See `Task`."""
        self.completion.error = error

    def _last_text(self) -> str:
        tail = self._text.finish() if self._text is not None else ""
        return self._stops.push(tail)[0] + self._stops.flush()
