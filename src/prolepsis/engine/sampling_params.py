"""What a request may ask of the sampler, checked once, when it is made."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeGuard

import numpy as np
from numpy.typing import NDArray

from prolepsis.engine.grammar import Grammar
from prolepsis.errors import InputError

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: dividing by it would only overflow."""

MAX_LOGPROBS = 20
MAX_SAMPLES = 128
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_TOKENS = 1024
SEED_LIMIT = 1 << 64


class Bias(NamedTuple):
    """Token ids, int64 [n], and what is added to the logit of each, float32 [n]."""

    tokens: NDArray[np.int64]
    values: NDArray[np.float32]


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to end. Names and defaults as in the OpenAI API and vLLM.

    Raises InputError that names the field and its range.
    """

    temperature: float = 1.0
    """Divides the logits; 0 always takes the most probable token (greedy)."""
    top_k: int = 0
    """Keep the k most probable tokens; 0 or -1 keeps all."""
    top_p: float = 1.0
    """Keep the fewest most probable tokens that together reach this probability (nucleus sampling)."""
    min_p: float = 0.0
    """Keep tokens at least this fraction as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """Above 1: positive logits of tokens in the prompt or output are divided by it, negative ones multiplied."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of every token in the output."""
    frequency_penalty: float = 0.0
    """Subtracted from the logit of a token once for each time it is in the output."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Token id -> added to its logit, before the penalties."""
    stop: Sequence[str] = ()
    """Texts that end the output, themselves left out. One text may be given as a plain string."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end the output beside the model's own end-of-sequence tokens; their text is left out."""
    max_tokens: int = 256
    """Most tokens to generate."""
    seed: int | None = None
    """With the position it decides every random choice; None draws one for the request."""
    logprobs: int | None = None
    """How many of the most probable tokens to report at each position; 0 reports the chosen one's only."""
    ignore_eos: bool = False
    """Go on after the model's own end-of-sequence tokens."""
    n: int = 1
    """Completions to return for a prompt, each of its own. The i-th has the seed `seed` + i."""
    best_of: int | None = None
    """Completions to make, of which the `n` with the highest log-probability a token are returned; None makes `n`."""
    grammar: Grammar | None = None
    """What the output has to be; tokens that may not follow are left out before all else."""
    skip_special_tokens: bool = True
    """Leave the names of control tokens out of the text."""

    def __post_init__(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        self._convert("stop", tuple, stop, "must be a text or a list of texts")
        self._convert("stop_token_ids", tuple, self.stop_token_ids, "must be a list of token ids")
        self._convert("logit_bias", dict, self.logit_bias, "must map token ids to numbers")
        self._check_numbers()
        self._check_lists()

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalties(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def samples(self) -> int:
        """Completions to make for a prompt."""
        return self.n if self.best_of is None else self.best_of

    @property
    def needs_logprobs(self) -> bool:
        """Whether completions are told by their log-probability."""
        return self.logprobs is not None or self.samples > self.n

    def sample_seed(self, index: int) -> int | None:
        """The seed of the index-th completion of a prompt; None where each draws its own."""
        return None if self.seed is None else (self.seed + index) % SEED_LIMIT

    @cached_property
    def bias(self) -> Bias:
        """`logit_bias` as arrays."""
        count = len(self.logit_bias)
        tokens = np.fromiter(self.logit_bias, np.int64, count)
        return Bias(tokens, np.fromiter(self.logit_bias.values(), np.float32, count))

    def of_sample(self, index: int) -> "SamplingParams":
        """Those of the index-th completion of a prompt. Nothing is checked again, for there may be many."""
        params = copy(self)
        object.__setattr__(params, "seed", self.sample_seed(index))
        return params

    def _check_numbers(self) -> None:
        self._check("temperature", in_range(self.temperature, 0, math.inf), "must be a finite number >= 0")
        self._check(
            "top_k", is_int(self.top_k) and self.top_k >= -1, "must be an integer >= 1, or 0 or -1 for all tokens"
        )
        self._check("top_p", in_range(self.top_p, 0, 1) and self.top_p > 0, "must be above 0 and at most 1")
        self._check("min_p", in_range(self.min_p, 0, 1), "must be in 0 .. 1")
        self._check("repetition_penalty", in_range(self.repetition_penalty, 0.01, 100), "must be in 0.01 .. 100")
        self._check("presence_penalty", in_range(self.presence_penalty, -2, 2), "must be in -2 .. 2")
        self._check("frequency_penalty", in_range(self.frequency_penalty, -2, 2), "must be in -2 .. 2")
        self._check("max_tokens", is_int(self.max_tokens) and self.max_tokens >= 1, "must be an integer >= 1")
        sound = self.seed is None or (is_int(self.seed) and 0 <= self.seed < SEED_LIMIT)
        self._check("seed", sound, "must be an integer in 0 .. 2^64 - 1, or None")
        sound = self.logprobs is None or (is_int(self.logprobs) and 0 <= self.logprobs <= MAX_LOGPROBS)
        self._check("logprobs", sound, f"must be an integer in 0 .. {MAX_LOGPROBS}, or None")
        self._check("n", is_int(self.n) and 1 <= self.n <= MAX_SAMPLES, f"must be an integer in 1 .. {MAX_SAMPLES}")
        sound = self.best_of is None or (is_int(self.best_of) and self.n <= self.best_of <= MAX_SAMPLES)
        self._check("best_of", sound, f"must be an integer in n ({self.n}) .. {MAX_SAMPLES}, or None")
        sound = self.grammar is None or isinstance(self.grammar, Grammar)
        self._check("grammar", sound, "must be a Grammar, or None")
        sound = self.grammar is None or not self.ignore_eos
        self._check("ignore_eos", sound, "must be False where there is a grammar, whose end is the output's")

    def _check_lists(self) -> None:
        self._check("stop", len(self.stop) <= MAX_STOP_STRINGS, f"must hold at most {MAX_STOP_STRINGS} texts")
        sound = all(isinstance(text, str) and 1 <= len(text) <= MAX_STOP_LENGTH for text in self.stop)
        self._check("stop", sound, f"must hold texts of 1 .. {MAX_STOP_LENGTH} characters")
        few = len(self.stop_token_ids) <= MAX_STOP_TOKENS
        self._check("stop_token_ids", few, f"must hold at most {MAX_STOP_TOKENS} token ids")
        self._check("stop_token_ids", all(map(is_token, self.stop_token_ids)), "must hold token ids from 0 on")
        self._check("logit_bias", all(map(is_token, self.logit_bias)), "must map token ids from 0 on to numbers")
        sound = all(in_range(bias, -100, 100) for bias in self.logit_bias.values())
        self._check("logit_bias", sound, "must have every value in -100 .. 100")

    def _convert(self, name: str, kind: Callable[[Any], object], value: object, rule: str) -> None:
        """Set a field to `kind(value)`, with None for nothing."""
        try:
            object.__setattr__(self, name, kind(() if value is None else value))
        except (TypeError, ValueError):
            self._check(name, False, rule)

    def _check(self, name: str, sound: bool, rule: str) -> None:
        if not sound:
            raise InputError(f"{name} {rule}, not {getattr(self, name)!r:.80}", field=name)


def is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_token(value: object) -> bool:
    """Whether `value` may be a token id, which files and kernels hold in 32 bits."""
    return is_int(value) and 0 <= value < 1 << 31


def in_range(value: object, low: float, high: float) -> bool:
    """Whether `value` is a finite number in low .. high."""
    return (is_int(value) or isinstance(value, float)) and math.isfinite(value) and low <= value <= high
