"""One request on its way: what it asked for, what it has got so far, and when it ends."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.sampler import SampledToken, Sampler
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.engine.sequence import Sequence
from prolepsis.engine.stopping import FinishReason, StopChecker
from prolepsis.model.tokenizer import Tokenizer


class Delta(NamedTuple):
    """What one token added: text that may be shown now (often empty), the token, and the end, if this was it."""

    text: str
    token: SampledToken
    finish_reason: FinishReason | None


@dataclass
class Completion:
    """The outcome of a request."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[SampledToken] = field(default_factory=list)
    """One for each token, where the request asked for them."""
    finish_reason: FinishReason | None = None
    """None while the request runs, and for one that was abandoned."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens of the prompt whose K and V were in the cache already."""
    seed: int = 0
    """The seed that repeats this completion."""


class Request:
    """A sequence that is being continued. `completion` grows with every token."""

    def __init__(
        self, sequence: Sequence, params: SamplingParams, tokenizer: Tokenizer | None, vocab_size: int, context: int
    ) -> None:
        """`context`: the most tokens the sequence may hold; generation ends there with "length"."""
        self.sequence = sequence
        self.params = params
        self._sampler = Sampler(params, vocab_size, sequence.tokens)
        self._stops = StopChecker(params, tokenizer.eos_ids if tokenizer is not None else ())
        self._text = tokenizer.stream() if tokenizer is not None else None
        self._context = context
        self.completion = Completion(
            prompt_tokens=len(sequence.tokens), cached_tokens=sequence.num_cached, seed=self._sampler.seed
        )

    def accept(self, logits: NDArray[np.float32]) -> Delta:
        """Sample the next token from logits float32 [vocab], append it to the sequence and say what it added.

        A token that ends the output is not appended: it belongs to the protocol, not to the text.
        """
        sampled = self._sampler.sample(logits)
        done = self.completion
        done.token_ids.append(sampled.token)
        if self.params.logprobs is not None:
            done.logprobs.append(sampled)
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

    def _last_text(self) -> str:
        tail = self._text.finish() if self._text is not None else ""
        return self._stops.push(tail)[0] + self._stops.flush()
