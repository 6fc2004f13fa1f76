"""What is lost where long sequences forget: heavy hitters beside recent tokens alone, against the full cache.

python benchmarks/kv_evict.py TEXT [--model MODEL] [--context 2048] [--windows 3] [--shares 12.5,25,50]

Each window of the text is scored as it is read, with all tokens in the cache, and with so large a share of the window:
by `--kv-evict h2o`; the most recent tokens alone, a sliding window; the same with the first 32 tokens, which take the
attention that has nowhere to go (StreamingLLM, Xiao et al. 2023, arXiv:2309.17453). KL is from the full cache, in nats
a token, over all tokens, those before the budget is full among them.
"""

from pathlib import Path
from typing import Any

from measuring import parser, report

from prolepsis import LLM
from prolepsis.engine.perplexity import compare
from prolepsis.engine.runner import Runner
from prolepsis.kv.eviction import UNIT, Eviction
from prolepsis.model.pull import DEFAULT_MODEL


def policies(share: float, context: int) -> dict[str, Eviction]:
    """By name. Attention finds the first tokens where there is but one other unit to choose."""
    heavy = Eviction.named(f"h2o:{share}%", context)
    return {
        "h2o": heavy,
        "first and recent": Eviction(heavy.budget, heavy.budget - 2 * UNIT),
        "recent": Eviction(heavy.budget, heavy.budget - UNIT),
    }


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
    full = Runner(llm.runner.decoder, llm.kv_cache)
    rows: list[dict[str, Any]] = []
    for share in map(float, given.shares.split(",")):
        for name, policy in policies(share, given.context).items():
            outcome = compare(full, Runner(llm.runner.decoder, llm.kv_cache, policy), tokens, given.context)
            if not rows:
                rows.append({"budget": given.context, "kept": "all", **figures(outcome.reference.perplexity, 0.0, 1.0)})
            measured = figures(outcome.model.perplexity, outcome.kl, outcome.same_top)
            rows.append({"budget": policy.budget, "kept": name, **measured})
    report("tokens that are forgotten", rows, given, model=llm.name, tokens=len(tokens), context=given.context)


def figures(perplexity: float, kl: float, same_top: float) -> dict[str, float]:
    """A row's, by name."""
    return {"perplexity": perplexity, "mean KL": kl, "same top": same_top}


if __name__ == "__main__":
    main()
