"""`bench`: how fast a model runs here: one request beside other engines, many at once, or with drafts."""

from dataclasses import asdict, replace
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.bench.engines import OURS, installed
from prolepsis.bench.worker import Job, Speed, run_apart
from prolepsis.bench.workload import longest
from prolepsis.cli.bench_drafting import bench_drafting
from prolepsis.cli.bench_serving import bench_serving
from prolepsis.cli.console import (
    DraftOption,
    DraftTokensOption,
    EvictOption,
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
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kernels.team import default_threads
from prolepsis.model.pull import DEFAULT_MODEL

_MOST_AT_ONCE = 1024


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
    kv_evict: EvictOption = "none",
    precision: PrecisionOption = "high",
    draft: DraftOption = "none",
    draft_tokens: DraftTokensOption = "auto",
    threads: ThreadsOption = None,
    peers: Annotated[bool, typer.Option(help="Measure the other engines that are installed too.")] = True,
    json_: JsonOption = False,
) -> None:
    """Prefill and decode speed, beside every peer that is installed, on the same file, tokens and threads.

    With --concurrency the engine serves mixed requests instead, whose prompts share a beginning with some others. It
    tells output tokens a second, time to first token, pauses between tokens, and how much of its blocks holds nothing.

    With --draft it answers questions whose answers quote much of them, with drafts and without, and tells what drafts
    gain, and how many are accepted.
    """
    at_least_1 = {"--prompt-tokens": prompt_tokens, "--new-tokens": new_tokens, "--runs": runs}
    if concurrency is not None:
        at_least_1["--concurrency"] = concurrency
    elif kv_memory is not None or kv_evict != "none":
        raise InputError("--kv-memory and --kv-evict are for --concurrency: alone, a request has the cache it needs")
    for flag, value in at_least_1.items():
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    if concurrency is not None and concurrency > _MOST_AT_ONCE:
        raise InputError(f"--concurrency must be at most {_MOST_AT_ONCE}, not {concurrency}")
    llm = load(
        model,
        kv_memory=kv_memory,
        kv_evict=kv_evict,
        precision=precision,
        draft=draft,
        draft_tokens=draft_tokens,
        threads=threads,
    )
    needed = prompt_tokens + new_tokens + 1 if concurrency is None else longest(prompt_tokens, new_tokens) + 1
    if needed > llm.max_context and (draft == "none" or concurrency is not None):
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} lead to {needed} tokens, which exceed the "
            f"context of {llm.max_context}"
        )
    if concurrency is not None:
        bench_serving(llm, concurrency, prompt_tokens, new_tokens, runs, precision, json_)
        return
    if draft != "none":
        bench_drafting(llm, new_tokens, runs, precision, json_)
        return
    path, vocabulary, file_mb = str(llm.path), llm.config.vocab_size, llm.model_bytes / 1e6
    del llm
    # Any tokens will do, as long as they differ; speed does not depend on which.
    prompt = [(7919 * i + 13) % vocabulary for i in range(prompt_tokens)]
    new = [(104729 * i + 11) % vocabulary for i in range(new_tokens)]
    job = Job(OURS[precision], path, threads or default_threads(), prompt, new, runs)
    others = [name for name in installed() if name != job.engine]
    results = _measure(job, [job.engine, *(others if peers else [])])
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
