"""What is measured, and how: one engine in one process, its seconds and its memory."""

import resource
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import NamedTuple, Protocol


class Seconds(NamedTuple):
    """One prompt and its continuation."""

    prefill: float
    decode: float


class Engine(Protocol):
    """What an engine must offer to be measured.

    One that cannot be given the tokens of a continuation appends its own greedy choice: speed does not depend on them.
    """

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start a new sequence with these tokens, up to the logits after the last."""

    def decode(self, token: int) -> None:
        """Append one token and compute the logits after it."""

    def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Continue all prompts at once by `new_tokens` greedy tokens each, ends of sequence ignored."""


class Answering(Protocol):
    """What an engine must offer to be measured on real answers."""

    def answer(self, prompt: Sequence[int]) -> Generator[int, None, None]:
        """The greedy continuation, on and on, ends of sequence ignored."""


class Answer(NamedTuple):
    """Tokens, and seconds from the first of them to the last."""

    tokens: list[int]
    seconds: float


def time_answer(engine: Answering, prompt: Sequence[int], new_tokens: int) -> Answer:
    """Run `prompt`, and then generate."""
    with closing(engine.answer(prompt)) as tokens:
        first = next(tokens)
        start = time.perf_counter()
        rest = list(islice(tokens, new_tokens - 1))
        return Answer([first, *rest], time.perf_counter() - start)


def time_single(engine: Engine, prompt: Sequence[int], new: Sequence[int]) -> Seconds:
    """Run `prompt`, and then `new` token by token."""
    start = time.perf_counter()
    engine.prefill(prompt)
    middle = time.perf_counter()
    for token in new:
        engine.decode(token)
    return Seconds(middle - start, time.perf_counter() - middle)


def time_concurrent(engine: Engine, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
    """Seconds until all prompts, which arrive at once, are continued."""
    start = time.perf_counter()
    engine.serve(prompts, new_tokens)
    return time.perf_counter() - start


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Where this is all there is. On Linux it would count what the parent had before this program was loaded.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
