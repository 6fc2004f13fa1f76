"""How long it takes to learn what a slow tier has of a prompt, one segment after the other and several at a time.

python benchmarks/look_ups.py MODEL [--tokens 32768] [--latency 20,50] [--json]

The tier is memory that takes so many milliseconds for each question, and has all of the prompt, a third, or nothing.
Of MODEL only the names of segments are used: a tiny one will do.
"""

import random
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from measuring import numbers, parser, report

from prolepsis import LLM
from prolepsis.engine.kv_store import KVStore
from prolepsis.engine.locating import Several
from prolepsis.store import MemoryTier, Tiers


class SlowTier(MemoryTier):
    """Takes `seconds` for each question."""

    kind = "remote"

    def __init__(self, seconds: float) -> None:
        super().__init__(1 << 30)
        self._seconds = seconds

    def get(self, key: str) -> bytes | None:
        time.sleep(self._seconds)
        return super().get(key)

    def size(self, key: str) -> int | None:
        time.sleep(self._seconds)
        return super().size(key)


def seconds_of(store: KVStore, tokens: list[int], several: Several) -> float:
    """Of a look-up."""
    start = time.perf_counter()
    store.look_up(tokens, "", 0, several=several)
    return time.perf_counter() - start


def rows(llm: LLM, tokens: list[int], milliseconds: int) -> list[dict[str, Any]]:
    """One for each share of the prompt that is stored."""
    tier = SlowTier(milliseconds / 1000)
    store = KVStore(llm, Tiers([tier]))
    names = store.names(tokens, "")
    found = []
    with ThreadPoolExecutor(16) as pool:
        for stored in (0, len(names) // 3, len(names)):
            for name in names[:stored]:
                tier.put(name.key, b"x")
            found.append(
                {
                    "latency ms": milliseconds,
                    "segments": len(names),
                    "stored": stored,
                    "one by one s": seconds_of(store, tokens, map),
                    "several s": seconds_of(store, tokens, pool.map),
                }
            )
    store.close()
    return found


def main() -> None:
    """Measure each latency."""
    flags = parser(__doc__.splitlines()[0])
    flags.add_argument("model")
    flags.add_argument("--tokens", type=int, default=32_768)
    flags.add_argument("--latency", type=numbers, default=[20, 50], help="milliseconds a question takes")
    arguments = flags.parse_args()
    llm = LLM(arguments.model, threads=1)
    tokens = random.Random(1).choices(range(1, 1000), k=arguments.tokens)
    table = [row for latency in arguments.latency for row in rows(llm, tokens, latency)]
    report("look-ups on a slow tier", table, arguments)


if __name__ == "__main__":
    main()
