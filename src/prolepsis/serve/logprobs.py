"""Log-probabilities in the two forms that clients know.

The token that ends an answer has no text in it and is left out: the tokens that are listed spell the text, and beyond
it only where a stop text cut it.
"""

from collections.abc import Sequence

import msgspec

from prolepsis.engine.sampler import SampledToken
from prolepsis.engine.sampling_params import SamplingParams
from prolepsis.model.tokenizer import Tokenizer

_LOWEST = -9999.0  # what OpenAI writes for a token that cannot be: JSON has no infinity


class TopLogprob(msgspec.Struct):
    """One of the most probable tokens."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    """A token of a chat's answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of a chat's choice."""

    content: list[TokenLogprob]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Of a choice of /v1/completions."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]
    """Where each token begins, in characters of the text."""


class Spelling:
    """How the tokens of one model are spelled."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        """`params`: of the answers whose tokens these are; they say which end it."""
        self.tokenizer = tokenizer
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)

    def listed(self, tokens: Sequence[SampledToken], finish_reason: str | None) -> Sequence[SampledToken]:
        """The tokens that have text: all but the one that has ended an answer."""
        ended = finish_reason == "stop" and tokens and tokens[-1].token in self._ends
        return tokens[:-1] if ended else tokens

    def text(self, token: int, mark: str = "") -> str:
        """A token as text; one that is no whole character as its bytes, after `mark`: \\xe2\\x96."""
        raw = self.tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return mark + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(spelling: Spelling, tokens: Sequence[SampledToken]) -> ChatLogprobs:
    """Of some tokens of a chat's answer."""
    return ChatLogprobs(
        [
            TokenLogprob(
                *_spelled(spelling, each.token, each.logprob),
                [TopLogprob(*_spelled(spelling, token, logprob)) for token, logprob in each.top_logprobs],
            )
            for each in tokens
        ]
    )


def _spelled(spelling: Spelling, token: int, logprob: float | None) -> tuple[str, float, list[int]]:
    return spelling.text(token), _finite(logprob), list(spelling.tokenizer.token_bytes(token))


class TextLogprobsWriter:
    """Of one choice of /v1/completions, piece by piece: it keeps count of the text."""

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        self._stream = spelling.tokenizer.stream()
        self._offset = 0

    def write(self, tokens: Sequence[SampledToken]) -> TextLogprobs:
        """Of the tokens that come next."""
        piece = TextLogprobs([], [], [], [])
        for each in tokens:
            piece.tokens.append(self._text(each.token))
            piece.token_logprobs.append(_finite(each.logprob))
            top = {self._text(token): _finite(logprob) for token, logprob in each.top_logprobs}
            piece.top_logprobs.append(top | {piece.tokens[-1]: piece.token_logprobs[-1]})
            piece.text_offset.append(self._offset)
            self._offset += len(self._stream.push(each.token))
        return piece

    def _text(self, token: int) -> str:
        return self._spelling.text(token, "bytes:")


def _finite(logprob: float | None) -> float:
    return max(logprob if logprob is not None else _LOWEST, _LOWEST)
