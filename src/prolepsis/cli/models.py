"""`pull`, `warmup`, `ppl` and `bench`: commands about a model and this machine."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.bench.engines import installed
from prolepsis.bench.measure import Speed
from prolepsis.bench.worker import Job, run_apart
from prolepsis.cli.console import (
    DtypeOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ModelOption,
    ThreadsOption,
    bar,
    load,
    note,
    print_json,
    read_text,
)
from prolepsis.engine.perplexity import measure_perplexity
from prolepsis.engine.warm_up import warm_up
from prolepsis.errors import InputError, ProlepsisError
from prolepsis.kernels.team import default_threads
from prolepsis.model.pull import DEFAULT_MODEL, resolve


def pull(model: ModelArgument = DEFAULT_MODEL) -> None:
    """Fetch a model into the user's cache, if it is not there, and print its path."""
    with bar(f"fetching {model}", unit="bytes") as on_download:
        print(resolve(model, progress=on_download))


def warmup(model: ModelArgument = DEFAULT_MODEL, threads: ThreadsOption = None) -> None:
    """Compile every kernel for this CPU, so that no later command has to."""
    llm = load(model, threads=threads)
    warm_up(llm)
    note("all kernels are compiled")


def ppl(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text file; - is standard input.")],
    model: ModelOption = DEFAULT_MODEL,
    context: Annotated[
        int, typer.Option(help="Tokens in a window; each window is scored from its second token.")
    ] = 2048,
    kv_dtype: DtypeOption = "bf16",
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Perplexity of a text: exp of the mean negative log-likelihood of its tokens."""
    if context < 2:
        raise InputError(f"--context must be at least 2, not {context}")
    content = read_text(text, "TEXT")
    llm = load(model, kv_memory=kv_memory, kv_dtype=kv_dtype, threads=threads)
    window = min(context, llm.max_context)
    with bar("scoring") as on_progress:
        outcome = measure_perplexity(llm.runner, llm.tokenizer.encode(content), window, on_progress)
    if json_:
        print_json({"model": llm.name, "context": window, **outcome._asdict()})
    else:
        print(f"perplexity {outcome.perplexity:.4f} over {outcome.tokens} tokens in windows of {window}")


def bench(
    model: ModelArgument = DEFAULT_MODEL,
    prompt_tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 512,
    new_tokens: Annotated[int, typer.Option(help="Tokens generated after it.")] = 128,
    runs: Annotated[int, typer.Option(help="Measured runs, after one that does not count; medians are reported.")] = 3,
    threads: ThreadsOption = None,
    peers: Annotated[bool, typer.Option(help="Measure the other engines that are installed too.")] = True,
    json_: JsonOption = False,
) -> None:
    """Prefill and decode speed, beside every peer that is installed, on the same file, tokens and threads."""
    for flag, value in (("--prompt-tokens", prompt_tokens), ("--new-tokens", new_tokens), ("--runs", runs)):
        if value < 1:
            raise InputError(f"{flag} must be at least 1, not {value}")
    llm = load(model, threads=threads)
    if prompt_tokens + new_tokens + 1 > llm.max_context:
        raise InputError(
            f"--prompt-tokens {prompt_tokens} and --new-tokens {new_tokens} exceed the context of {llm.max_context}"
        )
    path, vocabulary = str(llm.path), llm.config.vocab_size
    del llm
    names = installed() if peers else ["prolepsis"]
    results: dict[str, Speed] = {}
    with bar("measuring") as on_progress:
        steps = len(names) * (runs + 1)
        done = iter(range(1, steps + 1))
        on_progress(0, steps)
        for name in names:
            # Any tokens will do, as long as they differ; speed does not depend on which.
            prompt = [(7919 * i + 13) % vocabulary for i in range(prompt_tokens)]
            new = [(104729 * i + 11) % vocabulary for i in range(new_tokens)]
            job = Job(name, path, threads or default_threads(), prompt, new, runs)
            try:
                results[name] = run_apart(job, lambda: on_progress(next(done), steps))
            except ProlepsisError as error:
                if name == "prolepsis":
                    raise
                note(str(error), "yellow")
    file_mb = Path(path).stat().st_size / 1e6
    ours = results.pop("prolepsis")
    if json_:
        others = {name: asdict(speed) for name, speed in results.items()}
        print_json({"model": model, "file_mb": round(file_mb, 1), **asdict(ours), "peers": others})
    else:
        _print_table(model, file_mb, ours, results)


def _print_table(model: str, file_mb: float, ours: Speed, peers: dict[str, Speed]) -> None:
    table = Table(title=f"{escape(model)}: {ours.prompt_tokens} + {ours.new_tokens} tokens, {ours.threads} threads")
    for column in ("engine", "prefill tok/s", "decode tok/s", "ratio to ours", "peak RSS"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name, speed in (("prolepsis", ours), *peers.items()):
        ratio = f"{speed.prefill_tok_s / ours.prefill_tok_s:.2f} / {speed.decode_tok_s / ours.decode_tok_s:.2f}"
        table.add_row(name, f"{speed.prefill_tok_s:.0f}", f"{speed.decode_tok_s:.0f}", ratio, f"{speed.rss_mb:.0f} MB")
    table.caption = f"model file {file_mb:.0f} MB"
    Console().print(table)
