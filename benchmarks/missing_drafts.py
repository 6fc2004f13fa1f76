"""What drafts cost where they never hit: answers at a high temperature, which repeat next to nothing, with `ngram`.

python benchmarks/missing_drafts.py [--model MODEL] [--precision fast] [--runs 5]

The same seeds for all, so the same tokens. `ms` is the time between two tokens: the mean of the middle half of all
that were measured, since the machine's own interruptions are longer than what is looked for. `plain again` is plain
decoding once more: how far two equal things are apart here. `python_ms` is the part outside of the compiled pass.
"""

import time
from collections import defaultdict
from importlib.resources import files
from typing import Any

import numpy as np
from measuring import parser, report

from prolepsis import LLM, SamplingParams
from prolepsis.engine.engine import Engine
from prolepsis.model.pull import DEFAULT_MODEL

CONTENDERS = ("plain", "plain again", "ngram")
ANSWERS, PROMPT, NEW = 4, 150, 250


class Clock:
    """Adds up the seconds spent in a method."""

    def __init__(self, owner: Any, name: str) -> None:
        self.seconds = 0.0
        self._method = getattr(owner, name)
        setattr(owner, name, self._timed)

    def _timed(self, *arguments: Any) -> Any:
        start = time.perf_counter()
        result = self._method(*arguments)
        self.seconds += time.perf_counter() - start
        return result


def steps(
    engine: Engine, llm: LLM, prompt: list[int], seed: int, clock: Clock
) -> tuple[list[tuple[float, float]], Any]:
    """Seconds of each step after the first token, and those outside of the pass; and the request."""
    params = SamplingParams(temperature=1.3, seed=seed, max_tokens=NEW, ignore_eos=True)
    request = llm.new_request(prompt, params)
    engine.add(request)
    while not request.completion.token_ids:
        engine.step()
    found = []
    while engine.has_work:
        inside, start = clock.seconds, time.perf_counter()
        engine.step()
        whole = time.perf_counter() - start
        found.append((whole, whole - (clock.seconds - inside)))
    return found, request


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--precision", default="high")
    found = arguments.parse_args()
    llm = LLM(found.model, draft="ngram", precision=found.precision, threads=found.threads)
    clock = Clock(llm.runner.decoder, "forward")
    tokens = llm.tokenizer.encode((files("prolepsis") / "data" / "kv-cache-guide.md").read_text("utf-8"))
    measured: dict[str, list[tuple[float, float]]] = defaultdict(list)
    drafted, outputs = 0, {}
    for run in range(found.runs + 1):
        for seed in range(ANSWERS):
            for turn in range(len(CONTENDERS)):
                name = CONTENDERS[(turn + run) % len(CONTENDERS)]
                speculation = llm.engine.speculation if name == "ngram" else None
                engine = Engine(llm.runner, None, None, 1, speculation=speculation)
                prompt = tokens[seed * PROMPT : (seed + 1) * PROMPT]
                seconds, request = steps(engine, llm, prompt, seed, clock)
                assert outputs.setdefault(seed, request.completion.token_ids) == request.completion.token_ids
                measured[name] += seconds if run else []
                drafted += sum(request.statistics.drafts.drafted_at)
    means = {name: _middle(measured[name]) for name in CONTENDERS}
    rows = [
        {"contender": name, "ms": ms, "python_ms": python, "speed": means["plain"][0] / ms}
        for name, (ms, python) in means.items()
    ]
    share = drafted / (ANSWERS * NEW * (found.runs + 1))
    report("decoding where drafts never hit", rows, found, precision=found.precision, drafted_share_of_tokens=share)


def _middle(seconds: list[tuple[float, float]]) -> tuple[float, float]:
    """Means of the middle half, in milliseconds: of whole steps, and of what is outside of the pass."""
    values = np.sort(np.array(seconds), axis=0)
    whole, outside = values[len(values) // 4 : -(len(values) // 4)].mean(axis=0) * 1e3
    return float(whole), float(outside)


if __name__ == "__main__":
    main()
