"""When a request ends, and which of its text may be shown before that is known."""

from collections.abc import Collection
from typing import Literal

from prolepsis.engine.sampling_params import SamplingParams

FinishReason = Literal["stop", "length"]


class StopChecker:
    """Watches one request's tokens and text for its end.

    Text is cut at the stop text that is complete first (of two complete at the same character, the longer one), exactly
    as if it had arrived a character at a time, however it is cut into pieces. Text that may be the beginning of a stop
    text is held back until that is decided.

        for each token:
            if checker.accept(token):            # a stop token: it has no text to show
                break
            text, stopped = checker.push(piece)  # show text
            if checker.finish_reason:            # stop text, or max_tokens
                break
        show(checker.flush())
    """

    def __init__(self, params: SamplingParams, eos_ids: Collection[int] = ()) -> None:
        """`eos_ids` are the model's own end tokens, obeyed unless `params.ignore_eos`."""
        self._stop = params.stop
        self._stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._max_tokens = params.max_tokens
        self._num_tokens = 0
        self._held = ""
        self._stopped = False

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` after a stop token or stop text, else `length` once max_tokens are accepted, else None."""
        if self._stopped:
            return "stop"
        return "length" if self._num_tokens >= self._max_tokens else None

    def accept(self, token: int) -> bool:
        """Count a token; True if it is one that ends the output, and whose text must not be pushed."""
        self._num_tokens += 1
        self._stopped = self._stopped or token in self._stop_ids
        return self._stopped

    def push(self, text: str) -> tuple[str, bool]:
        """Add the text of a token, possibly empty.

        Returns the text now safe to show, and whether a stop text has ended the output; what follows it is dropped.
        """
        if self._stopped:
            return "", True
        if not self._stop:
            return text, False
        text = self._held + text
        cut = self._first_stop(text)
        if cut is not None:
            self._stopped = True
            self._held = ""
            return text[:cut], True
        safe = len(text) - self._open_length(text)
        self._held = text[safe:]
        return text[:safe], False

    def flush(self) -> str:
        """The text still held back, once no more will come."""
        held, self._held = self._held, ""
        return held

    def _first_stop(self, text: str) -> int | None:
        """Where the stop text begins that is complete first."""
        found = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        return min(found)[1] if found else None

    def _open_length(self, text: str) -> int:
        """Length of the longest end of `text` with which a stop text begins."""
        longest = max((len(stop) for stop in self._stop), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            end = text[-length:]
            if any(stop.startswith(end) for stop in self._stop):
                return length
        return 0
