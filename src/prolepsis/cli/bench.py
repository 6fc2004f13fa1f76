"""`bench`: how fast a model runs here, one request beside other engines, or many at once."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.bench.engines import OURS, installed
from prolepsis.bench.measure import peak_rss
from prolepsis.bench.serving import Serving, serve
from prolepsis.bench.worker import Job, Speed, run_apart
from prolepsis.bench.workload import longest, mixed_requests
from prolepsis.cli.console import (
    JsonOption,
    MemoryOption,
    ModelArgument,
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note,
    print_json,
)
from prolepsis.engine.llm import LLM
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kernels.team import default_threads
from prolepsis.model.pull import DEFAULT_MODEL

_MOST_AT_ONCE = 1024
_REQUESTS_A_PLACE = 4  # the first of a run arrive all at once; it takes some more until it is as in the long run


def bench(
    model: ModelArgument = DEFAULT_MODEL,
    concurrency: Annotated[
        int | None,
        typer.Option(help="Serve so many mixed requests at once instead; lengths are then means, and no peer is run."),
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated after it.")] = 128,
    runs: Annotated[int, typer.Option(help="Measured runs, after one that does not count; medians are reported.")] = 3,
    kv_memory: MemoryOption = None,
    precision: PrecisionOption = "high",
    threads: ThreadsOption = None,
    peers: Annotated[bool, typer.Option(help="Measure the other engines that are installed too.")] = True,
    json_: JsonOption = False,
) -> None:
    """Prefill and decode speed, beside every peer that is installed, on the same file, tokens and threads.

    With --concurrency the engine serves mixed requests instead, whose prompts share a beginning with some others. It
    tells output tokens a second, time to first token, pauses between tokens, and how much of its blocks holds nothing.
    """
    at_least_1 = {"--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens, "--runs": runs}
    if concurrency is not None:
        at_least_1["--concurrency"] = concurrency
    elif kv_memory is not None:
        raise InputError("--kv-memory is for --concurrency: alone, a request has the cache it needs")
    for flag, value in at_least_1.items():
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    if concurrency is not None and concurrency > _MOST_AT_ONCE:
        raise InputError(f"--concurrency must be at most {_MOST_AT_ONCE}, not {concurrency}")
    llm = load(model, kv_memory=kv_memory, precision=precision, threads=threads)
    needed = prompt_tokens + new_tokens + 1 if concurrency is None else longest(prompt_tokens, new_tokens) + 1
    if needed > llm.max_context:
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} lead to {needed} tokens, which exceed the "
            f"context of {llm.max_context}"
        )
    if concurrency is not None:
        _serve(llm, concurrency, prompt_tokens, new_tokens, runs, precision, json_)
        return
    path, vocabulary = str(llm.path), llm.config.vocab_size
    del llm
    # Any tokens will do, as long as they differ; speed does not depend on which.
    prompt = [(7919 * i + 13) % vocabulary for i in range(prompt_tokens)]
    new = [(104729 * i + 11) % vocabulary for i in range(new_tokens)]
    job = Job(OURS[precision], path, threads or default_threads(), prompt, new, runs)
    others = [name for name in installed() if name != job.engine]
    results = _measure(job, [job.engine, *(others if peers else [])])
    file_mb = Path(path).stat().st_size / 1e6
    ours = results.pop(job.engine)
    if json_:
        measured = {name: asdict(speed) for name, speed in results.items()}
        print_json(
            {"model": model, "file_mb": round(file_mb, 1), "precision": precision, **asdict(ours), "peers": measured}
        )
    else:
        _print_table(model, file_mb, {job.engine: ours, **results})


def _measure(job: Job, names: list[str]) -> dict[str, Speed]:
    """Speed by engine; a peer that fails is told of and left out."""
    results: dict[str, Speed] = {}
    with bar("measuring") as on_progress:
        steps = len(names) * (job.runs + 1)
        done = iter(range(1, steps + 1))
        on_progress(0, steps)
        for name in names:
            try:
                results[name] = run_apart(replace(job, engine=name), lambda: on_progress(next(done), steps))
            except ProlepsisError as error:
                if name == job.engine:
                    raise
                note(str(error), "yellow")
    return results


def _print_table(model: str, file_mb: float, speeds: dict[str, Speed]) -> None:
    ours = next(iter(speeds.values()))
    table = Table(title=f"{escape(model)}: {ours.prompt_tokens} + {ours.new_tokens} tokens, {ours.threads} threads")
    for column in ("engine", "prefill tok/s", "decode tok/s", "ratio to ours", "peak RSS"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, speed in speeds.items():
        ratio = f"{speed.prefill_tok_s / ours.prefill_tok_s:.2f} / {speed.decode_tok_s / ours.decode_tok_s:.2f}"
        table.add_row(name, f"{speed.prefill_tok_s:.0f}", f"{speed.decode_tok_s:.0f}", ratio, f"{speed.rss_mb:.0f} MB")
    table.caption = f"model file {file_mb:.0f} MB"
    Console().print(table)


def _serve(
    llm: LLM, concurrency: int, prompt_tokens: int, new_tokens: int, runs: int, precision: str, json_: bool
) -> None:
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
    waste, rss_mb = llm.engine.statistics().waste, peak_rss() / 1e6
    if json_:
        sizes = {
            "concurrency": concurrency,
            "requests": count,
            "prompt_tokens": prompt_tokens,
            "new_tokens": new_tokens,
        }
        figures = {name: round(value, 4) for name, value in asdict(serving).items()}
        engine = {"waste": round(waste, 4), "threads": llm.runner.decoder.threads, "rss_mb": round(rss_mb, 1)}
        print_json({"model": llm.name, "precision": precision, **sizes, **figures, **engine})
        return
    lengths = f"{count} requests of about {prompt_tokens} + {new_tokens} tokens"
    table = Table(title=f"{escape(llm.name)}: {lengths}, {concurrency} at once")
    for column in ("", "p50", "p95"):
        table.add_column(column, justify="right" if column else "left")
    for row in _served(serving, waste):
        table.add_row(*row)
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
