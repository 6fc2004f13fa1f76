"""Simulated traffic: does a token cost the same after an hour of requests that come and go, and does memory stay?

python benchmarks/traffic.py [--minutes 60] [--rate 2] [--kv-memory 256] [--virtual-clock] [--model MODEL] [--json]

Requests arrive by a Poisson process: prompts with one of four beginnings and a tail of their own, outputs of any length
up to twice the mean, sampled with a seed. Some are cancelled on their way, wherever they stand then. A row tells of a
slice of the time: requests that arrived; rows computed a second; `ms/token`, engine time for each of them; the means of
what ran, waited and was held; the share of used slots without a token, since the start; tokens of prompts that were in
the cache; preemptions; and resident memory at its end. The ratios below compare the last slice with the second: in the
first, caches fill.

With --virtual-clock a pass takes the time that the default model needs on two cores, whatever it takes here, and nobody
waits for the next arrival: an hour on a tiny model (tests/data/gguf/Q4_0.gguf) takes minutes, under the same load.
"""

import heapq
import random
import time
from argparse import Namespace
from collections.abc import Iterator
from itertools import count
from typing import Any

from measuring import parser, report

from prolepsis import LLM, SamplingParams
from prolepsis.bench.workload import Asked, longest, mixed_requests
from prolepsis.engine.request import Request
from prolepsis.engine.statistics import EngineStatistics
from prolepsis.model.pull import DEFAULT_MODEL

PASS_S, TOKEN_S = 2.0e-3, 0.4e-3  # of the virtual clock
PATIENCE_S = 1.0  # mean time after which those who cancel do


class RealClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def now(self) -> float:
        """The time."""
        return time.perf_counter() - self._start

    def passed(self, tokens: int) -> None:
        """A pass of so many tokens is over."""

    def wait_until(self, moment: float) -> None:
        """Nothing happens before `moment`."""
        time.sleep(max(moment - self.now(), 0))


