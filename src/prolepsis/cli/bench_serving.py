"""`bench --concurrency`: many requests at once."""

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.bench.measure import peak_rss
from prolepsis.bench.serving import Serving, serve
from prolepsis.bench.workload import mixed_requests
from prolepsis.cli.console import bar, print_json
from prolepsis.engine.llm import LLM

_REQUESTS_A_PLACE = 4  # the first of a run arrive all at once; it takes some more until it is as in the long run


def bench_serving(
    llm: LLM, concurrency: int, prompt_tokens: int, new_tokens: int, runs: int, precision: str, json_: bool
) -> None:
    """Serve mixed requests, and print what came of it."""
    count = _REQUESTS_A_PLACE * concurrency
    asked = mixed_requests(llm.config.vocab_size, prompt_tokens, new_tokens, seed=0)
    with bar("serving") as on_progress:
        steps = count * (runs + 1)
        done = iter(range(1, steps + 1))
        on_progress(0, steps)
        served = [
            serve(llm, asked, count, concurrency, lambda: on_progress(next(done), steps)) for _ in range(runs + 1)
        ]
    serving = Serving.median(served[1:])
    total = llm.engine.statistics()
    waste, evicted, drafts, rss_mb = total.waste, total.evicted_tokens, total.drafts, peak_rss() / 1e6
    if json_:
        sizes = {
            "concurrency": concurrency,
            "requests": count,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        }
        figures = {name: round(value, 4) for name, value in asdict(serving).items()}
        engine = {
            "waste": round(waste, 4),
            "evicted_tokens": evicted,
            "threads": llm.runner.decoder.threads,
            "rss_mb": round(rss_mb, 1),
        }
        print_json({"model": llm.name, "precision": precision, **sizes, **figures, **engine, **drafts.summary()})
        return
    lengths = f"{count} requests of about {prompt_tokens} + {new_tokens} tokens"
    table = Table(title=f"{escape(llm.name)}: {lengths}, {concurrency} at once")
    for column in ("", "p50", "p95"):
        table.add_column(column, justify="right" if column else "left")
    for row in _served(serving, waste):
        table.add_row(*row)
    if evicted:
        table.add_row("tokens dropped from the cache, in all runs", f"{evicted:,}")
    if drafts.rounds:
        table.add_row("drafted tokens that were accepted", f"{sum(drafts.accepted_at) / sum(drafts.drafted_at):.1%}")
    table.caption = f"{llm.runner.decoder.threads} threads, peak RSS {rss_mb:.0f} MB"
    Console().print(table)


def _served(serving: Serving, waste: float) -> list[tuple[str, ...]]:
    return [
        ("output tokens a second", f"{serving.output_tok_s:,.0f}"),
        ("prompt and output tokens a second", f"{serving.total_tok_s:,.0f}"),
        ("time to first token, ms", f"{serving.ttft_p50_ms:,.1f}", f"{serving.ttft_p95_ms:,.1f}"),
        ("between tokens, ms", f"{serving.inter_token_p50_ms:,.1f}", f"{serving.inter_token_p95_ms:,.1f}"),
        ("prompt tokens found in the cache", f"{serving.cached_share:.1%}"),
        ("slots of used blocks that hold no token", f"{waste:.2%}"),
        ("preemptions", f"{serving.preemptions:,.0f}"),
    ]
