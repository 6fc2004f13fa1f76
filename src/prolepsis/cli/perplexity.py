"""`ppl`: perplexity of a text, of one model or of several beside their reference."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.cli.console import (
    DtypeOption,
    EvictOption,
    JsonOption,
    MemoryOption,
    ModelOption,
    PrecisionOption,
    ThreadsOption,
    bar,
    load,
    note_evictions,
    print_json,
    read_text,
)
from prolepsis.engine.llm import LLM
from prolepsis.engine.perplexity import Perplexity, compare, measure_perplexity
from prolepsis.errors import InputError
from prolepsis.model.model_file import open_model
from prolepsis.model.pull import DEFAULT_MODEL, resolve


def ppl(
    text: Annotated[Path, typer.Argument(help="A UTF-8 text file; - is standard input.")],
    model: ModelOption = DEFAULT_MODEL,
    compared: Annotated[
        list[str] | None,
        typer.Option(
            "--compare",
            help="Another model, such as --model quantised, to be told how far its predictions are from those of "
            "--model, the reference. May be repeated; two models are in memory at a time.",
        ),
    ] = None,
    context: Annotated[
        int, typer.Option(help="Tokens in a window; each window is scored from its second token.")
    ] = 2048,
    kv_dtype: DtypeOption = "bf16",
    kv_evict: EvictOption = "none",
    precision: PrecisionOption = "high",
    kv_memory: MemoryOption = None,
    threads: ThreadsOption = None,
    json_: JsonOption = False,
) -> None:
    """Perplexity of a text: exp of the mean negative log-likelihood of its tokens."""
    if context < 2:
        raise InputError(f"--context must be at least 2, not {context}")
    content = read_text(text, "TEXT")

    def loaded(name: str) -> LLM:
        return load(
            name,
            max_context=None if kv_evict == "none" else _within_model(name, context),
            kv_memory=kv_memory,
            kv_dtype=kv_dtype,
            kv_evict=kv_evict,
            precision=precision,
            threads=threads,
        )

    llm = loaded(model)
    window = min(context, llm.max_context)
    tokens = llm.tokenizer.encode(content)
    if not compared:
        with bar("scoring") as on_progress:
            outcome = measure_perplexity(llm.runner, tokens, window, on_progress)
        note_evictions(llm)
        if json_:
            print_json({"model": llm.name, "context": window, "kv_evict": kv_evict, **outcome._asdict()})
        else:
            print(f"perplexity {outcome.perplexity:.4f} over {outcome.tokens} tokens in windows of {window}")
        return
    rows = [_compared(llm, loaded(name), content, tokens, window) for name in compared]
    report = {"context": window, "kv_evict": kv_evict, **rows[0][0], "models": [row for _, row in rows]}
    if json_:
        print_json(report)
    else:
        _print(report)


def _within_model(name: str, context: int) -> int:
    """The window, which budgets of `--kv-evict` are shares of; no more than the model was trained for."""
    with bar(f"fetching {name}", unit="bytes") as on_download:
        model = open_model(resolve(name, progress=on_download))
    return min(context, model.config.max_context)


def _compared(
    llm: LLM, other: LLM, content: str, tokens: list[int], window: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is said of the reference, and of the other model."""
    if other.tokenizer.encode(content) != tokens:
        raise InputError(
            f"--compare: {other.name} makes other tokens of the text than {llm.name}, so they cannot be compared"
        )
    if other.max_context < window:
        raise InputError(f"--compare: the context of {other.name} holds {other.max_context} tokens; give --context")
    with bar(f"scoring {other.name}") as on_progress:
        outcome = compare(llm.runner, other.runner, tokens, window, on_progress)
    note_evictions(other)
    row = {**_row(other, outcome.model), "kl": outcome.kl, "same_top": outcome.same_top}
    return {"tokens": outcome.reference.tokens, "reference": _row(llm, outcome.reference)}, row


def _row(llm: LLM, outcome: Perplexity) -> dict[str, Any]:
    size = llm.model_bytes
    return {
        "model": llm.name,
        "perplexity": outcome.perplexity,
        "nats": outcome.nats,
        "file_bytes": size,
        "bits_per_weight": 8 * size / llm.config.num_weights,
    }


def _print(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['tokens']} tokens in windows of {report['context']}")
    for column in ("model", "perplexity", "mean KL", "same top", "size", "bits a weight"):
        table.add_column(column, justify="left" if column == "model" else "right")
    for row in (report["reference"], *report["models"]):
        kl, same = (f"{row['kl']:.5f}", f"{row['same_top']:.2%}") if "kl" in row else ("reference", "")
        size = (f"{row['file_bytes'] / 1e6:.1f} MB", f"{row['bits_per_weight']:.2f}")
        table.add_row(escape(row["model"]), f"{row['perplexity']:.4f}", kl, same, *size)
    Console().print(table)