class VirtualClock:
    """Seconds that a pass is said to take."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        """The time."""
        return self._now

    def passed(self, tokens: int) -> None:
        """A pass of so many tokens is over."""
        self._now += PASS_S + TOKEN_S * tokens

    def wait_until(self, moment: float) -> None:
        """Nothing happens before `moment`."""
        self._now = max(self._now, moment)


class Traffic:
    """Requests that arrive at an engine, and leave it."""

    def __init__(self, llm: LLM, arguments: Namespace) -> None:
        self.llm, self.engine = llm, llm.engine
        self.clock = VirtualClock() if arguments.virtual_clock else RealClock()
        self._random = random.Random(arguments.seed)
        self._rate, self._cancelled_share = arguments.rate, arguments.cancel
        self._asked: Iterator[Asked] = mixed_requests(
            llm.config.vocab_size, arguments.prompt_tokens, arguments.new_tokens, arguments.seed
        )
        self._numbers = count()
        self._next_arrival = self._random.expovariate(self._rate)
        self._cancellations: list[tuple[float, int, Request]] = []
        self.arrived = 0

    def run(self, until: float) -> dict[str, float]:
        """Go on until that time. Returns means over the passes, of requests running and waiting and of blocks used."""
        passes = running = waiting = blocks = 0
        before = self.engine.statistics()
        while self.clock.now() < until:
            self._arrive()
            self._cancel()
            if not self.engine.has_work:
                self.clock.wait_until(min(self._next_arrival, until))
                continue
            self.engine.step()
            after = self.engine.statistics()
            self.clock.passed(after.computed_tokens - before.computed_tokens)
            before = after
            passes += 1
            running, waiting = running + after.running, waiting + after.waiting
            blocks += self.llm.kv_cache.pool.num_used
        return {
            name: total / max(passes, 1)
            for name, total in zip(("running", "waiting", "blocks"), (running, waiting, blocks), strict=True)
        }

    def _arrive(self) -> None:
        while self._next_arrival <= self.clock.now():
            asked = next(self._asked)
            params = SamplingParams(max_tokens=asked.new_tokens, seed=next(self._numbers), ignore_eos=True)
            request = self.llm.new_request(asked.prompt, params)
            self.engine.add(request)
            self.arrived += 1
            if self._random.random() < self._cancelled_share:
                leaves = self._next_arrival + self._random.expovariate(1 / PATIENCE_S)
                heapq.heappush(self._cancellations, (leaves, next(self._numbers), request))
            self._next_arrival += self._random.expovariate(self._rate)

    def _cancel(self) -> None:
        while self._cancellations and self._cancellations[0][0] <= self.clock.now():
            self.engine.cancel(heapq.heappop(self._cancellations)[2])


def slice_row(
    minute: float,
    seconds: float,
    means: dict[str, float],
    arrived: int,
    before: EngineStatistics,
    after: EngineStatistics,
) -> dict[str, Any]:
    """What a slice of `seconds` that ended at `minute` was like."""
    computed = after.computed_tokens - before.computed_tokens
    prompts = after.prompt_tokens - before.prompt_tokens
    return {
        "minute": round(minute, 2),
        "arrived": arrived,
        "cancelled": after.cancelled - before.cancelled,
        "tokens/s": computed / seconds,
        "ms/token": (after.busy_s - before.busy_s) / max(computed, 1) * 1e3,
        **means,
        "waste": after.waste,
        "prefix hits": (after.cached_tokens - before.cached_tokens) / max(prompts, 1),
        "preemptions": after.preemptions - before.preemptions,
        "recomputed": after.recomputed_tokens - before.recomputed_tokens,
        "RSS, MB": resident() / 1e6,
    }


def resident() -> int:
    """Resident memory of this process in bytes; 0 where the system does not tell."""
    try:
        with open("/proc/self/status") as status:
            return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmRSS:"))
    except (OSError, StopIteration):
        return 0


def main() -> None:
    """Run the traffic and tell of each slice."""
    arguments = flags().parse_args()
    context = longest(arguments.prompt_tokens, arguments.new_tokens) + 1
    memory = None if arguments.kv_memory is None else int(arguments.kv_memory * 1e6)
    llm = LLM(
        arguments.model,
        max_context=context,
        threads=arguments.threads,
        kv_memory=memory,
        kv_dtype=arguments.kv_dtype,
        block_size=arguments.block_size,
    )
    llm.generate([1, 2, 3], SamplingParams(max_tokens=2))  # compiles what is missing
    traffic = Traffic(llm, arguments)
    rows = []
    seconds = 60 * arguments.minutes / arguments.slices
    start = time.perf_counter()
    for i in range(1, arguments.slices + 1):
        before, arrived = llm.engine.statistics(), traffic.arrived
        means = traffic.run(i * seconds)
        rows.append(
            slice_row(i * seconds / 60, seconds, means, traffic.arrived - arrived, before, llm.engine.statistics())
        )
    second, last = rows[min(1, len(rows) - 1)], rows[-1]
    ratios = {name: last[name] / second[name] if second[name] else None for name in ("tokens/s", "ms/token", "RSS, MB")}
    report(
        "traffic",
        rows,
        arguments,
        model=arguments.model,
        last_to_second_slice=ratios,
        pool_blocks=llm.kv_cache.pool.num_blocks,
        wall_s=round(time.perf_counter() - start, 1),
    )


def flags() -> Any:
    """The command line."""
    found = parser(__doc__.splitlines()[0])
    found.add_argument("--model", default=DEFAULT_MODEL)
    found.add_argument("--minutes", type=float, default=60, help="of traffic")
    found.add_argument("--slices", type=int, default=12)
    found.add_argument("--rate", type=float, default=2.0, help="arrivals a second")
    found.add_argument("--cancel", type=float, default=0.1, metavar="SHARE", help="of requests that are cancelled")
    found.add_argument("--prompt-tokens", type=int, default=256, help="mean")
    found.add_argument("--new-tokens", type=int, default=128, help="mean")
    found.add_argument("--kv-memory", type=float, metavar="MB", help="small values lead to preemptions")
    found.add_argument("--kv-dtype", default="bf16")
    found.add_argument("--block-size", type=int, default=32)
    found.add_argument("--virtual-clock", action="store_true", help="simulate the time, as fast as it goes")
    found.add_argument("--seed", type=int, default=0)
    return found


if __name__ == "__main__":
    main()
