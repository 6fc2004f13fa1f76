"""What is lost where long sequences forget: heavy hitters beside recent tokens alone, against the full cache.

python benchmarks/kv_evict.py TEXT [--model MODEL] [--context 2048] [--windows 3] [--shares 12.5,25,50]

Each window of the text is scored as it is read, with all tokens in the cache, and with so large a share of the window:
by `--kv-evict h2o`; the most recent tokens alone, a sliding window; the same with the first 32 tokens, which take the
attention that has nowhere to go (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453). KL is from the full cache, in nats
a token, over all tokens, those before the budget is full among them.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from measuring import parser, report
from numpy.typing import NDArray

from prolepsis import LLM
from prolepsis.engine.runner import Runner
from prolepsis.kv.eviction import UNIT, Eviction
from prolepsis.model.pull import DEFAULT_MODEL

Floats = NDArray[np.float32]


def policies(share: float, context: int) -> dict[str, Eviction]:
    """By name. Where attention has but two units to choose from, it finds the first tokens; where one, nothing."""
    heavy = Eviction.named(f"h2o:{share}%", context)
    return {
        "h2o": heavy,
        "first and recent": Eviction(heavy.budget, heavy.budget - 2 * UNIT),
        "recent": Eviction(heavy.budget, heavy.budget - UNIT),
    }


def log_probabilities(runner: Runner, tokens: list[int]) -> Iterator[tuple[int, Floats]]:
    """Where a chunk begins, and the log-probabilities after each of its tokens."""
    sequence = runner.new_sequence(tokens)
    while sequence.num_pending:
        start, logits = sequence.num_cached, runner.all_logits(sequence)
        logits -= logits.max(axis=1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=1, keepdims=True))
        yield start, logits
    sequence.release()


def score(found: Floats, exact: Floats, following: NDArray[np.int64]) -> NDArray[np.float64]:
    """Sums over the tokens that follow: nats of surprise, KL from `exact`, same likeliest tokens, and their number."""
    found, exact = found[: len(following)], exact[: len(following)]
    surprise = -found[np.arange(len(following)), following].sum(dtype=np.float64)
    kl = (np.exp(exact) * (exact - found)).sum(dtype=np.float64)
    same = (found.argmax(axis=1) == exact.argmax(axis=1)).sum()
    return np.array([surprise, kl, same, len(following)], np.float64)


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("text", type=Path)
    arguments.add_argument("--model", default=DEFAULT_MODEL)
    arguments.add_argument("--context", type=int, default=2048)
    arguments.add_argument("--windows", type=int, default=3, help="how many windows of the text are read")
    arguments.add_argument("--shares", default="12.5,25,50", help="budgets, in percent of the context")
    given = arguments.parse_args()
    llm = LLM(given.model, max_context=given.context, kv_evict="h2o:100%", threads=given.threads)
    tokens = llm.tokenizer.encode(given.text.read_text())[: given.windows * given.context]
    runners = {(given.context, "all"): Runner(llm.runner.decoder, llm.kv_cache)}
    for share in map(float, given.shares.split(",")):
        for name, policy in policies(share, given.context).items():
            runners[policy.budget, name] = Runner(llm.runner.decoder, llm.kv_cache, policy)
    sums = {key: np.zeros(4) for key in runners}
    for first in range(0, len(tokens) - 1, given.context):
        window = tokens[first : first + given.context]
        following = np.array(window[1:], np.int64)
        exact = np.empty((len(window), llm.config.vocab_size), np.float32)
        for key, runner in runners.items():
            for start, found in log_probabilities(runner, window):
                stop = start + len(found)
                if key[1] == "all":
                    exact[start:stop] = found
                sums[key] += score(found, exact[start:stop], following[start:stop])
    rows: list[dict[str, Any]] = []
    for (budget, name), (surprise, kl, same, count) in sums.items():
        measured = {"perplexity": float(np.exp(surprise / count)), "mean KL": kl / count, "same top": same / count}
        rows.append({"budget": budget, "kept": name, **measured})
    report("tokens that are forgotten", rows, given, model=llm.name, tokens=len(tokens), context=given.context)


if __name__ == "__main__":
    main()
