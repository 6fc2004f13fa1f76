"""`demo`: the whole job on a real model, in a minute."""

from dataclasses import asdict

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from prolepsis.cli.console import JsonOption, ModelArgument, ThreadsOption, bar, load, note, print_json, show
from prolepsis.demo.run import QUESTION, DemoResult, run
from prolepsis.errors import ProlepsisError
from prolepsis.model.pull import DEFAULT_MODEL


def demo(model: ModelArgument = DEFAULT_MODEL, threads: ThreadsOption = None, json_: JsonOption = False) -> None:
    """Ask a model about a document; save its KV cache losslessly coded; restore it in a new process and compare.

    save: reading the cache, coding, writing and syncing the file. restore: reading the file, decoding, checking, and
    writing the cache of the new process. Both without loading compiled code. prefill instead: computing the same cache
    from the tokens again. "sample": a slow coder that saw 4 MiB of the data.
    """
    llm = load(model, threads=threads)
    console = Console(quiet=json_)
    console.print("A guide to KV caches of about 1,400 tokens ships with this package.")
    console.print(f"[bold]> {QUESTION}[/bold]")
    with bar("reading the guide") as on_prefill:
        result = run(
            llm,
            threads,
            on_prefill,
            lambda text: None if json_ else show(text),
            lambda step: None if json_ else note(f"{step} ...", "dim"),
        )
    if json_:
        print_json(asdict(result))
    else:
        console.print(_table(result))
    if not (result.bit_identical and result.same_continuation):
        raise ProlepsisError("the restored session differs from the original; please report this")


def _table(result: DemoResult) -> Table:
    table = Table(
        title=f"{escape(result.model)}: a session of {result.tokens} tokens, saved and restored in a new process"
    )
    table.add_column("what")
    table.add_column("value", justify="right")
    rows = [
        ("KV cache, raw", f"{result.raw_bytes / 1e6:.2f} MB"),
        (f"coded ({result.predictor})", f"{result.coded_bytes / 1e6:.2f} MB"),
        ("ratio", f"[bold]{result.ratio:.3f}[/bold]"),
        *((f"ratio of {name}", f"{ratio:.3f}") for name, ratio in result.others.items()),
        ("every bit restored", "yes" if result.bit_identical else "[red]NO[/red]"),
        ("same continuation", "yes" if result.same_continuation else "[red]NO[/red]"),
        ("save", f"{result.save_s:.3f} s"),
        ("restore", f"{result.restore_s:.3f} s"),
        ("prefill instead", f"{result.prefill_s:.3f} s"),
    ]
    for row in rows:
        table.add_row(*row)
    return table
