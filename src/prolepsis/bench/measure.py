"""What is measured, and how: prefill and decode speed and memory of one engine in one process."""

import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Speed:
    """Medians over several runs of one prompt and its continuation."""

    prefill_tok_s: float
    decode_tok_s: float
    threads: int
    prompt_tokens: int
    new_tokens: int
    rss_mb: float
    """Peak resident memory of the whole process, in units of 10^6 bytes."""


class Engine(Protocol):
    """What an engine must offer to be measured; tokens are fixed, so that all do the same work."""

    threads: int

    def prefill(self, tokens: Sequence[int]) -> None:
        """Start a new sequence with these tokens, up to the logits after the last."""

    def decode(self, token: int) -> None:
        """Append one token and compute the logits after it."""


def measure(engine: Engine, prompt: Sequence[int], new: Sequence[int], runs: int, on_run: Callable[[], None]) -> Speed:
    """Run `prompt` and then `new` token by token, `runs` times after one run that does not count."""
    prefill, decode = [], []
    for run in range(runs + 1):
        start = time.perf_counter()
        engine.prefill(prompt)
        middle = time.perf_counter()
        for token in new:
            engine.decode(token)
        end = time.perf_counter()
        if run > 0:
            prefill.append(len(prompt) / (middle - start))
            decode.append(len(new) / (end - middle))
        on_run()
    return Speed(
        prefill_tok_s=round(statistics.median(prefill), 1),
        decode_tok_s=round(statistics.median(decode), 1),
        threads=engine.threads,
        prompt_tokens=len(prompt),
        new_tokens=len(new),
        rss_mb=round(peak_rss() / 1e6, 1),
    )


def peak_rss() -> int:
    """Peak resident memory of this process, in bytes."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        # Where this is all there is. On Linux it would count what the parent had before this program was loaded.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024
