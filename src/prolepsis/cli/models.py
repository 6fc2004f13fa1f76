"""`pull`, `warmup` and `ppl`: commands about a model and this machine."""

from pathlib import Path
from typing import Annotated

import typer

from prolepsis.cli.console import (
    DtypeOption,
    JsonOption,
    MemoryOption,
    ModelArgument,
    ModelOption,
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note,
    print_json,
    read_text,
)
from prolepsis.engine.perplexity import measure_perplexity
from prolepsis.engine.warm_up import warm_up
from prolepsis.errors import InputError
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
    precision: PrecisionOption = "high",
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Perplexity of a text: exp of the mean negative log-likelihood of its tokens."""
    if context < 2:
        raise InputError(f"--context must be at least 2, not {context}")
    content = read_text(text, "TEXT")
    llm = load(model, kv_memory=kv_memory, kv_dtype=kv_dtype, precision=precision, threads=threads)
    window = min(context, llm.max_context)
    with bar("scoring") as on_progress:
        outcome = measure_perplexity(llm.runner, llm.tokenizer.encode(content), window, on_progress)
    if json_:
        print_json({"model": llm.name, "context": window, **outcome._asdict()})
    else:
        print(f"perplexity {outcome.perplexity:.4f} over {outcome.tokens} tokens in windows of {window}")
